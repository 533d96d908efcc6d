"""`AheadOrder`: the order of the calls on the devices that run ahead of the training (`plan.staleness`).

A state machine without clock and communication, like `stream_dispatcher`: rank 0 tells it what ranks report, the
simulation what it expects. Every rank runs its orders in the order in which they were given, so that calls with
collectives, and updates of parameters, never wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...plan.execution_plan import ExecutionPlan
from ...plan.staleness import calls_ahead, devices_ahead


@dataclass(frozen=True)
class RunCall:
    """Run a call on the samples of an iteration. What it reads has been sent."""

    iteration: int
    call: str


@dataclass(frozen=True)
class TakeUpdate:
    """Take the generation's parameters after the training of an iteration. Its trainers are sending them."""

    iteration: int


@dataclass(frozen=True)
class EndIteration:
    """All calls of the iteration have been run."""

    iteration: int


AheadTask = RunCall | TakeUpdate | EndIteration


@dataclass
class _CallState:
    """Progress of a call.

    Args:
        sources: ranks that publish its outputs.
        next: first iteration for which it has not been ordered.
        done: ranks that have published its outputs, by iteration.
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
    """

    def __init__(self, plan: ExecutionPlan, sources: Mapping[str, tuple[int, ...]], first: int) -> None:
        graph = plan.graph
        generate, *scoring = calls_ahead(graph)
        train = graph.train_call(graph.call(generate).role)
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
        self._scoring = [name for name in on_devices if name in scoring]
        self._current = [name for name in on_devices if name not in (generate, *scoring)]  # of the training's iteration
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
        if call == self._train:
            if not self._has_updated and not failed:
                orders.append(TakeUpdate(iteration))
            self._has_updated = True
        return [*orders, *self._orders()]

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
        if self._has_updated and all(state.is_done(self.iteration) for state in self._calls.values()):
            self._is_open = False
            for state in self._calls.values():
                state.done.pop(self.iteration, None)
            orders.append(EndIteration(self.iteration))
        return orders

    def _next(self) -> RunCall | None:
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
        return RunCall(iteration, self._scoring[at])

    def _can_run(self, iteration: int, name: str) -> bool:
        return all(self._calls[producer].is_done(iteration) for producer in self._producers[name])
