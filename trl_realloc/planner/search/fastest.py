"""The fastest execution plan of a space that fits in memory.

A small space is searched exhaustively, as long as there is time. A large one is searched from several starting states
by changing one call, by placing calls side by side, and by Metropolis moves as in ReaL (section 6), in several rounds.
The search is seeded: with the same limit a problem gives the same plan each time, unless the limit ends it.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...common.errors import PlanError
from ...plan.cluster import DeviceMesh
from .problem import Problem
from .space import Candidate, State


EXHAUSTIBLE = 20_000  # largest number of combinations for an exhaustive search
EXHAUSTING = 0.8  # share of the time limit for the exhaustive search, after which the space is searched as a large one
LOOKS = 80_000  # largest number of states in a round, repeated ones included
STARTING_PLANS = 8  # number of random starting states of a round
LOOKS_WITHOUT_GAIN = 8_000  # number of states without a better plan after which a round ends
BOUNDARIES = 48  # largest number of moves of a boundary between meshes in a step
ROUND_S = 1.25  # seconds of the time limit for each round of a large space; later rounds start at random states


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Args:
        states: best states, in order of weight.
        weights: weights of the states (`Problem.weight`).
        evaluations: number of states that were evaluated.
        seconds: duration of the search.
        exhaustive: whether all combinations were evaluated.
        is_cut_short: whether the time limit ended the search.
    """

    states: tuple[State, ...]
    weights: tuple[float, ...]
    evaluations: int
    seconds: float
    exhaustive: bool
    is_cut_short: bool = False


def search(
    problem: Problem, *, seed: int = 0, time_limit_s: float = 5.0, starts: Sequence[State] = (), keep: int = 8
) -> SearchResult:
    """The best states of a problem.

    Args:
        starts: further starting states, such as presets.
        keep: largest number of states that are returned.

    Raises:
        PlanError: no combination fits in memory.
    """
    start = time.perf_counter()
    before = problem.evaluations
    lists = [problem.candidates[name] for name in problem.names]
    combinations = math.prod(len(candidates) for candidates in lists)
    climb = _Climb(problem, lists, random.Random(seed), start + time_limit_s)
    exhaustive = combinations <= EXHAUSTIBLE and climb.try_all(itertools.product(*lists))
    if not exhaustive:
        climb.run(starts, rounds=max(1, round(time_limit_s / ROUND_S)))
    evaluations = problem.evaluations - before
    best = sorted(climb.seen.values(), key=lambda value: value[0])[:keep]
    fitting = [(weight, state) for weight, state in best if problem.fits(state)]
    memory = problem.space.pricing.memory
    if memory is not None and not fitting:
        smallest = problem.priced_plan(best[0][1], "", exact=False).estimate
        parts = sorted(smallest.holds.items(), key=lambda item: -item[1])[:2]
        raise PlanError(
            f"the models fit on no plan of {problem.space.cluster}: the smallest found takes "
            f"{smallest.memory / 1e9:.1f} GB per device "
            f"({' and '.join(f'{size / 1e9:.1f} for {name}' for name, size in parts)}), and a device has "
            f"{memory.usable / 1e9:.0f} GB for a plan."
        )
    return SearchResult(
        tuple(state for _, state in fitting),
        tuple(weight for weight, _ in fitting),
        evaluations,
        time.perf_counter() - start,
        exhaustive,
        is_cut_short=not exhaustive and not climb.is_done,
    )


def partitions(size: int, count: int, draw: random.Random, most: int = 24) -> list[tuple[DeviceMesh, ...]]:
    """AllowedOptions to divide `size` devices into `count` meshes side by side. The largest mesh is halved until there
    are enough; two meshes may also be a quarter and the rest. The meshes come in all orders, or in `most` orders at
    random if there are more."""
    shares = [[size]]
    for _ in range(count - 1):
        shares = [
            [*parts[:largest], parts[largest] // 2, parts[largest] // 2, *parts[largest + 1 :]]
            for parts in shares
            for largest in [parts.index(max(parts))]
            if parts[largest] % 2 == 0
        ]
    if count == 2 and size % 4 == 0:
        shares.append([size // 4, size - size // 4])
    orders = sorted({order for parts in shares for order in itertools.permutations(parts)})
    divisions = []
    for order in orders if len(orders) <= most else draw.sample(orders, most):
        starts = itertools.accumulate(order, initial=0)
        divisions.append(tuple(DeviceMesh(first, part) for first, part in zip(starts, order, strict=False)))
    return divisions


def _ends(mesh: DeviceMesh) -> set[int]:
    """The first device of a mesh, and the first device after it."""
    return {mesh.first, mesh.last + 1}


def _in_layout_of(model: Candidate, candidates: Sequence[Candidate]) -> Candidate:
    """The first candidate with the engine, tp, pp and ZeRO stage of `model`, or else the first one."""

    def layout(candidate: Candidate) -> tuple[str, int, int, int]:
        strategy = candidate.assignment.strategy
        return candidate.assignment.engine, strategy.tp, strategy.pp, strategy.zero_stage

    return next((candidate for candidate in candidates if layout(candidate) == layout(model)), candidates[0])


class _Climb:
    """Improves states step by step, and caches the weight of each state."""

    def __init__(
        self, problem: Problem, lists: Sequence[Sequence[Candidate]], draw: random.Random, deadline: float
    ) -> None:
        self.problem, self.lists, self.draw, self.deadline = problem, lists, draw, deadline
        self.seen: dict[tuple[int, ...], tuple[float, State]] = {}
        self.best = math.inf
        self.looks = self.improved_at = 0
        # candidates of each call by mesh, the fastest first, for moves that place calls side by side
        self.on_mesh: list[dict[DeviceMesh, list[Candidate]]] = []
        for candidates in lists:
            table: dict[DeviceMesh, list[Candidate]] = {}
            for candidate in candidates:
                table.setdefault(candidate.assignment.mesh, []).append(candidate)
            self.on_mesh.append(table)
        self.levels = [level for level in problem.levels if len(level) > 1]
        cluster = problem.space.cluster
        ends = {place for table in self.on_mesh for mesh in table for place in _ends(mesh)}
        self._inside = ends - _ends(cluster.mesh)
        self.edges = sorted(self._inside)
        self.parts = {
            count: [(cluster.mesh,) * count, *partitions(cluster.size, count, self.draw)]
            for count in {len(level) for level in self.levels}
        }

    @property
    def is_done(self) -> bool:
        """True if the round has evaluated `LOOKS` states, or more than `LOOKS_WITHOUT_GAIN` without a better plan."""
        return self.looks >= LOOKS or self.looks - self.improved_at > LOOKS_WITHOUT_GAIN

    @property
    def over(self) -> bool:
        return self.is_done or self._late

    def weigh(self, state: State) -> float:
        key = tuple(map(id, state))
        self.looks += 1
        if key not in self.seen:
            weight = self.problem.weight(state)
            self.seen[key] = (weight, state)
            if weight < self.best * (1 - 1e-9):
                self.best, self.improved_at = weight, self.looks
        return self.seen[key][0]

    def try_all(self, states: Iterable[State]) -> bool:
        """Weighs all these states. Returns whether there was time for all."""
        now = time.perf_counter()
        end = now + EXHAUSTING * (self.deadline - now)
        for state in states:
            self.weigh(state)
            if time.perf_counter() >= end:
                self.looks = self.improved_at = 0  # for the search that follows
                return False
        return True

    def run(self, starts: Sequence[State], rounds: int) -> None:
        fastest = tuple(candidates[0] for candidates in self.lists)
        smallest = tuple(min(candidates, key=lambda c: c.cost.static + c.cost.transient) for candidates in self.lists)
        first_starts = [*starts, fastest, smallest, *self._roles_apart(fastest)]
        self.weigh(smallest)  # which may be all that fits among the states that there is time for
        for number in range(rounds):
            self.looks = self.improved_at = 0
            if not number or time.perf_counter() < self.deadline:
                self._round([] if number else first_starts)

    def _round(self, starts: Sequence[State]) -> None:
        random_states = [tuple(map(self.draw.choice, self.lists)) for _ in range(STARTING_PLANS)]
        beginnings = [*starts, *random_states]
        ends: list[State] = []
        for state in beginnings:
            if not ends or not self.over:
                ends.append(self.descend(state))
        state = min(ends, key=self.weigh)
        while not self.over:
            state = self.descend(self.wander(state))

    def _roles_apart(self, fastest: State) -> Iterator[State]:
        """States in which the calls of one trained role run on the first devices and those of the other trained roles
        on the rest, for several divisions of the cluster. Calls of frozen roles run where they are fastest."""
        graph, cluster = self.problem.space.graph, self.problem.space.cluster
        first, *others = graph.trained_roles
        for edge in self._some_edges() if others else ():
            sides = {role: DeviceMesh(edge, cluster.size - edge) for role in others}
            sides[first] = DeviceMesh(0, edge)
            roles = [graph.call(name).role for name in self.problem.names]
            tables = [self.on_mesh[n].get(sides[role], []) if role in sides else [] for n, role in enumerate(roles)]
            yield tuple(table[0] if table else free for table, free in zip(tables, fastest, strict=True))

    def _some_edges(self) -> list[int]:
        """Boundaries of meshes nearest to the eighths of the cluster."""
        size = self.problem.space.cluster.size
        nearest = (min(self.edges, key=lambda edge: abs(edge - size * part // 8)) for part in range(1, 8) if self.edges)
        return list(dict.fromkeys(nearest))

    def descend(self, state: State) -> State:
        """Applies moves that lower the weight until none does."""
        now = self.weigh(state)
        moved = True
        while moved and not self._late:
            moved = False
            for move in (self._one, self._level, self._boundary, self._pair):
                for other in move(state):
                    if (weight := self.weigh(other)) < now * (1 - 1e-9):
                        state, now, moved = other, weight, True
                    if self._late:
                        return state
        return state

    def wander(self, state: State, steps: int = 60) -> State:
        """Metropolis moves: a state that is worse by a share x of the best weight is accepted with probability
        exp(-x / 0.05)."""
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
        """States with another candidate for one call, or with a sample of many candidates."""
        states = []
        for call in self.draw.sample(range(len(state)), len(state)):
            candidates = self.lists[call]
            if len(candidates) > 48:
                candidates = [*candidates[:16], *self.draw.sample(list(candidates), 32)]
            states += [(*state[:call], new, *state[call + 1 :]) for new in candidates if new is not state[call]]
        return states

    def _level(self, state: State) -> Sequence[State]:
        """States in which the calls of one level of the graph run side by side on parts of the cluster, or each on the
        whole cluster: with their fastest candidates, or with the fastest that fit in memory together."""
        states = []
        for level in self.levels:
            for meshes in self.parts[len(level)]:
                tables = [self.on_mesh[call].get(mesh, []) for call, mesh in zip(level, meshes, strict=True)]
                if not all(tables):
                    continue
                placed = list(state)
                for call, table in zip(level, tables, strict=True):
                    placed[call] = table[0]
                states.append(tuple(placed))
                for call, table in zip(level, tables, strict=True):
                    placed[call] = self._fastest_that_fits(placed, call, table)
                states.append(tuple(placed))
        return states

    def _boundary(self, state: State) -> Sequence[State]:
        """States in which a boundary between meshes is moved."""
        pairs = itertools.product(self._edges_of(state), self.edges)
        changed = (self._moved(state, edge, other) for edge, other in pairs if edge != other)
        states = [moved for moved in changed if moved is not None]
        return self.draw.sample(states, min(BOUNDARIES, len(states)))

    def _edges_of(self, state: State) -> list[int]:
        """Boundaries of the state's meshes inside the cluster."""
        return sorted({place for candidate in state for place in _ends(candidate.assignment.mesh)} & self._inside)

    def _moved(self, state: State, edge: int, other: int) -> State | None:
        """The state in which all meshes that begin or end at `edge` begin or end at `other`. Calls keep their layouts
        if possible. `None` if a call has no candidate on its new mesh."""
        placed = []
        for call, candidate in enumerate(state):
            mesh = candidate.assignment.mesh
            first, after = (other if place == edge else place for place in (mesh.first, mesh.last + 1))
            table = self.on_mesh[call].get(DeviceMesh(first, after - first)) if first < after else None
            if not table:
                return None
            placed.append(_in_layout_of(candidate, table))
        return tuple(placed)

    def _fastest_that_fits(self, state: list[Candidate], call: int, candidates: Sequence[Candidate]) -> Candidate:
        """The first candidate of a call that fits in memory, or else the one with the least static memory."""
        for candidate in candidates:
            changed = (*state[:call], candidate, *state[call + 1 :])
            if self.problem.space.pricing.fits(self.problem.memory(changed, set())[0]):
                return candidate
        return min(candidates, key=lambda c: c.cost.static)

    def _pair(self, state: State) -> Sequence[State]:
        """States in which two calls run on two disjoint meshes."""
        states = []
        pairs = list(itertools.combinations(range(len(state)), 2))
        for first, other in self.draw.sample(pairs, min(6, len(pairs))):
            meshes = [mesh for mesh in self.on_mesh[first] if mesh.size < self.problem.space.cluster.size]
            for mesh in self.draw.sample(meshes, min(6, len(meshes))):
                disjoint = [m for m in self.on_mesh[other] if not m.overlaps(mesh)]
                if disjoint:
                    largest = max(disjoint, key=lambda m: m.size)
                    for candidate in self.on_mesh[other][largest][:2]:
                        changed = list(state)
                        changed[first], changed[other] = self.on_mesh[first][mesh][0], candidate
                        states.append(tuple(changed))
        return states

    def _random(self, state: State) -> State:
        way = self.draw.random()
        if way < 0.3 and (pairs := self._pair(state)):
            return self.draw.choice(list(pairs))
        if 0.3 <= way < 0.5 and (edges := self._edges_of(state)):
            moved = self._moved(state, self.draw.choice(edges), self.draw.choice(self.edges))
            if moved is not None:
                return moved
        call = self.draw.randrange(len(state))
        return (*state[:call], self.draw.choice(list(self.lists[call])), *state[call + 1 :])
