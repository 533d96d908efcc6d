"""Estimates a combination of one assignment for each call: seconds of an iteration, reallocations, memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..plan.assignment import Assignment, in_place
from ..plan.execution_plan import ExecutionPlan
from ..plan.model_spec import ModelSpec
from ..plan.staleness import Staleness
from ..plan.streams import Streams, early_call
from ..plan.timeline import Timeline
from ..realloc.layout import layout_of
from ..realloc.schedule import make_schedule
from .ahead_simulation import AheadIterations, simulate_ahead
from .cost import CallCost, Pricing
from .reallocation_cost import move_seconds, quick_move_seconds
from .simulate import Overlap, Task, spans_of, steady_seconds, steady_times, tasks_of
from .space import Candidate, Space
from .stream_cost import StreamPrices
from .stream_simulation import StreamedIteration, simulate_streams


State = tuple[Candidate, ...]


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
        barrier, streams, staleness: of the plan.
    """

    name: str
    space: Space
    calls: Mapping[str, Candidate]
    estimate: Estimate
    barrier: bool = False
    streams: Streams | None = None
    staleness: Staleness = Staleness()

    @property
    def plan(self) -> ExecutionPlan:
        """Raises `PlanError` where no engine of this package can do an assignment (`Space.deep_generation`)."""
        assignments = {name: candidate.assignment for name, candidate in self.calls.items()}
        cluster, graph = self.space.cluster, self.space.graph
        return ExecutionPlan(cluster, assignments, graph, self.name, self.streams, self.barrier, self.staleness)

    @property
    def costs(self) -> dict[str, CallCost]:
        return {name: candidate.cost for name, candidate in self.calls.items()}

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def device_seconds(self) -> dict[str, float]:
        """The calls' seconds by cause, each multiplied by the number of devices of the call's mesh."""
        spent: dict[str, float] = {}
        for candidate in self.calls.values():
            for part, seconds in candidate.cost.parts.items():
                spent[part] = spent.get(part, 0.0) + seconds * candidate.assignment.mesh.size
        return spent

    @property
    def fits(self) -> bool:
        memory = self.space.pricing.memory
        return memory is None or self.estimate.memory <= memory.usable

    def streamed(self) -> StreamedIteration:
        """An iteration sample by sample, of a plan that has streams."""
        seconds = {name: cost.seconds for name, cost in self.costs.items()}
        prices = StreamPrices(self.plan, self.space.specs, self.space.pricing)
        return simulate_streams(prices, seconds, self.estimate.moves)

    def with_streams(self, streams: Streams | None) -> PricedPlan:
        """The same assignments with these streams, and the seconds that an iteration takes then. Each device holds as
        much as without streams: an engine that sleeps between its calls gives its memory back before its devices
        score. Raises `PlanError` where the plan cannot have the streams."""
        assert self.streams is None, "the estimate of a plan without streams"
        changed = replace(self, streams=streams)
        if streams is None or not changed.plan.streamed:
            return changed
        return replace(changed, estimate=replace(self.estimate, seconds=changed.streamed().seconds))

    def ahead(self) -> AheadIterations:
        """Some iterations of a plan that has a staleness."""
        return simulate_ahead(self.plan, self.space.specs, self.space.pricing, self.costs, self.estimate.moves)

    def with_staleness(self, staleness: Staleness) -> PricedPlan:
        """The same assignments with this staleness, the seconds that an iteration takes then, and the tokens' ages.
        Each device holds as much as without. Raises `PlanError` where the plan cannot have it."""
        assert not self.staleness.versions, "the estimate of a plan without staleness"
        changed = replace(self, staleness=staleness)
        if not staleness.versions:
            return changed
        found = changed.ahead()
        estimate = replace(self.estimate, seconds=found.seconds, mean_age=found.mean_age, oldest=found.oldest)
        return replace(changed, estimate=estimate)

    @property
    def timeline(self) -> Timeline:
        """The expected timeline of one iteration after the first ones; of several with a staleness. As in a measured
        one, a span begins when its samples are there."""
        if self.staleness.versions:
            return Timeline(self.ahead().spans)
        if self.streams is not None:
            return Timeline(self.streamed().spans)
        seconds = {name: cost.seconds for name, cost in self.costs.items()}
        waiting = {
            name: cost.parts.get("handover", 0.0) / cost.seconds for name, cost in self.costs.items() if cost.seconds
        }
        plan, sharing = self.plan, self.space.pricing.rates.sharing
        tasks, per_node = tasks_of(plan, seconds, self.estimate.moves), plan.cluster.devices_per_node
        _, times = steady_times(tasks, overlap=Overlap.of(plan), sharing=sharing, devices_per_node=per_node)
        spans = [span for task, of_task in zip(tasks, times, strict=True) for span in spans_of(task, of_task)]
        return Timeline(replace(span, start=span.start + waiting.get(span.call, 0.0) * span.seconds) for span in spans)


@dataclass
class Problem:
    """A space with its candidates, and the graph in the form in which `estimate` needs it.

    Args:
        candidates: the assignments that each call may have, by the call's name.
        overlap: of iterations.
    """

    space: Space
    candidates: Mapping[str, Sequence[Candidate]]
    overlap: Overlap = Overlap.GENERATION
    evaluations: int = 0
    _moves: dict[tuple[int, int, bool], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.space.graph
        self.names = graph.order
        place = {name: at for at, name in enumerate(self.names)}
        self._data = [
            tuple(place[edge.producer] for edge in graph.data_edges if edge.consumer == name) for name in self.names
        ]
        trained = [graph.train_call(graph.call(name).role) for name in self.names]
        self._home = [place[name] if name is not None else None for name in trained]
        depth: list[int] = []  # the longest chain of calls that each call waits for
        for producers in self._data:
            depth.append(1 + max((depth[at] for at in producers), default=-1))
        self.levels = [
            [at for at, call_depth in enumerate(depth) if call_depth == level] for level in sorted(set(depth))
        ]
        self._edges = [(place[edge.source], place[edge.target]) for edge in graph.parameter_edges]

    def estimate(self, state: State, *, exact_moves: bool = False) -> Estimate:
        self.evaluations += 1
        moves = {target: self._move(state, source, target, exact_moves) for source, target in self._edges}
        stays = {target for target, seconds in moves.items() if seconds < 0}
        seconds = self._seconds(state, moves)
        memory, fullest = self.memory(state, stays)
        named = {self.names[target]: float(seconds) for target, seconds in moves.items() if seconds > 0}
        return Estimate(float(seconds), named, memory, fullest)

    def _seconds(self, state: State, moves: Mapping[int, float]) -> float:
        """Seconds of an iteration.

        Args:
            moves: of each reallocation, by the place of the call that receives the parameters.
        """
        tasks, sharing = self._tasks(state, moves), self.space.pricing.rates.sharing
        per_node = self.space.cluster.devices_per_node
        return steady_seconds(tasks, overlap=self.overlap, sharing=sharing, devices_per_node=per_node)

    def weight(self, state: State) -> float:
        """What the search minimises: seconds, or for a plan that does not fit in memory 1e9 times the share by which it
        exceeds the memory, which is more than any plan that fits."""
        estimate = self.estimate(state)
        memory = self.space.pricing.memory
        if memory is not None and estimate.memory > memory.usable:
            return 1e9 * estimate.memory / memory.usable
        return estimate.seconds

    def _move(self, state: State, source: int, target: int, exact: bool) -> float:
        """Seconds of a reallocation; negative where both assignments have the same layout."""
        home, other = state[source], state[target]
        key = (id(home), id(other), exact)
        if key not in self._moves:
            factor = self.space.pricing.corrections.move(self.names[target])
            self._moves[key] = factor * self._priced_move(home, other, self._sent(source, target), exact)
        return self._moves[key]

    def _sent(self, source: int, target: int) -> Iterator[ModelSpec]:
        """The parameters that a reallocation sends: the source's, in the target's dtype if that is narrower."""
        specs = self.space.specs
        for sent, taken in zip(specs.get(self.names[source], ()), specs.get(self.names[target], ()), strict=False):
            narrower = min(sent.bytes_per_element, taken.bytes_per_element)
            yield sent if narrower == sent.bytes_per_element else replace(sent, bytes_per_element=narrower)

    def _priced_move(self, home: Candidate, other: Candidate, specs: Iterable[ModelSpec], exact: bool) -> float:
        if in_place(home.assignment, other.assignment):
            return -1.0
        pricing = self.space.pricing
        seconds = 0.0
        for spec in specs:
            if exact:
                layouts = layout_of(home.assignment, spec), layout_of(other.assignment, spec)
                seconds += move_seconds(make_schedule(self.space.cluster, *layouts), pricing.rates)
            else:
                seconds += quick_move_seconds(spec, home.assignment, other.assignment, pricing)
        return seconds

    def _tasks(self, state: State, moves: Mapping[int, float]) -> list[Task]:
        early = early_call(self.space.graph, {n: c.assignment for n, c in zip(self.names, state, strict=True)})
        tasks: list[Task] = []
        where: list[int] = []
        moved = itertools.accumulate(self._is_moved(at, moves) for at in range(len(state)))
        places = [at + before for at, before in enumerate(moved)]  # of the calls' tasks
        for at, candidate in enumerate(state):
            after = tuple(where[producer] for producer in self._data[at])
            home, is_early = self._home[at], self.names[at] == early
            previous = None if home is None else places[home]
            if self._is_moved(at, moves) and home is not None:
                meshes = (state[home].assignment.mesh, candidate.assignment.mesh)
                tasks.append(Task("", meshes, moves[at], after, previous, moves=True, early=is_early))
                after = (*after, len(tasks) - 1)
            where.append(len(tasks))
            tasks.append(Task("", (candidate.assignment.mesh,), candidate.seconds, after, previous, early=is_early))
        return tasks

    def _is_moved(self, at: int, moves: Mapping[int, float]) -> bool:
        return self._home[at] is not None and moves.get(at, 0.0) > 0

    def memory(self, state: State, stays: set[int]) -> tuple[float, int]:
        """Bytes of the fullest device, and its number: the sum of what its calls hold, and the most that one of them
        adds while it runs.

        Args:
            stays: places of calls that run in their role's training layout.
        """
        most, fullest = 0.0, 0
        for device in {candidate.assignment.mesh.first for candidate in state}:
            static, transient = sum(self._overhead(state, stays, device).values()), 0.0
            for at, candidate in enumerate(state):
                if device in candidate.assignment.mesh:
                    static += 0.0 if self._shares(at, candidate, stays) else candidate.cost.static
                    transient = max(transient, candidate.cost.transient)
            if static + transient > most:
                most, fullest = static + transient, device
        return most, fullest

    def _shares(self, at: int, candidate: Candidate, stays: set[int]) -> bool:
        """Whether a call computes on the parameters that its role's training holds."""
        return at in stays and candidate.assignment.engine != "vllm"

    def _overhead(self, state: State, stays: set[int], device: int) -> dict[str, float]:
        """Bytes of a device's contexts and communicators, each under its name."""
        memory, sizes = self.space.pricing.memory, dict[str, float]()
        if memory is not None and memory.context:
            sizes["contexts"] = memory.context * self._processes(state, device)
        if memory is not None and memory.communicator:
            sizes["communicators"] = memory.communicator * self._communicators(state, stays, device)
        return sizes

    def _processes(self, state: State, device: int) -> int:
        """The number of processes on a device: a vLLM engine is one of its own."""
        return 1 + sum(c.assignment.engine == "vllm" and device in c.assignment.mesh for c in state)

    def holds(self, state: State, stays: set[int], device: int) -> dict[str, float]:
        """Bytes that a device holds, by what holds them (`Estimate.holds`)."""
        on_device = [(at, c) for at, c in enumerate(state) if device in c.assignment.mesh]
        holds = {self.names[at]: c.cost.static for at, c in on_device if not self._shares(at, c, stays)}
        at, most = max(on_device, key=lambda item: item[1].cost.transient)
        holds[f"while {self.names[at]} runs"] = most.cost.transient
        holds |= self._overhead(state, stays, device)
        return {name: size for name, size in holds.items() if size}

    def _communicators(self, state: State, stays: set[int], device: int) -> int:
        """The number of NCCL communicators that a device is in, as `runtime.process_groups` makes them."""
        groups: set[object] = set()
        for candidate in state:
            mesh, strategy = candidate.assignment.mesh, candidate.assignment.strategy
            if device not in mesh or mesh.size == 1:
                continue
            groups.add(mesh)
            if candidate.assignment.engine == "megatron":
                degrees = {"dp": strategy.dp, "tp": strategy.tp, "pp": strategy.pp, "ends": strategy.pp}
                groups |= {(kind, mesh, strategy.tp, strategy.pp) for kind, size in degrees.items() if size > 1}
        for source, target in self._edges:
            meshes = state[source].assignment.mesh, state[target].assignment.mesh
            if target not in stays and any(device in mesh for mesh in meshes):
                groups.add(("reallocation", target))
        return len(groups)

    def priced_plan(self, state: State, name: str, *, exact: bool = True) -> PricedPlan:
        """The state with its estimate. `drop` is removed from calls that run in their role's training layout.

        Args:
            exact: price reallocations by their transfer schedules; otherwise by a bound.
        """
        for source, target in self._edges:
            assignment = state[target].assignment
            vllm = assignment.engine == "vllm"  # which has weights of its own wherever it runs
            if assignment.drop and not vllm and in_place(state[source].assignment, assignment):
                kept = self._priced(self.names[target], replace(assignment, drop=False))
                state = (*state[:target], kept, *state[target + 1 :])
        estimate = self.estimate(state, exact_moves=exact)
        stays = {
            target for source, target in self._edges if in_place(state[source].assignment, state[target].assignment)
        }
        estimate = replace(estimate, holds=self.holds(state, stays, estimate.fullest))
        barrier = self.overlap is Overlap.NONE
        return PricedPlan(name, self.space, dict(zip(self.names, state, strict=True)), estimate, barrier)

    def state_of(self, assignments: Mapping[str, Assignment]) -> State:
        """The state that a written plan's assignments make."""
        return tuple(self._priced(name, assignments[name]) for name in self.names)

    def _priced(self, name: str, assignment: Assignment) -> Candidate:
        space = self.space
        return Candidate(assignment, space.pricing.price(space.graph.call(name), space.specs.get(name, ()), assignment))


def estimate_plan(
    plan: ExecutionPlan, specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing, *, exact: bool = True
) -> PricedPlan:
    """A written plan with its estimate.

    Args:
        exact: as `Problem.priced_plan`'s.

    Raises:
        PlanError: the profile has no measurements of a model, or of a split.
    """
    problem = Problem(Space(plan.cluster, plan.graph, specs, pricing), {}, Overlap.of(plan))
    priced = problem.priced_plan(problem.state_of(plan.assignments), plan.name, exact=exact)
    return priced.with_streams(plan.streams).with_staleness(plan.staleness)
