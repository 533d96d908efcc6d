"""`AheadLeader`: rank 0's part of an iteration in which calls run ahead of the training. It passes what ranks report to
`planner.ahead_order.AheadOrder`, and the orders that follow from it to the ranks.

What the ranks do is in `ahead_runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..planner.ahead_order import AheadOrder, AheadTask, EndIteration, EndScoring, RunCall, ScoreSamples, TakeUpdate
from ..planner.stream import Stream
from .leader_link import Leader, LeaderLink, Left
from .messages import Messages
from .stream_forwards import ForwardSamples
from .stream_messages import Finished, Forward, Scored


@dataclass(frozen=True)
class Done:
    """A rank has published its part of a call's outputs, or the call's failure."""

    iteration: int
    call: str
    rank: int
    failed: bool = False


@dataclass(frozen=True)
class OfIteration:
    """What is said about samples of an iteration that are scored as they end.

    Args:
        content: as in a streamed phase.
    """

    iteration: int
    content: Finished | Scored | Forward


@dataclass(frozen=True)
class ScoringFailed:
    """A forward of an iteration's samples has failed on a rank."""

    iteration: int


AheadEvent = Done | OfIteration | ScoringFailed | Left
RankTask = RunCall | EndScoring | TakeUpdate | EndIteration | OfIteration
AheadLink = LeaderLink[AheadEvent, RankTask]


class SamplesAhead:
    """What rank 0 knows of the iterations whose samples are scored as they end.

    Args:
        stream_of: the streamed calls of an iteration, by its number.
    """

    def __init__(self, stream_of: Callable[[int], Stream]) -> None:
        self._stream_of = stream_of
        self._streams: dict[int, Stream] = {}
        self._samples: dict[int, ForwardSamples] = {}

    def stream(self, iteration: int) -> Stream:
        if iteration not in self._streams:
            self._streams[iteration] = self._stream_of(iteration)
        return self._streams[iteration]

    def of(self, iteration: int) -> ForwardSamples:
        """The samples of an iteration."""
        if iteration not in self._samples:
            self._samples[iteration] = ForwardSamples(self.stream(iteration))
        return self._samples[iteration]

    def forget(self, iteration: int) -> None:
        """The iteration has ended."""
        self._streams.pop(iteration, None)
        self._samples.pop(iteration, None)


class AheadLeader(Leader[AheadEvent, RankTask]):
    """Answers the ranks during one iteration.

    Args:
        messages: of rank 0.
        tag: of the events; the orders have `tag + 1`.
        order: of the run.
        ranks: those that run ahead, which get orders.
        world: the number of ranks of the job, which all report.
        iteration: that trains.
        samples: of all iterations, if they are scored as they end.
    """

    def __init__(
        self,
        messages: Messages,
        tag: int,
        order: AheadOrder,
        ranks: Collection[int],
        world: int,
        iteration: int,
        samples: SamplesAhead | None = None,
    ) -> None:
        super().__init__(messages, tag, ranks)
        self.order, self.samples = order, samples
        with self._lock:
            self._give(order.begin(iteration))
        self.listen(world - 1, "ahead-leader")

    def report(self, event: AheadEvent) -> None:
        """Something has happened on a rank."""
        with self._lock:
            self._give(self._orders_after(event))

    def _orders_after(self, event: AheadEvent) -> Sequence[AheadTask]:
        match event:
            case Done(iteration, call, rank, failed):
                return self.order.done(iteration, call, rank, failed=failed)
            case ScoringFailed(iteration):
                return self.order.scoring_failed(iteration)
            case OfIteration(iteration, Finished(engine, tokens, rows)):
                self._samples(iteration).add(self.order.generate, rows)
                return self.order.generated(iteration, engine, list(tokens.items()))
            case OfIteration(iteration, Scored(number, rows)):
                return self.order.scored(iteration, number) if self._samples(iteration).scored(number, rows) else []
        return []

    def _samples(self, iteration: int) -> ForwardSamples:
        assert self.samples is not None, "a run that scores samples as they end"
        return self.samples.of(iteration)

    def _give(self, orders: Sequence[AheadTask]) -> None:
        for order in orders:
            if isinstance(order, ScoreSamples):
                for rank, forward in self._samples(order.iteration).forwards(order.score):
                    self.send(rank, OfIteration(order.iteration, forward))
                continue
            for rank in self.order.devices_of(order.call) if isinstance(order, RunCall | EndScoring) else self.ranks:
                self.send(rank, order)
            if isinstance(order, EndIteration) and self.samples is not None:
                self.samples.forget(order.iteration)
