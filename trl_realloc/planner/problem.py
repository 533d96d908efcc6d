"""What a combination of choices comes to: an iteration's seconds, its reallocations, the fullest device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..plan.assignment import Assignment, in_place
from ..plan.execution_plan import ExecutionPlan
from ..plan.timeline import Timeline
from ..realloc.layout import layout_of
from ..realloc.schedule import make_schedule
from .cost import CallCost, move_seconds, quick_move_seconds
from .simulate import Task, simulate, steady_seconds
from .space import Choice, Space


State = tuple[Choice, ...]


@dataclass(frozen=True)
class Estimate:
    """What a combination of choices comes to.

    Args:
        seconds: of an iteration in the long run.
        moves: seconds of each reallocation, by the call that gets the parameters.
        memory: bytes of the fullest device.
        fullest: that device.
    """

    seconds: float
    moves: Mapping[str, float]
    memory: float
    fullest: int


@dataclass(frozen=True)
class Found:
    """A combination with its estimate and its calls' prices."""

    name: str
    space: Space
    choices: Mapping[str, Choice]
    estimate: Estimate

    @property
    def plan(self) -> ExecutionPlan:
        """Raises `PlanError` where an assignment is none that an engine here can do (`Space.deep_generation`)."""
        assignments = {name: choice.assignment for name, choice in self.choices.items()}
        return ExecutionPlan(self.space.cluster, assignments, self.space.graph, self.name)

    @property
    def costs(self) -> dict[str, CallCost]:
        return {name: choice.cost for name, choice in self.choices.items()}

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def device_seconds(self) -> dict[str, float]:
        """By cause: what the calls take, each times the devices of its mesh."""
        spent: dict[str, float] = {}
        for choice in self.choices.values():
            for part, seconds in choice.cost.parts.items():
                spent[part] = spent.get(part, 0.0) + seconds * choice.assignment.mesh.size
        return spent

    @property
    def fits(self) -> bool:
        limit = self.space.pricing.memory
        return limit is None or self.estimate.memory <= limit

    @property
    def timeline(self) -> Timeline:
        """One iteration as it is expected to go."""
        seconds = {name: cost.seconds for name, cost in self.costs.items()}
        sharing = self.space.pricing.rates.sharing
        spans = simulate(self.plan, seconds, self.estimate.moves, iterations=2, barrier=True, sharing=sharing)
        return spans.of_step(1)


@dataclass
class Problem:
    """A space with its choices, ready to be evaluated.

    Args:
        barrier: iterations do not overlap, as the trainer's do not.
    """

    space: Space
    choices: Mapping[str, Sequence[Choice]]
    barrier: bool = True
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
        depth: list[int] = []  # of a call: how many others it waits for, one after the other
        for producers in self._data:
            depth.append(1 + max((depth[at] for at in producers), default=-1))
        self.levels = [[at for at, own in enumerate(depth) if own == level] for level in sorted(set(depth))]
        self._edges = [(place[edge.source], place[edge.target]) for edge in graph.parameter_edges]

    def estimate(self, state: State, *, exact_moves: bool = False) -> Estimate:
        self.evaluations += 1
        moves = {target: self._move(state, source, target, exact_moves) for source, target in self._edges}
        stays = {target for target, seconds in moves.items() if seconds < 0}
        tasks = self._tasks(state, moves)
        sharing = self.space.pricing.rates.sharing
        seconds = steady_seconds(tasks, barrier=self.barrier, sharing=sharing, iterations=4)
        memory, fullest = self.memory(state, stays)
        named = {self.names[target]: float(seconds) for target, seconds in moves.items() if seconds > 0}
        return Estimate(float(seconds), named, memory, fullest)

    def weight(self, state: State) -> float:
        """What the search makes small: seconds; a plan that does not fit is worse than any that does, by how much it
        does not."""
        estimate = self.estimate(state)
        limit = self.space.pricing.memory
        if limit is not None and estimate.memory > limit:
            return 1e9 * estimate.memory / limit
        return estimate.seconds

    def _move(self, state: State, source: int, target: int, exact: bool) -> float:
        """Seconds of a reallocation; negative where nothing is to be moved."""
        home, other = state[source], state[target]
        key = (id(home), id(other), exact)
        if key not in self._moves:
            self._moves[key] = self._priced_move(home, other, self.names[source], exact)
        return self._moves[key]

    def _priced_move(self, home: Choice, other: Choice, name: str, exact: bool) -> float:
        if in_place(home.assignment, other.assignment):
            return -1.0
        pricing = self.space.pricing
        seconds = 0.0
        for spec in self.space.specs.get(name, ()):
            if exact:
                layouts = layout_of(home.assignment, spec), layout_of(other.assignment, spec)
                seconds += move_seconds(make_schedule(self.space.cluster, *layouts), pricing.rates)
            else:
                seconds += quick_move_seconds(spec, home.assignment, other.assignment, pricing)
        return seconds

    def _tasks(self, state: State, moves: Mapping[int, float]) -> list[Task]:
        tasks: list[Task] = []
        where: list[int] = []
        homes: list[tuple[int, int]] = []
        for at, choice in enumerate(state):
            after = tuple(where[producer] for producer in self._data[at])
            home = self._home[at]
            taken = moves.get(at, 0.0)
            if taken > 0 and home is not None:
                homes.append((len(tasks), home))
                meshes = (state[home].assignment.mesh, choice.assignment.mesh)
                tasks.append(Task("", meshes, taken, after, moves=True))
                after = (*after, len(tasks) - 1)
            if home is not None:
                homes.append((len(tasks), home))
            where.append(len(tasks))
            tasks.append(Task("", (choice.assignment.mesh,), choice.seconds, after))
        for place, home in homes:
            task = tasks[place]
            tasks[place] = Task("", task.meshes, task.seconds, task.after, where[home], task.moves)
        return tasks

    def memory(self, state: State, stays: set[int]) -> tuple[float, int]:
        """Bytes of the fullest device, and which: what its calls hold, and the most that one of them takes on top."""
        most, fullest = 0.0, 0
        for device in {choice.assignment.mesh.first for choice in state}:
            static = transient = 0.0
            for at, choice in enumerate(state):
                if device in choice.assignment.mesh:
                    shares = at in stays and choice.assignment.engine != "vllm"  # the very parameters that are trained
                    static += 0.0 if shares else choice.cost.static
                    transient = max(transient, choice.cost.transient)
            if static + transient > most:
                most, fullest = static + transient, device
        return most, fullest

    def found(self, state: State, name: str, *, exact: bool = True) -> Found:
        """The state with its reallocations priced by their schedules, or where not `exact` by their bounds; nothing is
        dropped that is in place."""
        for source, target in self._edges:
            own = state[target].assignment
            if own.drop and in_place(state[source].assignment, own):
                kept = self._priced(self.names[target], replace(own, drop=False))
                state = (*state[:target], kept, *state[target + 1 :])
        estimate = self.estimate(state, exact_moves=exact)
        return Found(name, self.space, dict(zip(self.names, state, strict=True)), estimate)

    def state_of(self, assignments: Mapping[str, Assignment]) -> State:
        """A written plan, priced."""
        return tuple(self._priced(name, assignments[name]) for name in self.names)

    def _priced(self, name: str, assignment: Assignment) -> Choice:
        space = self.space
        return Choice(assignment, space.pricing.price(space.graph.call(name), space.specs.get(name, ()), assignment))
