"""`FusedCost`: seconds and memory of two calls that train together (`plan.fused`).

A mini-batch of both takes the makespan of a fused schedule of their stages, or the lower bound of all schedules before
a schedule is searched. The times of the stages are those of `pricing`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...plan.dataflow import Call
from ...plan.fused import Fused
from ...plan.model_spec import ModelSpec
from ..cost.call_cost import CallCost, TrainingStage
from ..cost.pricing import Pricing
from ..fused.check import MAX_MEMORY, UniformPipeline, uniform_bound
from ..fused.pipelines import FusedPipelines, FusedSchedule, Pipeline
from .space import Candidate, Space


ESTIMATE_EFFORT = 100_000  # tasks that a schedule search places; the largest effort of a run (`runtime/fused/orders`)
OUTSIDE = ("data", "optimizer", "dispatch", "load", "functions")  # parts of a call's seconds outside of its pipeline

Pair = tuple[Candidate, Candidate]


@dataclass(frozen=True, eq=False)
class FusedCost:
    """Cost of two calls that train together.

    Args:
        cost: cost of both calls. `static` is 0, because it is counted for each call; `transient` has the activations
            and the gradients of both.
        makespan: seconds of the pipelines in one mini-batch.
        found: pipelines, in seconds and bytes, and the schedule with this makespan; `None` if the makespan is the lower
            bound of all schedules.
    """

    cost: CallCost
    makespan: float
    found: tuple[FusedPipelines, FusedSchedule] | None = None


@dataclass
class FusedPrices:
    """Prices pairs of candidates of two training calls that a plan can fuse.

    Args:
        calls, specs: both calls and their models. The stages of the second call are in the opposite order.
    """

    pricing: Pricing
    calls: tuple[Call, Call]
    specs: tuple[ModelSpec, ModelSpec]
    _stages: dict[tuple[int, int], tuple[Candidate, TrainingStage]] = field(default_factory=dict)

    def price(self, pair: Pair, *, exact: bool = False) -> FusedCost:
        """The cost of two candidates; with `exact` by a searched schedule, otherwise by the lower bound."""
        stages = self.stage(pair[0], 0), self.stage(pair[1], 1)
        uniform = self._uniform(pair)
        working = max(stage.working for stage in stages)
        if not exact:
            makespan, schedule = uniform_bound(*uniform), None
        else:
            from ..fused.schedule_search import search  # imported here: numba takes a second, and few plans need it

            pipelines = self.pipelines(pair)
            result = search(pipelines, effort=ESTIMATE_EFFORT)
            makespan, schedule = result.simulated.makespan, (pipelines, result.schedule)
        return FusedCost(self._cost(pair, stages, makespan, _memory_limit(*uniform) + working), makespan, schedule)

    def pipelines(self, pair: Pair) -> FusedPipelines:
        """One mini-batch of both calls, in seconds and bytes. All stages have the times of the slowest one, as in the
        price of one call alone; a message is part of the forward or backward before it."""
        uniform = self._uniform(pair)
        stages = max(p.stages for p in uniform)
        a, b = (
            Pipeline.of(p.stages, p.micro_batches, p.forward, p.memory, p.backward, copies=stages // p.stages)
            for p in uniform
        )
        return FusedPipelines(a, b, (_memory_limit(*uniform),) * stages)

    def stage(self, candidate: Candidate, which: int) -> TrainingStage:
        """Slowest stage of a candidate of the first call (`which` is 0) or the second call (1). Its seconds include the
        correction of the call's estimates."""
        key = id(candidate), which
        if key not in self._stages:
            stage = self.pricing.training_stage(self.specs[which], candidate.assignment)
            factor = self.pricing.calibration.factor(self.calls[which], candidate.assignment)
            stage = replace(stage, seconds=stage.seconds.times(factor))
            self._stages[key] = candidate, stage  # with the candidate, so that its id stays valid
        return self._stages[key][1]

    def _uniform(self, pair: Pair) -> tuple[UniformPipeline, UniformPipeline]:
        a, b = (
            _uniform(self.stage(candidate, which), candidate.assignment.strategy.pp)
            for which, candidate in enumerate(pair)
        )
        return a, b

    def _cost(
        self, pair: Pair, stages: tuple[TrainingStage, TrainingStage], makespan: float, transient: float
    ) -> CallCost:
        """Cost of all mini-batches of an iteration."""
        updates = self.pricing.workload.updates
        parts = {"compute": 0.0, "tensor": 0.0, "pipeline": 0.0}
        for stage in stages:
            parts["compute"] += updates * stage.micro_batches * stage.seconds.compute
            parts["tensor"] += updates * stage.micro_batches * stage.seconds.tensor
            parts["pipeline"] += updates * stage.micro_batches * 2 * stage.seconds.message
        parts["bubble"] = max(0.0, updates * makespan - sum(parts.values()))
        inside = self.pricing.shared(CallCost(parts), pair[0].assignment.mesh.size)
        outside = {name: sum(candidate.cost.parts.get(name, 0.0) for candidate in pair) for name in OUTSIDE}
        parts = {name: seconds for name, seconds in {**inside.parts, **outside}.items() if seconds}
        gradients = sum(candidate.cost.gradients for candidate in pair)
        return CallCost(parts, 0.0, transient + gradients, gradients)


def fused_prices(space: Space, fused: Fused) -> FusedPrices:
    """Prices of two calls of a space's graph that train one model each."""
    assert fused, "two calls are fused"
    calls = space.graph.call(fused[0]), space.graph.call(fused[1])
    (first,), (second,) = space.specs[fused[0]], space.specs[fused[1]]
    return FusedPrices(space.pricing, calls, (first, second))


def _uniform(stage: TrainingStage, pp: int) -> UniformPipeline:
    seconds = stage.seconds
    forward, backward = (
        compute + collectives + seconds.message
        for compute, collectives in zip(seconds.computes, seconds.collectives, strict=True)
    )
    return UniformPipeline(pp, stage.micro_batches, forward, backward, stage.kept)


def _memory_limit(a: UniformPipeline, b: UniformPipeline) -> float:
    """`check.memory_limit` of uniform pipelines."""
    serial = max(min(p.micro_batches, p.stages) * p.memory for p in (a, b))
    return max(MAX_MEMORY * serial, a.memory + b.memory)
