"""`PricedPlan`: a combination of assignments with its estimate, and the estimate of how its calls overlap.

The estimate of a combination without streams and staleness is made in `problem`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...plan.execution_plan import ExecutionPlan
from ...plan.fused import Fused, joined, parted, together
from ...plan.staleness import Staleness
from ...plan.streams import Streams
from ...plan.timeline import Span, Timeline
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
        seconds: of an iteration after the first ones.
        moves: seconds of each reallocation, by the call that receives the parameters.
        memory: bytes that the fullest device holds.
        fullest: the number of that device.
        holds: the parts of `memory`: of each call what it holds during the whole iteration, and, each under its name,
            what the call with the most adds while it runs, the processes' contexts and the communicators.
        mean_age, oldest: updates from the policy that drew a token to the one that is trained on it: the mean over the
            tokens, and the most. 0 without a staleness.
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
        calls: the candidate of each call, by the call's name.
        barrier, streams, staleness, fused: of the plan.
        fused_cost: of the calls that the plan fuses; `None` if it fuses none.
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
        """Raises `PlanError` where no engine of this package can do an assignment (`Space.deep_generation`)."""
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
        """Cost of each call by itself, also of the calls that the plan fuses."""
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
        """The calls' seconds by cause, each multiplied by the number of devices of the call's mesh."""
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
        """Bytes that the fullest device has left; `None` where its memory is not known."""
        memory = self.space.pricing.memory
        return None if memory is None else memory.total - self.estimate.memory

    def streamed(self) -> StreamedIteration:
        """An iteration sample by sample, of a plan that has streams."""
        seconds = {name: cost.seconds for name, cost in self.run_costs.items()}
        prices = StreamPrices.of(self.plan, self.space.specs, self.space.pricing)
        return simulate_streams(prices, seconds, self.estimate.moves)

    def with_streams(self, streams: Streams | None) -> PricedPlan:
        """The same assignments with these streams, and the seconds that an iteration takes then. Each device holds as
        much as without streams, because an engine that sleeps between its calls gives its memory back before its
        devices score. Raises `PlanError` where the plan cannot have the streams."""
        assert self.streams is None, "the estimate of a plan without streams"
        changed = replace(self, streams=streams)
        if streams is None or not changed.plan.streamed:
            return changed
        estimate = replace(self.estimate, seconds=changed.streamed().seconds)
        return replace(changed, estimate=estimate)

    def ahead(self) -> AheadIterations:
        """Some iterations of a plan that has a staleness."""
        return simulate_ahead(self.plan, self.space.specs, self.space.pricing, self.run_costs, self.estimate.moves)

    def with_staleness(self, staleness: Staleness) -> PricedPlan:
        """The same assignments with this staleness, the seconds that an iteration takes then, and the tokens' ages.
        Each device holds as much as without. Raises `PlanError` where the plan cannot have it."""
        assert not self.staleness.versions, "the estimate of a plan without staleness"
        if not staleness.versions:
            return self
        changed = replace(self, staleness=staleness)
        found = changed.ahead()
        estimate = replace(self.estimate, seconds=found.seconds, mean_age=found.mean_age, oldest=found.oldest)
        return replace(changed, estimate=estimate)

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """The waits of the devices in an iteration after the first ones, or in those of `timeline` that have all of
        their calls."""
        size, timeline = self.space.cluster.size, self.timeline
        if not self.staleness.versions:
            return waits_of_iteration(timeline, self.seconds, self.space.graph, size)
        ends = [max(span.end for span in timeline.of_step(step).spans) for step in timeline.steps]
        return waits(timeline, self.space.graph, ends[len(ends) // 3], ends[-1 - len(ends) // 3], size)

    @property
    def idle(self) -> float:
        """Share of an iteration in which a device waits, in the mean over the devices."""
        return sum(wait.share * len(wait.devices) for wait in self.waits) / self.space.cluster.size

    @property
    def timeline(self) -> Timeline:
        """The expected timeline of one iteration after the first ones; of several with a staleness. As in a measured
        one, a span begins when its samples are there."""
        if self.staleness.versions:
            return Timeline(self.ahead().spans)
        if self.streams is not None:
            return Timeline(self.streamed().spans)
        costs = self.run_costs
        seconds = {name: cost.seconds for name, cost in costs.items()}
        waiting = {name: cost.parts.get("handover", 0.0) / cost.seconds for name, cost in costs.items() if cost.seconds}
        _, times = plan_times(self.plan, seconds, self.estimate.moves, self.space.pricing.rates.sharing)
        spans = [Span(task.name, device, *of_task, 0) for task, of_task in times for device in task.devices]
        return Timeline(replace(span, start=span.start + waiting.get(span.call, 0.0) * span.seconds) for span in spans)
