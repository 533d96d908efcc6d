"""Learns `CalibrationFactors` of a plan's estimates from the updates of a run under this plan.

The measured seconds of each call are divided by its estimate at the update's response lengths. The median over updates
ignores an update that something else slowed down. The seconds of a streamed call depend on when its samples arrive, so
the sum of its spans on all devices is compared with that of a simulation at the update's response lengths.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from ...plan.algorithm_graphs import has_host_loop
from ...plan.execution_plan import ExecutionPlan
from ...plan.model_spec import ModelSpec
from ...plan.spans import Span
from ..cost.estimate_factors import CalibrationFactors, batch_seconds, bounded
from ..cost.pricing import Pricing
from ..iteration.simulate import plan_times
from ..iteration.stream import replicas_of
from ..iteration.stream_cost import StreamPrices
from ..iteration.stream_simulation import simulate_streams
from .measured_update import MeasuredUpdate
from .problem import estimate_plan
from .space import MANY


WARM_UP = 1  # updates after a start that do not count: they compile kernels and fill caches
MIN_UPDATES = 3  # smallest number of further updates from which corrections are computed
UPDATES_WINDOW = 8  # number of latest updates that are used
ROUNDS = 4  # rounds to compute factors, because calls that share processors change each other's seconds


class StreamedEstimates:
    """The simulation of a plan with streams, to be compared with measured updates. It takes no time to send samples,
    because the measured spans of streamed calls begin when their samples have arrived.

    Args:
        specs: models that each call runs, by the call's name.
        pricing: cost model without corrections.
        moves: estimated seconds of each reallocation, by the call that receives the parameters.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        specs: Mapping[str, Sequence[ModelSpec]],
        pricing: Pricing,
        moves: Mapping[str, float],
    ) -> None:
        self.plan, self.specs, self.pricing, self.moves = plan, specs, pricing, moves
        self._names = {f"{edge.source} -> {edge.target}": edge.target for edge in plan.reallocations}

    def _told(self, spans: Iterable[Span]) -> list[Span]:
        """Simulated spans that a real run also reports: for streamed calls, those of a replica's first device."""
        first = {name: {ranks[0] for ranks in replicas_of(self.plan, name)} for name in self.plan.streamed}
        return [span for span in spans if span.call not in first or span.device in first[span.call]]

    def functions(self, update: MeasuredUpdate, work: Mapping[str, float]) -> dict[str, float]:
        """Measured seconds of a device's share of each call that runs reward functions.

        Args:
            work: estimated seconds of each call; 0 for reward functions.
        """
        shares = {name: update.device_seconds.get(name, 0.0) / self.plan.mesh(name).size for name in self.plan.streamed}
        return {name: shares.get(name, update.spans.get(name, 0.0)) for name, seconds in work.items() if seconds == 0.0}

    def refined(
        self,
        factors: Mapping[str, float],
        functions: Mapping[str, float],
        update: MeasuredUpdate,
        work: Mapping[str, float],
    ) -> dict[str, float]:
        """Factors by call and by reallocation, each multiplied by measured / simulated seconds of this update.

        Args:
            factors: current factors, 1 if missing.
            functions: the result of `functions`.
            work: argument of `functions`.
        """
        calls = {name: factors.get(name, 1.0) for name in self.plan.order}
        calibration = CalibrationFactors(calls, functions=batch_seconds(self.plan, functions), dispatch=0.0)
        workload = self.pricing.workload.of_lengths(update.lengths)
        pricing = replace(self.pricing, workload=workload, calibration=calibration)
        prices = StreamPrices.of(self.plan, self.specs, pricing)
        seconds = {name: functions.get(name, calls[name] * estimated) for name, estimated in work.items()}
        moves = {
            target: factors.get(name, 1.0) * self.moves[target]
            for name, target in self._names.items()
            if target in self.moves
        }
        expected = MeasuredUpdate.of(self._told(simulate_streams(prices, seconds, moves).spans), update.lengths)
        better = dict(factors)
        for name in (*self.plan.order, *self._names):
            of = "device_seconds" if name in self.plan.streamed else "spans"
            measured, estimated = getattr(update, of).get(name, 0.0), getattr(expected, of).get(name, 0.0)
            if measured > 0 and estimated > 0 and name not in functions:
                better[name] = bounded(factors.get(name, 1.0) * measured / estimated)
        return better


class PlanEvidence:
    """The latest updates of a run under one plan.

    Args:
        specs: models that each call runs, by the call's name.
        pricing: cost model with the corrections before the run followed this plan.

    Raises:
        PlanError: the plan cannot be estimated.
    """

    def __init__(self, plan: ExecutionPlan, specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing) -> None:
        self.plan, self.specs, self.before = plan, specs, pricing.calibration
        self.pricing = replace(pricing, calibration=CalibrationFactors())
        is_small = plan.cluster.size <= MANY
        self._moves = estimate_plan(plan, specs, self.pricing, exact=is_small).estimate.moves
        self._updates: deque[tuple[MeasuredUpdate, dict[str, float]]] = deque(maxlen=UPDATES_WINDOW)
        self._streamed: StreamedEstimates | None = None
        if plan.streams is not None and plan.streamed:
            self._streamed = StreamedEstimates(plan, specs, self.pricing, self._moves)
        self._of_update: deque[dict[str, float]] = deque(maxlen=UPDATES_WINDOW)  # factors of updates with streams
        self._learns = not (plan.staleness.versions or plan.fused)
        if self._streamed is not None:  # on many devices a simulation takes seconds
            self._learns &= is_small
        self.seen = 0

    def add(self, update: MeasuredUpdate) -> None:
        """Add an update. The first `WARM_UP` updates, and updates without samples, do not count."""
        self.seen += 1
        if self.seen > WARM_UP and update.lengths:
            pricing = replace(self.pricing, workload=self.pricing.workload.of_lengths(update.lengths))
            graph = self.plan.graph
            work = {
                name: pricing.work(graph.call(name), self.specs.get(name, ()), self.plan[name]).seconds
                for name in self.plan.order
            }
            self._updates.append((update, work))
            if self._streamed is not None and self._learns:
                self._compare(self._streamed, update, work)

    def _compare(self, streamed: StreamedEstimates, update: MeasuredUpdate, work: Mapping[str, float]) -> None:
        factors, functions = self._medians(), streamed.functions(update, work)
        for _ in range(1 if factors else ROUNDS):
            factors = streamed.refined(factors, functions, update, work)
        self._of_update.append(factors)

    def _medians(self) -> dict[str, float]:
        """Median factors over the updates with streams, by call and by reallocation."""
        names = dict.fromkeys(name for factors in self._of_update for name in factors)
        return {name: median(f[name] for f in self._of_update if name in f) for name in names}

    def calibration(self) -> CalibrationFactors:
        """The corrections after these updates. The earlier ones if there are fewer than `MIN_UPDATES` updates, or with
        staleness or fused training, where a call's seconds depend on the other work of its devices."""
        if len(self._updates) < MIN_UPDATES or not self._learns:
            return self.before
        if self._streamed is not None:
            of_updates = [self._streamed.functions(*row) for row in self._updates]
            functions = {name: median(update[name] for update in of_updates) for name in of_updates[0]}
            return self._learned(self._medians(), functions, self.before.dispatch)
        functions = {
            name: median(update.spans.get(name, 0.0) for update, _ in self._updates)
            for name in self.plan.order
            if all(work[name] == 0 for _, work in self._updates)
        }
        factors = self._factors(functions)
        if has_host_loop(self.plan.graph):  # its work between calls, such as reward functions, has no span
            return self._learned(factors, functions, self.before.dispatch)
        dispatches = [self._dispatch(update.seconds, work, factors, functions) for update, work in self._updates]
        return self._learned(factors, functions, median(dispatches))

    def _learned(
        self, factors: Mapping[str, float], functions: Mapping[str, float], dispatch: float | None
    ) -> CalibrationFactors:
        calls = {name: factor for name, factor in factors.items() if " -> " not in name}
        moves = {name.partition(" -> ")[2]: factor for name, factor in factors.items() if " -> " in name}
        return self.before.learned(self.plan, calls, moves, functions, dispatch)

    def _factors(self, functions: Mapping[str, float]) -> dict[str, float]:
        """Factors by call and by reallocation with which the plan's timeline has the measured seconds. `functions` are
        the seconds of a replica's share of reward functions."""
        factors: dict[str, float] = {}
        for _ in range(ROUNDS if self.pricing.rates.sharing else 1):
            ratios: dict[str, list[float]] = defaultdict(list)
            for update, work in self._updates:
                for name, (start, end) in self._times(work, factors, functions, 0.0).items():
                    measured = update.spans.get(name, 0.0)
                    if measured > 0 and end > start and name not in functions:
                        ratios[name].append(measured / (end - start))
            factors |= {name: bounded(factors.get(name, 1.0) * median(rows)) for name, rows in ratios.items()}
        return factors

    def _times(
        self, work: Mapping[str, float], factors: Mapping[str, float], functions: Mapping[str, float], dispatch: float
    ) -> dict[str, tuple[float, float]]:
        """(start, end) of every call and reallocation of an iteration."""
        seconds = {name: functions.get(name, factors.get(name, 1.0) * alone) + dispatch for name, alone in work.items()}
        names = {edge.target: f"{edge.source} -> {edge.target}" for edge in self.plan.reallocations}
        moves = {target: alone * factors.get(names[target], 1.0) for target, alone in self._moves.items()}
        _, times = plan_times(self.plan, seconds, moves, self.pricing.rates.sharing)
        return {task.name: of_task for task, of_task in times}

    def _dispatch(
        self, seconds: float, work: Mapping[str, float], factors: Mapping[str, float], functions: Mapping[str, float]
    ) -> float:
        """Seconds in which each call receives and sends samples, such that the iteration takes `seconds` from the start
        of its first call after that call has its samples."""

        def iteration(dispatch: float) -> float:
            times = self._times(work, factors, functions, dispatch).values()
            return max(end for _, end in times) - min(start for start, _ in times) - dispatch

        without = iteration(0.0)
        rest = seconds - without
        if rest <= 0:
            return 0.0
        dispatch = rest / len(work)
        for _ in range(2):  # `added` is nearly linear in `dispatch`
            added = iteration(dispatch) - without
            if added <= 0:  # no call waits for another
                return 0.0
            dispatch *= rest / added
        return dispatch
