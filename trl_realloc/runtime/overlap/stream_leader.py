"""`StreamLeader`: rank 0's part of a streamed phase. It passes the ranks' events to the `Dispatcher`, and the resulting
orders to the ranks.

The ranks' part is in `stream_worker`.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers.utils import logging

from ...engines.requests import Unfinished
from ...planner.iteration.stream import Stream
from ...planner.iteration.stream_dispatcher import Continue, Dispatcher, Order, Release, Score, Withdraw
from ..calls.batch import CallFailure, Failures
from ..messages import Channels
from ..samples.routes import RESULTS
from .leader_link import Leader, LeaderLink, Left
from .stream_forwards import ForwardSamples
from .stream_messages import (
    End,
    Event,
    Failed,
    Finished,
    GoOn,
    Joined,
    Scored,
    Task,
    Withdrawn,
)


logger = logging.get_logger(__name__)
StreamLink = LeaderLink[Event, Task]


class StreamLeader(Leader[Event, Task]):
    """Answers the ranks of a streamed phase, from its construction on.

    Args:
        dispatcher: a new dispatcher of `stream`.
    """

    def __init__(self, channels: Channels, stream: Stream, dispatcher: Dispatcher) -> None:
        super().__init__(channels, stream.ranks)
        self.stream, self.dispatcher = stream, dispatcher
        self.orders: list[Order] = []
        self._engines = stream.generation.engines
        self._samples = ForwardSamples(stream)
        self._withdrawn: dict[int, Unfinished] = {}
        self._has_ended = False
        self.listen(len(stream.ranks - {RESULTS}), "stream-leader")

    def report(self, event: Event) -> None:
        """Handle an event of a rank."""
        with self._lock:
            if self._has_ended or isinstance(event, Left):
                return
            if isinstance(event, Failed):
                self._end(event.failures)
                return
            try:
                for order in self._orders_after(event):
                    self.orders.append(order)
                    self._give(order)
            except Exception as error:  # a defect of this package; the ranks wait for orders, so they must learn of it
                logger.exception("the leader of the streams failed")
                after = type(event).__name__
                problem = f"rank 0 failed to schedule the next task: after {after}, {type(error).__name__}: {error}"
                self._end((CallFailure(RESULTS, self.stream.generation.name, problem),))
                return
            if self.dispatcher.is_finished:
                self._end(())

    def _end(self, failures: Failures) -> None:
        self._has_ended = True
        for rank in self.ranks:
            self.send(rank, End(failures))

    def _orders_after(self, event: Event) -> Sequence[Order]:
        match event:
            case Joined(rank):
                return self.dispatcher.join(rank)
            case Finished(engine, tokens, rows):
                self._samples.add(self.stream.generation.name, rows)
                return self.dispatcher.finish(engine, list(tokens.items()))
            case Withdrawn(engine, samples):
                self._withdrawn.update({sample.index: sample for sample in samples})
                return self.dispatcher.withdraw(engine, [sample.index for sample in samples])
            case Scored(number, rows):
                return self.dispatcher.scored(number) if self._samples.scored(number, rows) else []
        raise AssertionError(f"{event} is no event that orders follow from")

    def _give(self, order: Order) -> None:
        match order:
            case Score():
                for rank, forward in self._samples.forwards(order):
                    self.send(rank, forward)
            case Continue(engine, samples):
                begun = tuple(self._withdrawn.pop(index) for index in samples)
                self.send(self._engines[engine][0], GoOn(begun))
            case Withdraw(engine):
                self.send(self._engines[engine][0], order)
            case Release(engine):
                for rank in self._engines[engine]:
                    self.send(rank, order)
