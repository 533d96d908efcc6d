"""Simulates iterations with a staleness in virtual time: engines that generate batch after batch, scoring ahead,
training, updates of the engines' parameters, and the exchange of samples and results between two iterations.

The order of the calls ahead is that of the run (`ahead_order`). Devices that run the same calls are simulated as one.
Of engines on such devices, which do the same at the same time, the one with the longest sample of each batch is
simulated. Batches differ as random ones do: a batch with a long sample delays the training of later batches, whose
tokens grow older meanwhile.

An engine is paused while its devices receive parameters. It is also paused while they score: two processes on one GPU
take as long as one after the other. On devices that share processors (CPU ranks) it decodes on as a further process,
and slows scoring and training down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from ...plan.execution_plan import ExecutionPlan
from ...plan.fused import joined
from ...plan.model_spec import ModelSpec
from ...plan.spans import Span
from ...plan.staleness import calls_ahead, devices_ahead
from ..cost.call_cost import CallCost
from ..cost.pricing import Pricing
from ..cost.workload import BATCHES
from .activities import Activities, Event, devices_by_node
from .ahead_engine import MAX_SAMPLES_AHEAD, EngineAhead, engine_prices
from .ahead_order import AheadOrder, AheadTask, EndIteration, RunCall, TakeUpdate
from .device_queues import DeviceQueues, Work
from .stream import replicas_of


SHOWN = 4  # iterations of a timeline
BETWEEN = 3  # exchanges of samples or results from the end of an iteration to the first call of the next


@dataclass(frozen=True)
class AheadIterations:
    """Iterations of a plan with a staleness in the steady state.

    Args:
        seconds: seconds of an iteration.
        mean_age: number of updates from the policy that sampled a token to the policy that trains on it, mean over all
            tokens.
        oldest: the largest such number.
        spans: spans of the last `SHOWN` iterations' batches; the first of them is step 0.
        orders: orders to the devices ahead, from the first iteration on.
    """

    seconds: float
    mean_age: float
    oldest: int
    spans: tuple[Span, ...]
    orders: tuple[AheadTask, ...]


def simulate_ahead(
    plan: ExecutionPlan,
    specs: Mapping[str, Sequence[ModelSpec]],
    pricing: Pricing,
    costs: Mapping[str, CallCost],
    moves: Mapping[str, float],
) -> AheadIterations:
    """Iterations of a plan that has a staleness.

    Args:
        specs: models that each call runs, by the call's name.
        costs: cost of each call; two calls that the plan fuses have one entry under their `joined` name.
        moves: seconds of each reallocation, by the call that receives the parameters.
    """
    versions = plan.staleness.versions
    # a multiple of `BATCHES`, so that each of the different batches counts equally
    warm_up, measured = 4 * versions + 8, BATCHES * math.ceil((2 * versions + 8) / BATCHES)
    simulation = _Simulation(plan, specs, pricing, costs, moves, warm_up + measured)
    simulation.run()
    return simulation.result(warm_up)


class _Units:
    """Groups ("units") of devices that run the same calls, and so do the same at the same time."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        parts: dict[tuple[str, ...], list[int]] = {}
        for device in range(plan.cluster.size):
            if calls := plan.calls_on(device):
                parts.setdefault(calls, []).append(device)
        self.devices = list(parts.values())
        self.per_call = {name: frozenset(n for n, calls in enumerate(parts) if name in calls) for name in plan.order}
        self._of_device = {device: unit for unit, part in enumerate(self.devices) for device in part}

    def of(self, devices: Iterable[int]) -> frozenset[int]:
        """The units of these devices."""
        return frozenset(map(self._of_device.__getitem__, devices))

    def nodes(self, units: Iterable[int]) -> Mapping[int, int]:
        """Number of devices of these units on each node."""
        devices = (device for unit in units for device in self.devices[unit])
        return devices_by_node(devices, self.plan.cluster.devices_per_node)


class _Simulation:
    """Virtual time from the start of the first iteration to the end of the last."""

    def __init__(
        self,
        plan: ExecutionPlan,
        specs: Mapping[str, Sequence[ModelSpec]],
        pricing: Pricing,
        costs: Mapping[str, CallCost],
        moves: Mapping[str, float],
        iterations: int,
    ) -> None:
        self.plan, self.costs, self.moves, self.iterations = plan, costs, moves, iterations
        is_shared = pricing.rates.sharing is not None
        self.stopping = {name for name in plan.order if specs.get(name) and not is_shared}
        self.activities = Activities(pricing.rates.sharing)
        graph = plan.graph
        self.ahead = calls_ahead(graph)
        self.generate = self.ahead[0]
        train = graph.train_call(graph.call(self.generate).role)
        assert train is not None, "the role that generates is trained"
        self.train = train
        self.units = _Units(plan)
        self.units_ahead = self.units.of(devices_ahead(graph, plan.assignments))
        self.order = AheadOrder(plan, {name: (plan.mesh(name).first,) for name in plan.order}, 0)
        self.orders: list[AheadTask] = []
        self.queues = DeviceQueues(self.activities, self.units.nodes)
        self.works: dict[tuple[int, str], Work] = {}  # (iteration, name) -> work that has not ended
        self.done = dict.fromkeys(plan.order, 0)  # call -> number of iterations; a call runs iterations in order
        self.published: dict[int, int] = {}  # engine -> number of batches
        self.generated: dict[int, set[int]] = {}
        self.updates = self.admitted = 0
        self.is_ending = False
        dispatches = [cost.parts.get("dispatch", 0.0) for cost in costs.values()]
        self.between = BETWEEN * max(dispatches, default=0.0)
        self.ends: list[float] = []
        self.spans: list[Span] = []
        self.engines = self._engines(specs, pricing)

    def _engines(self, specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing) -> list[EngineAhead]:
        """One simulated engine per set of shared devices."""
        replicas = replicas_of(self.plan, self.generate)
        alike: dict[frozenset[int], list[tuple[int, ...]]] = {}
        for ranks in replicas:
            alike.setdefault(self.units.of(ranks), []).append(ranks)
        prices = engine_prices(self.plan, self.generate, specs, pricing)
        batches = pricing.workload.longest_engine_by_batch(len(replicas), MAX_SAMPLES_AHEAD)
        engines = []
        for number, group in enumerate(alike.values()):
            self.published[number], self.generated[number] = 0, set()
            engines.append(
                EngineAhead(
                    self.generate,
                    prices,
                    self.activities,
                    units=self.units.of(group[0]),
                    devices=devices_by_node(chain.from_iterable(group), self.plan.cluster.devices_per_node),
                    engines=len(group),
                    batches=batches,
                    generated=partial(self._generated, number),
                )
            )
        return engines

    def run(self) -> None:
        self._admit()
        self._begin(0)
        while len(self.ends) < self.iterations:
            self.activities.next()

    # --- batches ------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.admitted <= self.updates + self.plan.staleness.versions:
            for engine in self.engines:
                engine.admit(self.admitted)
            self.admitted += 1

    def _generated(self, number: int, batch: int) -> None:
        self.generated[number].add(batch)
        self._publish()
        self._advance()

    def _publish(self) -> None:
        """A rank publishes its engine's finished batches, in order, when it runs nothing else."""
        for number, engine in enumerate(self.engines):
            if engine.units & self.queues.busy:
                continue
            while self.published[number] in self.generated[number]:
                self.published[number] += 1
        while min(self.published.values()) > self.done[self.generate]:
            self._report(self.generate)

    def _report_all(self, calls: Sequence[str]) -> None:
        for call in calls:
            self._report(call)

    def _report(self, call: str) -> None:
        iteration, self.done[call] = self.done[call], self.done[call] + 1
        self.queues.happened((iteration, call))
        self._take(self.order.done(iteration, call, self.plan.mesh(call).first))

    # --- calls, reallocations and updates -----------------------------------------------------------------------------

    def _begin(self, iteration: int) -> None:
        """Queue the calls of an iteration on the devices that train."""
        for names in self.plan.runs_of(self.plan.order):
            if names[0] in self.ahead:
                continue
            for work in self._works(iteration, names):
                self.queues.give(work, work.devices - self.units_ahead)
            if self.train in names:
                work = self._update(iteration)
                self.queues.give(work, work.devices - self.units_ahead)
        self._take(self.order.begin(iteration))
        self._advance()

    def _take(self, orders: Sequence[AheadTask]) -> None:
        self.orders += orders
        for order in orders:
            match order:
                case RunCall(iteration, call):
                    for work in self._works(iteration, (call,)):
                        self.queues.give(work, work.devices & self.units_ahead)
                case TakeUpdate(iteration):
                    work = self._update(iteration)
                    self.queues.give(work, work.devices & self.units_ahead)
                    self.queues.give(self._load(iteration), self.units.per_call[self.generate])
                case EndIteration():
                    self.is_ending = True

    def _works(self, iteration: int, names: Sequence[str]) -> list[Work]:
        """A call (or the two calls that the plan fuses), with the reallocation to it, if any, before it."""
        name = names[0]
        home = self.plan.graph.train_call(self.plan.graph.call(name).role)
        units, works = self.units.per_call[name], []
        if home is not None and self.moves.get(name, 0.0) > 0:
            both = self.units.per_call[home] | units
            works.append(self._work(iteration, f"{home} -> {name}", both, self.moves[name], stops=False))
        graph, run = self.plan.graph, joined(names)
        producers = (graph.producer(column) for call in names for column in graph.call(call).inputs)
        needs, end = frozenset(filter(None, producers)), partial(self._report_all, names)
        seconds, stops = self.costs[run].seconds, name in self.stopping
        return [*works, self._work(iteration, run, units, seconds, stops=stops, needs=needs, then=end)]

    def _update(self, iteration: int) -> Work:
        units = self.units.per_call[self.train] | self.units.per_call[self.generate]
        seconds = self.moves.get(self.generate, 0.0)
        return self._work(iteration, f"{self.train} -> {self.generate}", units, seconds, stops=True)

    def _load(self, iteration: int) -> Work:
        """The engines load the parameters that they have received."""
        seconds, units = self.costs[self.generate].parts.get("load", 0.0), self.units.per_call[self.generate]
        return self._work(iteration, "", units, seconds, stops=True, then=self._updated)

    def _updated(self) -> None:
        for engine in self.engines:
            engine.update()
        self.updates += 1
        self._admit()

    def _work(
        self,
        iteration: int,
        name: str,
        units: frozenset[int],
        seconds: float,
        *,
        stops: bool,
        needs: Iterable[str] = (),
        then: Event | None = None,
    ) -> Work:
        """The work of this name, which devices that train and devices ahead share. With `stops`, engines on its units
        are paused meanwhile; `needs` are calls of the iteration whose outputs it reads; `then` is called at its end,
        before the engines resume."""
        if (iteration, name) not in self.works:
            stopped = [engine for engine in self.engines if stops and engine.units & units]

            def begin(_: Work) -> None:
                for engine in stopped:
                    engine.pause()

            def end(work: Work) -> None:
                del self.works[iteration, name]
                self._span(iteration, work)
                if then is not None:
                    then()
                for engine in stopped:
                    engine.resume()
                self._publish()
                self._advance()

            missing = [(iteration, call) for call in needs if self.done[call] <= iteration]
            self.works[iteration, name] = Work(name, units, seconds, needs=missing, begins=begin, ends=end)
        return self.works[iteration, name]

    # --- time ---------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Start the works that can start, and the next iteration if all devices have ended this one."""
        self.queues.advance()
        if self.is_ending and self.queues.is_idle:
            self.is_ending = False
            units = set(range(len(self.units.devices))) - self.units_ahead
            self.activities.start(self.between, self.units.nodes(units), self._ended)

    def _ended(self) -> None:
        """Rank 0 has the outputs of all calls; all ranks have its results and their next samples."""
        self.ends.append(self.activities.now)
        if len(self.ends) < self.iterations:
            self._begin(len(self.ends))

    def _span(self, iteration: int, work: Work) -> None:
        if work.name and iteration >= self.iterations - SHOWN:
            of_unit = partial(Span, work.name, start=work.start, end=work.end, step=iteration)
            devices = [device for unit in work.devices for device in self.units.devices[unit]]
            self.spans += [of_unit(device=device) for device in devices]

    # --- the result ---------------------------------------------------------------------------------------------------

    def result(self, warm_up: int) -> AheadIterations:
        """Mean seconds and token ages after the first `warm_up` iterations, with the last spans and all orders.

        With a staleness of n, n + 1 batches are in progress at a time, so iteration times can repeat in a cycle.
        Therefore the time is measured from the mean end of the last n + 1 warm-up iterations to the mean end of the
        last n + 1 iterations.
        """
        batches = range(warm_up, self.iterations)
        tokens = sum(engine.tokens[batch] for engine in self.engines for batch in batches)
        ages = sum(engine.ages[batch] for engine in self.engines for batch in batches)
        oldest = max(engine.oldest[batch] for engine in self.engines for batch in batches)
        under_way = self.plan.staleness.versions + 1
        elapsed = sum(self.ends[-under_way:]) - sum(self.ends[warm_up - under_way : warm_up])
        seconds = elapsed / under_way / len(batches)
        return AheadIterations(seconds, ages / tokens, oldest, self._shown(), tuple(self.orders))

    def _shown(self) -> tuple[Span, ...]:
        first = self.iterations - SHOWN
        spans = [span for span in self.spans if first <= span.step < self.iterations]
        for engine in self.engines:
            devices = [device for unit in engine.units for device in self.units.devices[unit]]
            on = [device for device in devices if device in self.plan.mesh(self.generate)]
            for batch in range(first, self.iterations):
                times = engine.admitted_at[batch], engine.ended_at[batch]
                spans += [Span(self.generate, device, *times, batch) for device in on]
        zero = min(span.start for span in spans)
        return tuple(
            replace(span, start=span.start - zero, end=span.end - zero, step=span.step - first) for span in spans
        )
