"""The fastest execution plan of a space that fits in memory.

Every combination where there are few; else improvement of one call, of calls put side by side, and Metropolis moves as
ReaL's (section 6), from several beginnings. Seeded: a problem gives the same plan each time, if no time limit ends it.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..common.errors import PlanError
from ..plan.cluster import DeviceMesh
from .problem import Problem, State
from .space import Candidate


EXHAUSTIBLE = 20_000  # combinations that are all tried
LOOKS = 80_000  # at states, known ones too, of a search
RESTARTS = 6
PATIENCE = 16_000  # looks without a better plan


@dataclass(frozen=True)
class SearchResult:
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
) -> SearchResult:
    """The best states of a problem.

    Args:
        starts: to begin from too, such as presets.
        keep: how many of the best are returned.

    Raises:
        PlanError: no combination fits in memory.
    """
    begun = time.perf_counter()
    before = problem.evaluations
    lists = [problem.candidates[name] for name in problem.names]
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
    return SearchResult(
        tuple(state for _, state in fitting),
        tuple(weight for weight, _ in fitting),
        problem.evaluations - before,
        time.perf_counter() - begun,
        combinations <= EXHAUSTIBLE,
    )


def partitions(size: int, count: int, draw: random.Random, most: int = 24) -> list[tuple[DeviceMesh, ...]]:
    """So many devices cut into parts side by side: halves, of which one is halved again until there are enough, and
    where two parts are wanted quarters with the rest; in any order, of very many orders a draw."""
    shares = [[size]]
    for _ in range(count - 1):
        shares = [
            [*parts[:at], parts[at] // 2, parts[at] // 2, *parts[at + 1 :]]
            for parts in shares
            for at in [parts.index(max(parts))]
            if parts[at] % 2 == 0
        ]
    if count == 2 and size % 4 == 0:
        shares.append([size // 4, size - size // 4])
    orders = sorted({order for parts in shares for order in itertools.permutations(parts)})
    found = []
    for order in orders if len(orders) <= most else draw.sample(orders, most):
        starts = itertools.accumulate(order, initial=0)
        found.append(tuple(DeviceMesh(first, part) for first, part in zip(starts, order, strict=False)))
    return found


class _Climb:
    """Improves one state after another, and remembers all it has weighed."""

    def __init__(
        self, problem: Problem, lists: Sequence[Sequence[Candidate]], draw: random.Random, deadline: float
    ) -> None:
        self.problem, self.lists, self.draw, self.deadline = problem, lists, draw, deadline
        self.seen: dict[tuple[int, ...], tuple[float, State]] = {}
        self.best = math.inf
        self.looks = self.improved_at = 0
        # the fastest choice of every call on every mesh, for moves that place two calls side by side
        self.on_mesh: list[dict[DeviceMesh, list[Candidate]]] = []
        for each in lists:
            table: dict[DeviceMesh, list[Candidate]] = {}
            for choice in each:
                table.setdefault(choice.assignment.mesh, []).append(choice)
            self.on_mesh.append(table)
        self.levels = [level for level in problem.levels if len(level) > 1]
        cluster = problem.space.cluster
        self.parts = {
            count: [(cluster.mesh,) * count, *partitions(cluster.size, count, self.draw)]
            for count in {len(level) for level in self.levels}
        }

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
        """Better by one call, or by several put side by side, until nothing helps."""
        now = self.weigh(state)
        moved = True
        while moved and not self._late:
            moved = False
            for move in (self._one, self._level, self._pair):
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

    def _level(self, state: State) -> Sequence[State]:
        """All calls that wait for the same ones put side by side on parts that fill the cluster, or each on all of it:
        with their fastest choices there, or with the fastest for which the others leave memory."""
        found = []
        for level in self.levels:
            for meshes in self.parts[len(level)]:
                tables = [self.on_mesh[at].get(mesh, []) for at, mesh in zip(level, meshes, strict=True)]
                if not all(tables):
                    continue
                placed = list(state)
                for at, table in zip(level, tables, strict=True):
                    placed[at] = table[0]
                found.append(tuple(placed))
                for at, table in zip(level, tables, strict=True):
                    placed[at] = self._fastest_that_fits(placed, at, table)
                found.append(tuple(placed))
        return found

    def _fastest_that_fits(self, state: list[Candidate], at: int, choices: Sequence[Candidate]) -> Candidate:
        """Of a call; the one that holds least where none does."""
        limit = self.problem.space.pricing.memory
        for choice in choices:
            tried = (*state[:at], choice, *state[at + 1 :])
            if limit is None or self.problem.memory(tried, set())[0] <= limit:
                return choice
        return min(choices, key=lambda c: c.cost.static)

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
