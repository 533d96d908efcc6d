"""`AheadOrder`: the order of the calls on the devices that run ahead of the training (`plan.staleness`).

A state machine without clock and communication, like `stream_dispatcher`. Rank 0 feeds it the reports of the ranks, the
simulation feeds it simulated events. Every rank runs its orders in sequence, so that calls with collectives and updates
of parameters cannot deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...plan.execution_plan import ExecutionPlan
from ...plan.staleness import calls_ahead, devices_ahead


@dataclass(frozen=True)
class RunCall:
    """Run a call on the samples of an iteration. Its inputs have been sent."""

    iteration: int
    call: str


@dataclass(frozen=True)
class TakeUpdate:
    """Receive the generation's parameters after the training of an iteration. The training ranks are sending them."""

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
        next: first iteration for which no `RunCall` has been issued.
        done: ranks that have published its outputs, by iteration.
    """

    sources: frozenset[int]
    next: int
    done: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def is_done(self, iteration: int) -> bool:
        return self.done[iteration] >= self.sources


class AheadOrder:
    """Orders the calls ahead of the training. Each method that reports an event returns the resulting orders.

    Args:
        plan: plan with a staleness.
        sources: ranks that publish the outputs of each call.
        first: index of the first iteration.
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
        # calls on these devices that belong to the iteration that trains
        self._current = [name for name in on_devices if name not in (generate, *scoring)]
        self.iteration = first - 1
        self._is_open = self._has_updated = False

    def begin(self, iteration: int) -> list[AheadTask]:
        """The training of an iteration begins."""
        self.iteration, self._is_open, self._has_updated = iteration, True, False
        for name in self._current:
            self._calls[name].next = iteration
        return self._orders()

    def done(self, iteration: int, call: str, rank: int, *, failed: bool = False) -> list[AheadTask]:
        """A rank has published its part of a call's outputs, or that the call failed."""
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
        """The next call of the iteration that trains, in the plan's order, or else the scoring of the oldest batch."""
        for name in self._current:
            if self._calls[name].next == self.iteration:
                if self._can_run(self.iteration, name):
                    return RunCall(self.iteration, name)
                break  # training ranks send the parameters of these calls one after the other
        ready = [
            (self._calls[name].next, index)
            for index, name in enumerate(self._scoring)
            if self._calls[name].next <= self.iteration + self._versions + 1
            and self._can_run(self._calls[name].next, name)
        ]
        if not ready:
            return None
        iteration, index = min(ready)
        return RunCall(iteration, self._scoring[index])

    def _can_run(self, iteration: int, name: str) -> bool:
        return all(self._calls[producer].is_done(iteration) for producer in self._producers[name])
