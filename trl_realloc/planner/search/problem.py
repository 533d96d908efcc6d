"""`Problem`: estimates a combination of one assignment per call: seconds of an iteration, reallocations and memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...plan.algorithm_graphs import has_host_loop
from ...plan.assignment import Assignment, in_place
from ...plan.execution_plan import ExecutionPlan
from ...plan.fused import Fused
from ...plan.model_spec import ModelSpec
from ...plan.streams import early_call
from ...realloc.layout import layout_of
from ...realloc.schedule import TransferSchedule, make_schedule, schedule_seconds
from ..cost.hardware import Rates
from ..cost.pricing import Pricing
from ..iteration.simulate import GraphTasks, IterationTask, Overlap, steady_times
from .fused_cost import FusedCost, fused_prices
from .plan_memory import PlanMemory
from .priced_plan import Estimate, PricedPlan
from .space import Candidate, Space, State


# A reallocation is priced by its transfer schedule if making the schedule takes no longer. Schedules that take longer
# are for a thousand devices, where the quick estimate is within 1 % of the schedule's time.
MAX_SCHEDULE_S = 2.0
TOO_LARGE = 1e9  # seconds that the search assumes for a plan that needs more memory than a device has


@dataclass
class Problem:
    """A space with its candidates, and the graph in the form in which `estimate` needs it.

    Args:
        candidates: assignments that each call may have, by the call's name.
        overlap: overlap of iterations.
        fused: two calls that train together. A plan must be able to fuse their candidates in a state.
        exact_fused: whether they are priced by the schedule of a search, or by the lower bound of all schedules.
    """

    space: Space
    candidates: Mapping[str, Sequence[Candidate]]
    overlap: Overlap = Overlap.GENERATION
    fused: Fused = ()
    exact_fused: bool = False
    evaluations: int = 0
    # by ids; the values hold the candidates, so that the ids stay valid
    _moves: dict[tuple[int, int, bool], tuple[Candidate, Candidate, float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._graph_tasks = GraphTasks(self.space.graph, self.fused)
        self.names = self._graph_tasks.names
        self._fused = tuple(map(self.names.index, self.fused))
        self._sent_specs: dict[tuple[int, int], Sequence[ModelSpec]] = {}  # cached, because a spec caches its sizes
        self._fused_costs: dict[tuple[int, ...], tuple[tuple[Candidate, ...], FusedCost]] = {}
        self._data, self._home = self._graph_tasks.data, self._graph_tasks.home
        depth: list[int] = []  # length of the longest chain of calls before each call
        for producers in self._data:
            depth.append(1 + max((depth[producer] for producer in producers), default=-1))
        self.levels = [
            [call for call, call_depth in enumerate(depth) if call_depth == level] for level in sorted(set(depth))
        ]
        self._memory = PlanMemory(self.space, self.fused)
        self._edges = self._memory.edges

    def estimate(self, state: State, *, exact_moves: bool = False) -> Estimate:
        self.evaluations += 1
        moves, stays = self._moves_and_stays(state, exact=exact_moves)
        seconds = self._seconds(state, moves)
        memory, fullest = self.memory(state, stays)
        named = {self.names[target]: float(seconds) for target, seconds in moves.items() if seconds > 0}
        return Estimate(float(seconds), named, memory, fullest)

    def _moves_and_stays(self, state: State, *, exact: bool = False) -> tuple[dict[int, float], set[int]]:
        """Seconds of each reallocation by the index of the receiving call, and the indices of the calls that need none
        because they run in the layout of their role's training."""
        moves = {target: self._move(state, source, target, exact) for source, target in self._edges}
        stays = {target for target, seconds in moves.items() if seconds is None}
        return {target: seconds for target, seconds in moves.items() if seconds is not None}, stays

    def _seconds(self, state: State, moves: Mapping[int, float]) -> float:
        """Seconds of an iteration. `moves`: seconds of each reallocation, by the index of the receiving call."""
        sharing, per_node = self.space.pricing.rates.sharing, self.space.cluster.devices_per_node
        return steady_times(self._tasks(state, moves), self.overlap, sharing, per_node)[0]

    def weight(self, state: State) -> float:
        """Quantity that the search minimises: the seconds of an iteration. States that do not fit in memory rank after
        all that fit, by how much is missing; a state that is not allowed is infinite."""
        self.evaluations += 1
        moves, stays = self._moves_and_stays(state)
        memory = self.space.pricing.memory
        if memory is not None and (size := self.memory(state, stays)[0]) > memory.usable:
            return TOO_LARGE * size / memory.usable  # the seconds do not matter
        return float(self._seconds(state, moves)) if self.allows(state) else math.inf

    def fits(self, state: State) -> bool:
        """True if a state fits in memory, or if the memory of the devices is unknown."""
        return self.space.pricing.fits(self.estimate(state).memory)

    def allows(self, state: State) -> bool:
        """True if the state is a valid plan; subclasses restrict it."""
        return True

    def _move(self, state: State, source: int, target: int, exact: bool) -> float | None:
        """Seconds of a reallocation; `None` if both assignments have the same layout."""
        home, other = state[source], state[target]
        key = (id(home), id(other), exact)
        if key not in self._moves:
            seconds = None
            if self._memory.is_reallocated(state, source, target):
                factor = self.space.pricing.calibration.move(self.names[target])
                is_reversed = self.names[source] in self.fused[1:]
                seconds = factor * self._priced_move(home, other, self._sent(source, target), exact, is_reversed)
            self._moves[key] = home, other, seconds
        return self._moves[key][2]

    def _sent(self, source: int, target: int) -> Sequence[ModelSpec]:
        """The parameters that a reallocation sends: the source's, in the target's dtype if that is narrower. Of a
        quantized model only the adapters are sent, which are not quantized."""
        if (source, target) not in self._sent_specs:
            specs = self.space.specs
            pairs = zip(specs.get(self.names[source], ()), specs.get(self.names[target], ()), strict=False)
            self._sent_specs[source, target] = [
                replace(sent, bytes_per_element=min(sent.bytes_per_element, taken.bytes_per_element), quantization=None)
                for sent, taken in pairs
            ]
        return self._sent_specs[source, target]

    def _priced_move(
        self, home: Candidate, other: Candidate, specs: Iterable[ModelSpec], exact: bool, is_reversed: bool
    ) -> float:
        """Seconds of a reallocation, which sends the trained share of the parameters. With `is_reversed`, the source's
        pipeline stages are in reverse order."""
        pricing = self.space.pricing
        seconds = 0.0
        for spec in specs:
            if exact:
                source = layout_of(home.assignment, spec, is_reversed=is_reversed)
                layouts = source, layout_of(other.assignment, spec)
                if schedule_seconds(*layouts) <= MAX_SCHEDULE_S:
                    schedule = make_schedule(self.space.cluster, *layouts)
                    seconds += spec.trained_share * move_seconds(schedule, pricing.rates)
                    continue
            seconds += spec.trained_share * quick_move_seconds(spec, home.assignment, other.assignment, pricing)
        return seconds

    def _tasks(self, state: State, moves: Mapping[int, float]) -> list[IterationTask]:
        early = early_call(self.space.graph, {n: c.assignment for n, c in zip(self.names, state, strict=True)})
        seconds = [
            state[run[0]].seconds if len(run) == 1 else self.fused_cost(state).cost.seconds
            for run in self._graph_tasks.runs
        ]
        return self._graph_tasks.tasks([candidate.assignment.mesh for candidate in state], seconds, moves, early)

    def fused_cost(self, state: State) -> FusedCost:
        """Cost of the two fused calls of a state."""
        pair = tuple(state[call] for call in self._fused)
        key = tuple(map(id, pair))
        if key not in self._fused_costs:
            cost = fused_prices(self.space, self.fused).price((pair[0], pair[1]), exact=self.exact_fused)
            self._fused_costs[key] = pair, cost  # with the candidates, so that their ids stay valid
        return self._fused_costs[key][1]

    def memory(self, state: State, stays: Collection[int]) -> tuple[float, int]:
        """Bytes of the fullest device, and its number (`PlanMemory.fullest`)."""
        return self._memory.fullest(state, stays, self._fused_transient(state))

    def _fused_transient(self, state: State) -> float:
        return self.fused_cost(state).cost.transient if self._fused else 0.0

    def priced_plan(self, state: State, name: str, *, exact: bool = True) -> PricedPlan:
        """The state with its estimate. `drop` is removed from calls that run in their role's training layout.

        Args:
            exact: whether reallocations are priced by their transfer schedules, if these can be made within
                `MAX_SCHEDULE_S`, or by a quick estimate.
        """
        for source, target in self._edges:
            assignment = state[target].assignment
            vllm = assignment.engine == "vllm"  # a vLLM engine has a copy of the weights wherever it runs
            if assignment.drop and not vllm and in_place(state[source].assignment, assignment):
                without_drop = self.priced(self.names[target], replace(assignment, drop=False))
                state = (*state[:target], without_drop, *state[target + 1 :])
        estimate = self.estimate(state, exact_moves=exact)
        holds = self._memory.holds(state, self._memory.stays(state), estimate.fullest, self._fused_transient(state))
        estimate = replace(estimate, holds=holds)
        barrier = self.overlap is Overlap.NONE and not has_host_loop(self.space.graph)
        calls = dict(zip(self.names, state, strict=True))
        fused_cost = self.fused_cost(state) if self.fused else None
        return PricedPlan(name, self.space, calls, estimate, barrier, fused=self.fused, fused_cost=fused_cost)

    def state_of(self, assignments: Mapping[str, Assignment]) -> State:
        """The state with a plan's assignments."""
        return tuple(self.priced(name, assignments[name]) for name in self.names)

    def priced(self, name: str, assignment: Assignment) -> Candidate:
        """The candidate of a call with this assignment."""
        space = self.space
        return Candidate(assignment, space.pricing.price(space.graph.call(name), space.specs.get(name, ()), assignment))


def estimate_plan(
    plan: ExecutionPlan, specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing, *, exact: bool = True
) -> PricedPlan:
    """A plan with its estimate. `exact` is that of `Problem.priced_plan`.

    Raises:
        PlanError: the profile has no measurements of a model, or of a split.
    """
    space = Space(plan.cluster, plan.graph, specs, pricing)
    problem = Problem(space, {}, Overlap.of(plan), plan.fused, exact_fused=True)
    priced = problem.priced_plan(problem.state_of(plan.assignments), plan.name, exact=exact)
    return priced.with_staleness(plan.staleness).with_streams(plan.streams)


def move_seconds(schedule: TransferSchedule, rates: Rates) -> float:
    """Seconds of one reallocation on the slowest device. A device sends and receives at the same time."""
    inside, between = schedule.traffic()
    seconds = most = 0.0
    for sent_in, received_in, sent_out, received_out in zip(*inside, *between, strict=True):
        inside_s = max(sent_in, received_in) / rates.inside.bandwidth
        between_s = max(sent_out, received_out) / rates.between.bandwidth
        seconds = max(seconds, inside_s + between_s)
        most = max(most, sent_in + sent_out, received_in + received_out)
    return seconds + schedule.waves * rates.between.latency + rates.reallocation(float(most)) if seconds else 0.0


def quick_move_seconds(spec: ModelSpec, home: Assignment, other: Assignment, pricing: Pricing) -> float:
    """An estimate of `move_seconds` without a transfer schedule, for a search that ranks thousands of plans.

    It uses the larger of the bytes that a device receives and the mean number of bytes that a device sends.
    """
    rates = pricing.rates
    split = other.strategy.tp * other.strategy.pp if other.engine == "megatron" else 1
    receivers = other.mesh.size // (other.strategy.tp if other.engine == "vllm" else 1)
    held = home.strategy.tp * home.strategy.pp * (home.strategy.dp if home.strategy.zero_stage == 3 else 1)
    received = spec.bytes / split * (1 - 1 / held if home.mesh.overlaps(other.mesh) else 1)
    together = (
        home.mesh.first // pricing.cluster.devices_per_node == other.mesh.last // pricing.cluster.devices_per_node
    )
    link = rates.inside if together else rates.between
    size = max(received, received * receivers / home.mesh.size)
    return size / link.bandwidth + rates.reallocation(size)
