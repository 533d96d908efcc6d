"""`PricedPlan`: a combination of assignments with its estimate, and the estimates of streams and staleness.

The estimate without streams and staleness is made in `problem`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...plan.execution_plan import ExecutionPlan
from ...plan.fused import Fused, joined, parted, together
from ...plan.spans import Span
from ...plan.staleness import Staleness
from ...plan.streams import Streams
from ...plan.timeline import Timeline
from ...plan.waits import Wait, waits, waits_of_iteration
from ..cost.call_cost import CallCost
from ..iteration.ahead_simulation import AheadIterations, simulate_ahead
from ..iteration.simulate import Overlap, plan_times
from ..iteration.stream_cost import StreamPrices
from ..iteration.stream_simulation import StreamedIteration, simulate_streams
from .fused_cost import FusedCost
from .space import Candidate, Space


@dataclass(frozen=True)
class Estimate:
    """The estimate of one combination of candidates.

    Args:
        seconds: seconds of an iteration in the steady state.
        moves: seconds of each reallocation, by the call that receives the parameters.
        memory: bytes on the device with the most.
        fullest: number of that device.
        holds: parts of `memory` by name: static bytes of each call, the largest transient bytes of a call, the
            processes' contexts, and the communicators.
        mean_age, oldest: number of updates from the policy that sampled a token to the policy that trains on it: mean
            and largest over the tokens. 0 without a staleness.
    """

    seconds: float
    moves: Mapping[str, float]
    memory: float
    fullest: int
    holds: Mapping[str, float] = field(default_factory=dict)
    mean_age: float = 0.0
    oldest: int = 0


@dataclass(frozen=True)
class PricedPlan:
    """A combination of candidates with its estimate.

    Args:
        calls: candidate of each call, by the call's name.
        barrier, streams, staleness, fused: fields of the `ExecutionPlan`.
        fused_cost: cost of the calls that the plan fuses; `None` if it fuses none.
    """

    name: str
    space: Space
    calls: Mapping[str, Candidate]
    estimate: Estimate
    barrier: bool = False
    streams: Streams | None = None
    staleness: Staleness = Staleness()
    fused: Fused = ()
    fused_cost: FusedCost | None = None

    @property
    def plan(self) -> ExecutionPlan:
        """The plan. Raises `PlanError` if no engine here supports an assignment (`Space.deep_generation`)."""
        assignments = {name: candidate.assignment for name, candidate in self.calls.items()}
        cluster, graph = self.space.cluster, self.space.graph
        overlap = self.streams, self.barrier, self.staleness, self.fused
        return ExecutionPlan(cluster, assignments, graph, self.name, *overlap)

    @property
    def overlap(self) -> Overlap:
        """Overlap of consecutive iterations."""
        return Overlap.of_runs(self.space.graph, barrier=self.barrier)

    @property
    def costs(self) -> dict[str, CallCost]:
        """Cost of each call alone, even if the plan fuses it."""
        return {name: candidate.cost for name, candidate in self.calls.items()}

    @property
    def run_costs(self) -> dict[str, CallCost]:
        """Cost of each call. Two fused calls have one cost, under their `joined` name."""
        costs = self.costs
        return {
            joined(names): costs[names[0]] if len(names) == 1 or self.fused_cost is None else self.fused_cost.cost
            for names in together(self.fused, self.space.graph.order)
        }

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def is_bound(self) -> bool:
        """True if the seconds are a lower bound, because the schedule of fused calls was not searched."""
        return self.fused_cost is not None and self.fused_cost.found is None

    @property
    def device_seconds(self) -> dict[str, float]:
        """Device-seconds of all calls, by the keys of `call_cost.PARTS`."""
        spent: dict[str, float] = {}
        for name, cost in self.run_costs.items():
            for part, seconds in cost.parts.items():
                spent[part] = spent.get(part, 0.0) + seconds * self.calls[parted(name)[0]].assignment.mesh.size
        return spent

    @property
    def fits(self) -> bool:
        return self.space.pricing.fits(self.estimate.memory)

    @property
    def free(self) -> float | None:
        """Free bytes on the fullest device; `None` if its memory is unknown."""
        memory = self.space.pricing.memory
        return None if memory is None else memory.total - self.estimate.memory

    def streamed(self) -> StreamedIteration:
        """The simulated iteration of a plan that has streams."""
        seconds = {name: cost.seconds for name, cost in self.run_costs.items()}
        prices = StreamPrices.of(self.plan, self.space.specs, self.space.pricing)
        return simulate_streams(prices, seconds, self.estimate.moves)

    def with_streams(self, streams: Streams | None) -> PricedPlan:
        """The same assignments with these streams and the estimated seconds with them. The memory is the same, because
        an engine that sleeps between its calls frees its memory before its devices score. Raises `PlanError` if the
        plan cannot have the streams."""
        assert self.streams is None, "the estimate of a plan without streams"
        changed = replace(self, streams=streams)
        if streams is None or not changed.plan.streamed:
            return changed
        estimate = replace(self.estimate, seconds=changed.streamed().seconds)
        return replace(changed, estimate=estimate)

    def ahead(self) -> AheadIterations:
        """Simulated iterations of a plan that has a staleness."""
        return simulate_ahead(self.plan, self.space.specs, self.space.pricing, self.run_costs, self.estimate.moves)

    def with_staleness(self, staleness: Staleness) -> PricedPlan:
        """The same assignments with this staleness, and the estimated seconds and token ages with it. The memory is the
        same. Raises `PlanError` if the plan cannot have the staleness."""
        assert not self.staleness.versions, "the estimate of a plan without staleness"
        if not staleness.versions:
            return self
        changed = replace(self, staleness=staleness)
        ahead = changed.ahead()
        estimate = replace(self.estimate, seconds=ahead.seconds, mean_age=ahead.mean_age, oldest=ahead.oldest)
        return replace(changed, estimate=estimate)

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """The waits of the devices in an iteration, or with a staleness in the complete iterations of `timeline`."""
        size, timeline = self.space.cluster.size, self.timeline
        if not self.staleness.versions:
            return waits_of_iteration(timeline, self.seconds, self.space.graph, size)
        ends = [max(span.end for span in timeline.of_step(step).spans) for step in timeline.steps]
        return waits(timeline, self.space.graph, ends[len(ends) // 3], ends[-1 - len(ends) // 3], size)

    @property
    def idle(self) -> float:
        """Mean share of an iteration in which a device waits."""
        return sum(wait.share * len(wait.devices) for wait in self.waits) / self.space.cluster.size

    @property
    def timeline(self) -> Timeline:
        """The expected timeline of one iteration, or of several with a staleness. As in a measured timeline, a span
        begins when its samples have arrived."""
        if self.staleness.versions:
            return Timeline(self.ahead().spans)
        if self.streams is not None:
            return Timeline(self.streamed().spans)
        costs = self.run_costs
        seconds = {name: cost.seconds for name, cost in costs.items()}
        waiting = {name: cost.parts.get("dispatch", 0.0) / cost.seconds for name, cost in costs.items() if cost.seconds}
        _, times = plan_times(self.plan, seconds, self.estimate.moves, self.space.pricing.rates.sharing)
        spans = [Span(task.name, device, *of_task, 0) for task, of_task in times for device in task.devices]
        return Timeline(replace(span, start=span.start + waiting.get(span.call, 0.0) * span.seconds) for span in spans)
