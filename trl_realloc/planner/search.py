"""The fastest execution plan of a space that fits in memory.

Every combination where there are few; else improvement of one call, of two calls side by side, and Metropolis moves as
ReaL's (section 6), from several beginnings. Seeded: a problem gives the same plan each time, if no time limit ends it.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..assignment import Assignment, in_place
from ..cluster import DeviceMesh
from ..errors import PlanError
from ..plan import ExecutionPlan
from ..realloc.layout import layout_of
from ..realloc.schedule import make_schedule
from ..timeline import Timeline
from .cost import CallCost, move_seconds, quick_move_seconds
from .simulate import Task, simulate, steady_seconds
from .space import Choice, Space


EXHAUSTIBLE = 20_000  # combinations that are all tried
LOOKS = 80_000  # at states, known ones too, of a search
RESTARTS = 6
PATIENCE = 16_000  # looks without a better plan

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
        self._edges = [(place[edge.source], place[edge.target]) for edge in graph.parameter_edges]

    def estimate(self, state: State, *, exact_moves: bool = False) -> Estimate:
        self.evaluations += 1
        moves = {target: self._move(state, source, target, exact_moves) for source, target in self._edges}
        stays = {target for target, seconds in moves.items() if seconds < 0}
        tasks = self._tasks(state, moves)
        sharing = self.space.pricing.rates.sharing
        seconds = steady_seconds(tasks, barrier=self.barrier, sharing=sharing, iterations=4)
        memory, fullest = self._memory(state, stays)
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

    def _memory(self, state: State, stays: set[int]) -> tuple[float, int]:
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


@dataclass(frozen=True)
class Outcome:
    """What a search came to.

    Args:
        states: the best found, the best first.
        weights: theirs.
        evaluations: candidates evaluated.
        seconds: taken.
        exhaustive: every combination was tried.
    """

    states: tuple[State, ...]
    weights: tuple[float, ...]
    evaluations: int
    seconds: float
    exhaustive: bool


def search(
    problem: Problem, *, seed: int = 0, time_limit_s: float = 5.0, starts: Sequence[State] = (), keep: int = 8
) -> Outcome:
    """The best states of a problem.

    Args:
        starts: to begin from too, such as presets.
        keep: how many of the best are returned.

    Raises:
        PlanError: no combination fits in memory.
    """
    begun = time.perf_counter()
    before = problem.evaluations
    lists = [problem.choices[name] for name in problem.names]
    combinations = math.prod(len(each) for each in lists)
    climb = _Climb(problem, lists, random.Random(seed), begun + time_limit_s)
    if combinations <= EXHAUSTIBLE:
        for state in itertools.product(*lists):
            climb.weigh(state)
    else:
        climb.run(starts)
    best = sorted(climb.seen.items(), key=lambda item: item[1][0])[:keep]
    limit = problem.space.pricing.memory
    if limit is not None and best[0][1][0] >= 1e9:
        wanted = best[0][1][0] / 1e9 * limit
        raise PlanError(
            f"the models fit on no plan of {problem.space.cluster}: the smallest found takes {wanted / 1e9:.1f} GB of "
            f"a device, and a device has {limit / 1e9:.0f} GB."
        )
    fitting = [value for _, value in best if limit is None or value[0] < 1e9]
    return Outcome(
        tuple(state for _, state in fitting),
        tuple(weight for weight, _ in fitting),
        problem.evaluations - before,
        time.perf_counter() - begun,
        combinations <= EXHAUSTIBLE,
    )


class _Climb:
    """Improves one state after another, and remembers all it has weighed."""

    def __init__(
        self, problem: Problem, lists: Sequence[Sequence[Choice]], draw: random.Random, deadline: float
    ) -> None:
        self.problem, self.lists, self.draw, self.deadline = problem, lists, draw, deadline
        self.seen: dict[tuple[int, ...], tuple[float, State]] = {}
        self.best = math.inf
        self.looks = self.improved_at = 0
        # the fastest choice of every call on every mesh, for moves that place two calls side by side
        self.on_mesh: list[dict[DeviceMesh, list[Choice]]] = []
        for each in lists:
            table: dict[DeviceMesh, list[Choice]] = {}
            for choice in each:
                table.setdefault(choice.assignment.mesh, []).append(choice)
            self.on_mesh.append(table)

    @property
    def over(self) -> bool:
        return self.looks - self.improved_at > PATIENCE or self._late

    def weigh(self, state: State) -> float:
        key = tuple(map(id, state))
        self.looks += 1
        if key not in self.seen:
            weight = self.problem.weight(state)
            self.seen[key] = (weight, state)
            if weight < self.best * (1 - 1e-9):
                self.best, self.improved_at = weight, self.looks
        return self.seen[key][0]

    def run(self, starts: Sequence[State]) -> None:
        fastest = tuple(each[0] for each in self.lists)
        smallest = tuple(min(each, key=lambda c: c.cost.static + c.cost.transient) for each in self.lists)
        beginnings = [*starts, fastest, smallest]
        beginnings += [tuple(self.draw.choice(each) for each in self.lists) for _ in range(RESTARTS)]
        ends = [self.descend(state) for state in beginnings if not self.over or not self.seen]
        state = min(ends, key=self.weigh)
        while not self.over:
            state = self.descend(self.wander(state))

    def descend(self, state: State) -> State:
        """Better by one call or by two side by side, until neither helps."""
        now = self.weigh(state)
        moved = True
        while moved and not self._late:
            moved = False
            for move in (self._one, self._pair):
                for other in move(state):
                    if (weight := self.weigh(other)) < now * (1 - 1e-9):
                        state, now, moved = other, weight, True
                    if self._late:
                        return state
        return state

    def wander(self, state: State, steps: int = 60) -> State:
        """Metropolis moves: worse by a share x of the best is taken with probability exp(-x / 0.05)."""
        now = self.weigh(state)
        for _ in range(steps):
            if self._late:
                break
            other = self._random(state)
            weight = self.weigh(other)
            if weight <= now or self.draw.random() < math.exp(-(weight - now) / (0.05 * self.best)):
                state, now = other, weight
        return state

    @property
    def _late(self) -> bool:
        return self.looks >= LOOKS or time.perf_counter() >= self.deadline

    def _one(self, state: State) -> Sequence[State]:
        """One call changed: all of its choices, or of very many a draw."""
        found = []
        for at in self.draw.sample(range(len(state)), len(state)):
            each = self.lists[at]
            drawn = each if len(each) <= 48 else [*each[:16], *self.draw.sample(list(each), 32)]
            found += [(*state[:at], choice, *state[at + 1 :]) for choice in drawn if choice is not state[at]]
        return found

    def _pair(self, state: State) -> Sequence[State]:
        """Two calls put on two disjoint meshes that fill what either had, or the cluster."""
        found = []
        pairs = list(itertools.combinations(range(len(state)), 2))
        for one, other in self.draw.sample(pairs, min(6, len(pairs))):
            meshes = [mesh for mesh in self.on_mesh[one] if mesh.size < self.problem.space.cluster.size]
            for mesh in self.draw.sample(meshes, min(6, len(meshes))):
                beside = [m for m in self.on_mesh[other] if not m.overlaps(mesh)]
                if beside:
                    fullest = max(beside, key=lambda m: m.size)
                    for choice in self.on_mesh[other][fullest][:2]:
                        changed = list(state)
                        changed[one], changed[other] = self.on_mesh[one][mesh][0], choice
                        found.append(tuple(changed))
        return found

    def _random(self, state: State) -> State:
        if self.draw.random() < 0.3 and (pairs := self._pair(state)):
            return self.draw.choice(list(pairs))
        at = self.draw.randrange(len(state))
        return (*state[:at], self.draw.choice(list(self.lists[at])), *state[at + 1 :])
