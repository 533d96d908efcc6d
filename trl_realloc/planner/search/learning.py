"""Corrects the estimates of a plan by the updates of a run under it.

The measured seconds of each call are divided by its estimate at the update's response lengths. A median over updates
keeps an update that something else slowed down out. `corrections` holds the result. An update with streams is compared
in `stream_learning`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from ...plan.algorithm_graphs import has_host_loop
from ...plan.execution_plan import ExecutionPlan
from ...plan.model_spec import ModelSpec
from ..cost.corrections import Corrections, bounded
from ..cost.pricing import Pricing
from ..iteration.simulate import Overlap, steady_times, tasks_of
from .measured_update import MeasuredUpdate
from .problem import estimate_plan
from .space import MANY
from .stream_learning import StreamedEstimates


WARM_UP = 1  # updates after a start that are left out: kernels are compiled and caches filled in them
LEAST = 3  # updates after those, below which nothing is corrected
UPDATES_WINDOW = 8  # latest updates that are used
ROUNDS = 4  # calls that share processors change each other's seconds, so that factors are found in several rounds


class PlanEvidence:
    """The latest updates of a run under one plan.

    Args:
        specs: the models that each call runs, by the call's name.
        pricing: with the corrections that were known before the run came to this plan.

    Raises:
        PlanError: the plan cannot be estimated.
    """

    def __init__(self, plan: ExecutionPlan, specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing) -> None:
        self.plan, self.specs, self.before = plan, specs, pricing.corrections
        self.pricing = replace(pricing, corrections=Corrections())
        is_small = plan.cluster.size <= MANY
        self._moves = estimate_plan(plan, specs, self.pricing, exact=is_small).estimate.moves
        self._updates: deque[tuple[MeasuredUpdate, dict[str, float]]] = deque(maxlen=UPDATES_WINDOW)
        self._streamed: StreamedEstimates | None = None
        if plan.streams is not None and plan.streamed:
            self._streamed = StreamedEstimates(plan, specs, self.pricing, self._moves)
        self._of_update: deque[dict[str, float]] = deque(maxlen=UPDATES_WINDOW)  # factors, with streams
        self._learns = not (plan.staleness.versions or plan.fused)
        if self._streamed is not None:  # on more devices a simulation takes seconds
            self._learns &= is_small
        self.seen = 0

    def add(self, update: MeasuredUpdate) -> None:
        """Add an update. The first `WARM_UP` ones, and those without samples, are left out."""
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
        """Compare an update with its simulation, which has the factors that are known until now."""
        factors, functions = self._medians(), streamed.functions(update, work)
        for _ in range(1 if factors else ROUNDS):
            factors = streamed.refined(factors, functions, update, work)
        self._of_update.append(factors)

    def _medians(self) -> dict[str, float]:
        """By call and by reallocation, the median of the factors of the updates with streams."""
        names = dict.fromkeys(name for factors in self._of_update for name in factors)
        return {name: median(f[name] for f in self._of_update if name in f) for name in names}

    def corrections(self) -> Corrections:
        """The corrections after these updates; those before them where there are fewer than `LEAST`, or where samples
        are generated ahead or two calls train together, because a call's seconds then depend on what else its devices
        did."""
        if len(self._updates) < LEAST or not self._learns:
            return self.before
        if self._streamed is not None:
            of_updates = [self._streamed.functions(*row) for row in self._updates]
            functions = {name: median(each[name] for each in of_updates) for name in of_updates[0]}
            return self._learned(self._medians(), functions, self.before.handover)
        functions = {
            name: median(update.spans.get(name, 0.0) for update, _ in self._updates)
            for name in self.plan.order
            if all(work[name] == 0 for _, work in self._updates)
        }
        factors = self._factors(functions)
        if has_host_loop(self.plan.graph):  # what that loop does between calls, as its reward functions, has no span
            return self._learned(factors, functions, self.before.handover)
        handovers = [self._handover(update.seconds, work, factors, functions) for update, work in self._updates]
        return self._learned(factors, functions, median(handovers))

    def _learned(
        self, factors: Mapping[str, float], functions: Mapping[str, float], handover: float | None
    ) -> Corrections:
        calls = {name: factor for name, factor in factors.items() if " -> " not in name}
        moves = {name.partition(" -> ")[2]: factor for name, factor in factors.items() if " -> " in name}
        return self.before.learned(self.plan, calls, moves, functions, handover)

    def _factors(self, functions: Mapping[str, float]) -> dict[str, float]:
        """By call and by reallocation, the factor of the estimate with which the plan's timeline has the measured
        seconds.

        Args:
            functions: seconds of a replica's share of the calls that run reward functions.
        """
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
        self, work: Mapping[str, float], factors: Mapping[str, float], functions: Mapping[str, float], handover: float
    ) -> dict[str, tuple[float, float]]:
        """(start, end) of every call and reallocation of an iteration."""
        seconds = {name: functions.get(name, factors.get(name, 1.0) * own) + handover for name, own in work.items()}
        names = {edge.target: f"{edge.source} -> {edge.target}" for edge in self.plan.reallocations}
        moves = {target: own * factors.get(names[target], 1.0) for target, own in self._moves.items()}
        tasks = tasks_of(self.plan, seconds, moves)
        sharing, per_node = self.pricing.rates.sharing, self.plan.cluster.devices_per_node
        _, times = steady_times(tasks, overlap=Overlap.of(self.plan), sharing=sharing, devices_per_node=per_node)
        return {task.name: of_task for task, of_task in zip(tasks, times, strict=True)}

    def _handover(
        self, seconds: float, work: Mapping[str, float], factors: Mapping[str, float], functions: Mapping[str, float]
    ) -> float:
        """Seconds that each call would take to receive and send samples, so that the iteration takes `seconds` from the
        start of its first call, when that has its samples."""

        def iteration(handover: float) -> float:
            times = self._times(work, factors, functions, handover).values()
            return max(end for _, end in times) - min(start for start, _ in times) - handover

        without = iteration(0.0)
        rest = seconds - without
        if rest <= 0:
            return 0.0
        handover = rest / len(work)
        for _ in range(2):  # nearly linear: the number of calls that wait for each other
            added = iteration(handover) - without
            if added <= 0:  # no call waits for another
                return 0.0
            handover *= rest / added
        return handover
