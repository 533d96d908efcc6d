"""Choice of plans that train two models in fused pipelines: the assignments of both calls that train, and the placement
of the other calls.

A mesh and a split that are slow for each call alone can be the best for both together. Therefore all pairs of pipelines
on a plan's meshes are compared by the lower bound of their schedules. For the best plans a schedule is searched, which
gives their price.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...common.errors import PlanError
from ...plan.assignment import Assignment, in_place
from ...plan.cluster import DeviceMesh, check_mesh
from ...plan.dataflow import CallKind, DataflowGraph
from ...plan.fused import ENGINE, Fused, order_problems
from .fused_cost import Pair, fused_prices
from .ladder import FUSED, Option
from .priced_plan import PricedPlan
from .problem import Problem
from .space import Candidate, Space, State


PAIRS = 4  # number of fastest pairs on a mesh that are tried, besides the one with the least memory
SPLIT = 3  # number of candidates per call and split: the fastest, and the one with the least memory
SEARCHED = 3  # number of plans whose schedules are searched
FASTEST, SMALL = 12, 6  # numbers of fastest and of smallest candidates of another call that are tried
PLACING_ROUNDS = 4  # largest number of rounds in which the other calls are placed one by one


def may_fuse(setting: bool | None, *, on_gpus: bool) -> bool:
    """True if a plan with fused training may be chosen.

    Args:
        setting: `fused_training` of the config. `None` (not set) allows fused training only without GPUs.
    """
    return not on_gpus if setting is None else setting  # no measurement on GPUs shows that it is faster there


def pair_of(graph: DataflowGraph) -> Fused:
    """The two calls of a graph that train; empty if it has more or fewer, or if one depends on the other's training."""
    trains = [name for name in graph.order if graph.call(name).trains]
    if len(trains) != 2 or any(order_problems(graph, (trains[0], trains[1]))):
        return ()
    return trains[0], trains[1]


def why_none(space: Space) -> str:
    """The reason why no plan of a space can fuse two calls, as text; empty if a plan can."""
    pair = pair_of(space.graph)
    if not pair:
        return "the algorithm has no two calls that could train at the same time"
    if space.cluster.size == 1:
        return "one device is no pipeline"
    if ENGINE not in space.engines:
        return f"only engine {ENGINE} has pipeline stages, and it is not among the engines of this run"
    if any(len(space.specs.get(name, ())) != 1 for name in pair):
        return "each of both calls has to train one model"
    return ""


def choose_fused(
    space: Space,
    candidates: Mapping[str, Sequence[Candidate]],
    baseline: PricedPlan,
    deadline: float,
    latest: float = math.inf,
) -> Option:
    """The best plan with fused training.

    Args:
        candidates: candidates of each call (`Space.candidates`).
        baseline: plan without options. Its meshes are tried, with its other calls as a start.
        deadline: value of `time.perf_counter` after which no further pair of pipelines is tried.
        latest: value of `time.perf_counter` after which no further schedule is searched.
    """
    if reason := why_none(space):
        return Option(FUSED, baseline, reason=reason)
    search = _FusedSearch(space, candidates, baseline)
    search.run(deadline)
    best_plans = search.plans()
    if not best_plans:
        return Option(FUSED, baseline, reason=search.why_nothing)
    limit = baseline.seconds / (1 + space.pricing.rates.error)
    promising = [plan for plan in best_plans if plan.seconds < limit]
    searched: list[PricedPlan] = []
    for plan in promising:
        if time.perf_counter() < latest:
            searched.append(search.exact(plan))
    if promising and not searched:
        return Option(FUSED, baseline, reason="no time was left to search its schedules")
    fused = min(searched or best_plans[:1], key=lambda plan: plan.seconds)
    return Option(FUSED, baseline, {FUSED: fused})


class _FusedSearch:
    """Searches plans that fuse the two calls that train, by the lower bound of their schedules."""

    def __init__(self, space: Space, candidates: Mapping[str, Sequence[Candidate]], baseline: PricedPlan) -> None:
        self.space, self.candidates, self.baseline = space, candidates, baseline
        self.fused = pair_of(space.graph)
        self.problem = Problem(space, candidates, baseline.overlap, self.fused)
        self.exact_problem = Problem(space, candidates, baseline.overlap, self.fused, exact_fused=True)
        self.prices = fused_prices(space, self.fused)
        self.places = [self.problem.names.index(name) for name in self.fused]
        self.others = [call for call, name in enumerate(self.problem.names) if name not in self.fused]
        self.has_pairs = False
        self._pairs: dict[int, list[Pair]] = {}  # number of devices -> pairs on the first devices
        self._lists: dict[int, tuple[list[Candidate], list[Candidate], list[Candidate]]] = {}
        self._scoring: dict[tuple[str, Assignment], Candidate] = {}
        self._states: dict[tuple[object, ...], tuple[float, State]] = {}

    @property
    def why_nothing(self) -> str:
        if not self.has_pairs:
            return "no mesh has two pipelines of both models that could be fused"
        return "the stages of both models and the activations of both do not fit in a device's memory"

    def run(self, deadline: float) -> None:
        """Try the pairs of pipelines on the meshes of the baseline, at least one in total."""
        start = tuple(self.baseline.calls[name] for name in self.problem.names)
        for mesh in self._meshes(start):
            for pair in self._pairs_on(mesh):
                if self._states and time.perf_counter() >= deadline:
                    return
                state = list(start)
                for place, candidate in zip(self.places, pair, strict=True):
                    state[place] = candidate
                weight, improved = self._improved(tuple(state))
                self._states.setdefault(tuple(c.assignment for c in improved), (weight, improved))

    def plans(self) -> list[PricedPlan]:
        """The best plans that fit in memory, the fastest first."""
        best = sorted(self._states.values(), key=lambda item: item[0])[:SEARCHED]
        priced = [self._priced(self.problem, state) for _, state in best]
        return sorted((plan for plan in priced if plan.fits), key=lambda plan: plan.seconds)

    def exact(self, plan: PricedPlan) -> PricedPlan:
        """The same plan, priced by the schedule of a search."""
        return self._priced(self.exact_problem, tuple(plan.calls.values()))

    def _priced(self, problem: Problem, state: State) -> PricedPlan:
        return problem.priced_plan(state, "fused", exact=self.space.is_small)

    def _meshes(self, state: State) -> Iterator[DeviceMesh]:
        """The smallest mesh that contains both calls, all devices, and the mesh of each call."""
        a, b = (state[place].assignment.mesh for place in self.places)
        hull = DeviceMesh(min(a.first, b.first), max(a.last, b.last) + 1 - min(a.first, b.first))
        for mesh in dict.fromkeys((hull, DeviceMesh(0, self.space.cluster.size), a, b)):
            with contextlib.suppress(PlanError):
                check_mesh(mesh, self.space.cluster)
                yield mesh

    def _pairs_on(self, mesh: DeviceMesh) -> list[Pair]:
        if mesh.size not in self._pairs:
            self._pairs[mesh.size] = self._pairs_of(mesh.size)
        return [
            (Candidate(replace(a.assignment, mesh=mesh), a.cost), Candidate(replace(b.assignment, mesh=mesh), b.cost))
            for a, b in self._pairs[mesh.size]
        ]

    def _pairs_of(self, size: int) -> list[Pair]:
        """The fastest pairs on `size` devices that fit in memory alone, and the pair with the least memory."""
        calls = [self.space.graph.call(name) for name in self.fused]
        first, second = (_best_of_split(self.space.pipelines(call, size)) for call in calls)
        priced = []
        for number, pair in enumerate(itertools.product(first, second)):
            a, b = (candidate.assignment.strategy for candidate in pair)
            if a.tp != b.tp or max(a.pp, b.pp) % min(a.pp, b.pp):
                continue
            self.has_pairs = True
            cost = self.prices.price(pair).cost
            held = sum(candidate.cost.static for candidate in pair) + cost.transient
            if self.space.pricing.fits(held):
                priced.append((cost.seconds, held, number, pair))
        priced.sort()
        best = priced[:PAIRS]
        smallest = min(priced[PAIRS:], key=lambda item: item[1], default=None)
        if smallest is not None and smallest[1] < min(held for _, held, *_ in best):
            best.append(smallest)
        return [pair for *_, pair in best]

    def _improved(self, state: State) -> tuple[float, State]:
        """The weight of the state after the other calls have been placed one by one, and the state."""
        weight = self.problem.weight(state)
        for _ in range(PLACING_ROUNDS):
            before = weight
            for call in self.others:
                for candidate in self._options(state, call):
                    changed = (*state[:call], candidate, *state[call + 1 :])
                    if (other := self.problem.weight(changed)) < weight * (1 - 1e-9):
                        weight, state = other, changed
            if weight == before:
                break
        return weight, state

    def _options(self, state: State, index: int) -> list[Candidate]:
        """Candidates of a call that are tried: in place, the fastest, the smallest, and those on the state's meshes."""
        fast, small, others = self._sorted_candidates(index)
        meshes = {candidate.assignment.mesh for candidate in state}
        on_meshes = (candidate for candidate in others if candidate.assignment.mesh in meshes)
        return [*self._in_place(state, index), *fast, *small, *on_meshes]

    def _sorted_candidates(self, index: int) -> tuple[list[Candidate], list[Candidate], list[Candidate]]:
        """The fastest candidates of a call, those with the least memory of the others, and the rest."""
        if index not in self._lists:
            able = list(self.candidates[self.problem.names[index]])
            rest = sorted(able[FASTEST:], key=lambda c: c.cost.static + c.cost.transient)
            self._lists[index] = able[:FASTEST], rest[:SMALL], rest[SMALL:]
        return self._lists[index]

    def _in_place(self, state: State, index: int) -> Iterator[Candidate]:
        """Scoring in the layout of the fused training, which needs no reallocation."""
        call = self.space.graph.call(self.problem.names[index])
        trained = self.space.graph.train_call(call.role)
        if call.kind is not CallKind.FORWARD or trained not in self.fused:
            return
        home = state[self.problem.names.index(trained)].assignment
        strategy = replace(home.strategy, zero_stage=0, micro_batch_tokens=None)
        assignment = Assignment(home.mesh, strategy, home.engine)
        if in_place(home, assignment):
            yield self._scored(call.name, assignment)

    def _scored(self, name: str, assignment: Assignment) -> Candidate:
        key = name, assignment
        if key not in self._scoring:
            self._scoring[key] = self.problem.priced(name, assignment)
        return self._scoring[key]


def _best_of_split(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The `SPLIT` fastest candidates of each split, the last one replaced by the one with the least memory if that is
    not among them."""
    by_split: dict[tuple[int, ...], list[Candidate]] = defaultdict(list)
    for candidate in sorted(candidates, key=lambda candidate: candidate.seconds):
        by_split[candidate.assignment.strategy.layout].append(candidate)
    best: list[Candidate] = []
    for alike in by_split.values():
        smallest = min(alike, key=lambda c: c.cost.static + c.cost.transient)
        best += alike[:SPLIT] if smallest in alike[:SPLIT] else [*alike[: SPLIT - 1], smallest]
    return best
