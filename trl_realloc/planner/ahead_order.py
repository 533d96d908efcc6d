"""`AheadOrder`: the order of the calls on the devices that run ahead of the training (`plan.staleness`).

A state machine without clock and communication, like `dispatcher`: rank 0 tells it what ranks report, the simulation
what it expects. Every rank runs its orders in the order in which they were given, so that calls with collectives, and
updates of parameters, never wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..plan.execution_plan import ExecutionPlan
from ..plan.staleness import calls_ahead, devices_ahead
from .dispatcher import DEPTH, Dispatcher, Score
from .free_teams import FreeTeams
from .stream import Stream


@dataclass(frozen=True)
class RunCall:
    """Run a call on the samples of an iteration. What it reads has been sent."""

    iteration: int
    call: str


@dataclass(frozen=True)
class ScoreSamples:
    """Run one forward of a streamed call on samples of an iteration."""

    iteration: int
    score: Score


@dataclass(frozen=True)
class EndScoring:
    """A streamed call has scored all samples of an iteration; or one of its calls has failed."""

    iteration: int
    call: str
    failed: bool = False


@dataclass(frozen=True)
class TakeUpdate:
    """Take the generation's parameters after the training of an iteration. Its trainers are sending them."""

    iteration: int


@dataclass(frozen=True)
class EndIteration:
    """All calls of the iteration have been run."""

    iteration: int


AheadTask = RunCall | ScoreSamples | EndScoring | TakeUpdate | EndIteration


@dataclass
class _CallState:
    """What has happened to a call.

    Args:
        sources: the ranks that publish its outputs.
        next: the first iteration for which it has not been ordered.
        done: by iteration, the ranks that have published.
    """

    sources: frozenset[int]
    next: int
    done: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def is_done(self, iteration: int) -> bool:
        return self.done[iteration] >= self.sources


class AheadOrder:
    """Each method that reports an event returns the orders that follow from it.

    Args:
        plan: with a staleness.
        sources: by call, the ranks that publish its outputs.
        first: the first iteration.
        stream: of an iteration's samples, by its number, if samples are scored as they end. By default the plan's
            streamed calls wait for whole batches too.

    Attributes:
        generate: the call that generates.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        sources: Mapping[str, tuple[int, ...]],
        first: int,
        stream: Callable[[int], Stream] | None = None,
    ) -> None:
        graph = plan.graph
        self._ahead = calls_ahead(graph)
        self.generate = self._ahead[0]
        train = graph.train_call(graph.call(self.generate).role)
        assert train is not None, "the role that generates is trained"
        self._train, self._versions = train, plan.staleness.versions
        self._producers = {
            name: tuple(filter(None, dict.fromkeys(map(graph.producer, graph.call(name).inputs))))
            for name in plan.order
        }
        self._plan = plan
        self._calls = {name: _CallState(frozenset(sources[name]), first) for name in plan.order}
        devices = devices_ahead(graph, plan.assignments)
        on_devices = [name for name in plan.order if devices.issuperset(plan.mesh(name).devices)]
        self._scoring = [name for name in on_devices if name in self._ahead and name != self.generate]
        self._current = [name for name in on_devices if name not in self._ahead]  # of the iteration that trains
        self._stream, self._streamed = stream, frozenset(plan.streamed[1:] if stream is not None else ())
        self._dispatchers: dict[int, Dispatcher] = {}  # by iteration
        self._teams: FreeTeams | None = None
        self._failed: set[int] = set()  # iterations of which a call ahead has failed
        self.iteration = first - 1
        self._is_open = self._has_updated = False

    def begin(self, iteration: int) -> list[AheadTask]:
        """The training of an iteration begins."""
        self.iteration, self._is_open, self._has_updated = iteration, True, False
        for name in self._current:
            self._calls[name].next = iteration
        return self._orders()

    def done(self, iteration: int, call: str, rank: int, *, failed: bool = False) -> list[AheadTask]:
        """A rank has published its part of a call's outputs, or the call's failure."""
        self._calls[call].done[iteration].add(rank)
        orders: list[AheadTask] = []
        if failed and call in self._ahead:
            self._failed.add(iteration)
        if call == self._train:
            if not self._has_updated and not failed:
                orders.append(TakeUpdate(iteration))
            self._has_updated = True
        return [*orders, *self._orders()]

    def generated(self, iteration: int, engine: int, samples: Sequence[tuple[int, int]]) -> list[AheadTask]:
        """Samples have ended, in a run that streams.

        Args:
            samples: (index, tokens of the response) of each.
        """
        self._dispatcher(iteration).finish(engine, samples, scores=False)
        return self._orders()

    def scored(self, iteration: int, number: int) -> list[AheadTask]:
        """All ranks of a team have run the forward of this number."""
        dispatcher = self._dispatchers.get(iteration)
        if dispatcher is not None and dispatcher.is_open(number):  # otherwise scoring failed meanwhile
            dispatcher.end_forward(number)
        return self._orders()

    def scoring_failed(self, iteration: int) -> list[AheadTask]:
        """A forward has failed. The iteration's other forwards hold no team back from later iterations."""
        self._failed.add(iteration)
        if iteration in self._dispatchers:
            self._dispatchers[iteration].abandon()
        return self._orders()

    def devices_of(self, call: str) -> tuple[int, ...]:
        """The ranks that run a call."""
        return tuple(self._plan.mesh(call).devices)

    def _orders(self) -> list[AheadTask]:
        if not self._is_open:
            return []
        orders: list[AheadTask] = []
        while (order := self._next()) is not None:
            orders.append(order)
            self._calls[order.call].next += 1
        orders += self._scores()
        if self._has_updated and all(state.is_done(self.iteration) for state in self._calls.values()):
            self._is_open = False
            for state in self._calls.values():
                state.done.pop(self.iteration, None)
            self._dispatchers.pop(self.iteration, None)
            self._failed.discard(self.iteration)
            orders.append(EndIteration(self.iteration))
        return orders

    def _dispatcher(self, iteration: int) -> Dispatcher:
        if iteration not in self._dispatchers:
            assert self._stream is not None and self._plan.streams is not None, "a run that streams"
            stream = self._stream(iteration)
            self._teams = self._teams or FreeTeams(stream, DEPTH)
            made = Dispatcher(stream, deterministic=self._plan.streams.deterministic, teams=self._teams)
            for rank in sorted(stream.ranks):  # whose parameters never change
                made.join(rank)
            self._dispatchers[iteration] = made
        return self._dispatchers[iteration]

    def _scores(self) -> list[AheadTask]:
        """Forwards for the ranks that are free, of the earliest samples."""
        return [
            ScoreSamples(iteration, order)
            for iteration in sorted(self._dispatchers)
            if iteration not in self._failed
            for order in self._dispatchers[iteration].scores()
        ]

    def _next(self) -> RunCall | EndScoring | None:
        """The next call of the iteration that trains, in the plan's order, and otherwise the scoring of the earliest
        samples."""
        for name in self._current:
            if self._calls[name].next == self.iteration:
                if self._can_run(self.iteration, name):
                    return RunCall(self.iteration, name)
                break  # ranks that train send the parameters of these calls one after the other
        ready = [
            (self._calls[name].next, at)
            for at, name in enumerate(self._scoring)
            if self._calls[name].next <= self.iteration + self._versions + 1
            and self._can_run(self._calls[name].next, name)
        ]
        if not ready:
            return None
        iteration, at = min(ready)
        name = self._scoring[at]
        if name in self._streamed:
            return EndScoring(iteration, name, iteration in self._failed)
        return RunCall(iteration, name)

    def _can_run(self, iteration: int, name: str) -> bool:
        if name in self._streamed:
            dispatcher = self._dispatchers.get(iteration)
            return iteration in self._failed or (dispatcher is not None and dispatcher.is_finished)
        return all(self._calls[producer].is_done(iteration) for producer in self._producers[name])
