"""Choice of a staleness, up to a bound. Calls that run ahead are placed on devices on which nothing trains.

Divisions of the devices are searched by a lower bound in closed form (`ahead_problem`), and the best plans are
simulated (`ahead_simulation`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...common.errors import PlanError
from ...plan.presets import separate
from ...plan.staleness import Staleness, calls_ahead
from .ahead_problem import AheadProblem, splits
from .fastest import search
from .ladder import STALENESS, Option
from .priced_plan import PricedPlan
from .problem import Problem
from .space import Candidate, Space, State


SPLITS = 3  # number of divisions of the devices that are searched: those with the lowest bounds
FOUND = 4  # number of states that a search returns
SIMULATED = 4  # number of states that are simulated: those with the lowest bounds
EVERY = 8  # every staleness up to this is simulated, above only powers of two and the bound

Found = tuple[AheadProblem, State]


def why_none(space: Space, *, deterministic: bool = False, barrier: bool = False) -> str:
    """The reason why no plan of a space can have a staleness, as text; empty if one can."""
    graph = space.graph
    if space.cluster.size == 1:
        return "the only device cannot generate while it trains"
    if not calls_ahead(graph):
        return "no call generates from the data set alone"
    if "vllm" not in space.engines:
        return "only a vLLM engine generates while others train"
    if space.pricing.vllm_sleeps:
        return "an engine that generates all the time cannot sleep (vllm_enable_sleep_mode)"
    if deterministic:
        return "full_determinism requires identical runs, but timing decides which policy samples a token"
    if barrier:
        return "barrier requires that an iteration begins after the one before has ended"
    return ""


def choose_staleness(
    space: Space,
    baseline: PricedPlan,
    most: int,
    *,
    deterministic: bool = False,
    time_limit_s: float = 5.0,
) -> Option:
    """The best plan with each staleness up to a bound, in ascending order. A smaller staleness is preferred.

    Args:
        space: space in which engines do not sleep.
        whole: best plan without a staleness.
        most: bound of the staleness, 1 or more.
        deterministic: whether two runs of the plan must give the same bits.
        time_limit_s: time of all searches together. The simulations take about a second more.
    """
    if reason := why_none(space, deterministic=deterministic, barrier=baseline.barrier):
        return Option(STALENESS, baseline, reason=reason)
    problem = Problem(space, {})
    states = _searched(space, most, time_limit_s)
    presets = [plan for plan in _separate_presets(problem) if plan.fits]
    preset = min(presets, key=lambda plan: plan.seconds, default=None)
    priced: dict[tuple[int, ...], PricedPlan] = {}
    stale: dict[str, PricedPlan] = {}
    plans = [preset] if preset is not None else []
    for versions in _versions(most):
        for key in _most_promising(states, versions):
            if key not in priced:
                problem_of, state = states[key]
                priced[key] = problem_of.priced_plan(state, "searched", exact=space.is_small)
        also = [plan for key in _most_promising(states, versions) if (plan := priced[key]).fits and plan not in plans]
        if plans or also:
            stale[f"{STALENESS} {versions}"], best = _best([*plans, *also], versions)
            plans = list({id(plan): plan for plan in (preset, best) if plan is not None}.values())  # for the next one
    return Option(STALENESS, baseline, stale, "no division of the devices into two parts has memory for the models")


def _most_promising(states: Mapping[tuple[int, ...], Found], versions: int) -> list[tuple[int, ...]]:
    """The states with the lowest bounds."""

    def bound(key: tuple[int, ...]) -> float:
        problem, state = states[key]
        return replace(problem, versions=versions).estimate(state).seconds

    return sorted(states, key=bound)[:SIMULATED]


def _best(plans: Sequence[PricedPlan], versions: int) -> tuple[PricedPlan, PricedPlan]:
    """The fastest plan with a staleness, and the same plan without it. A preset is preferred if the difference is
    within the error of the estimates."""
    stale = [
        replace(plan, name=f"{plan.name}, staleness {versions}").with_staleness(Staleness(versions)) for plan in plans
    ]
    limit = min(plan.seconds for plan in stale) * (1 + stale[0].space.pricing.rates.error)
    pairs = list(zip(stale, plans, strict=True))
    presets = [pair for pair in pairs if pair[1].name.startswith("separate") and pair[0].seconds <= limit]
    return min(presets or pairs, key=lambda pair: pair[0].seconds)


def _versions(most: int) -> list[int]:
    return sorted({*range(1, min(most, EVERY) + 1), *(2**n for n in range(4, 7) if 2**n <= most), most})


def _separate_presets(problem: Problem) -> Iterator[PricedPlan]:
    space = problem.space
    for stage in space.training_stages if space.graph.trained_roles else ():
        plan = separate(space.cluster, zero_stage=stage, graph=space.graph)
        name = "separate" if stage == 0 else f"separate, ZeRO-{stage}"
        yield problem.priced_plan(problem.state_of(plan.assignments), name, exact=space.is_small)


def _searched(space: Space, most: int, time_limit_s: float) -> dict[tuple[int, ...], Found]:
    """The best states of the best divisions with their problems, for the smallest and the largest staleness."""
    try:
        candidates = space.candidates()
    except PlanError:  # a call fits on no mesh
        return {}
    states: dict[tuple[int, ...], Found] = {}
    begun = time.perf_counter()
    bounds = sorted({1, most})
    for number, versions in enumerate(bounds):
        problems = sorted(_problems(space, candidates, versions), key=lambda row: row[0])[:SPLITS]
        for done, (_, problem, start) in enumerate(problems):
            searches = len(bounds) * len(problems) - number * len(problems) - done
            limit = (time_limit_s - (time.perf_counter() - begun)) / searches
            try:
                result = search(problem, time_limit_s=max(0.05, limit), starts=[start], keep=FOUND)
            except PlanError:  # nothing fits
                continue
            states |= {tuple(map(id, state)): (problem, state) for state in result.states if problem.allows(state)}
    return states


def _problems(
    space: Space, candidates: Mapping[str, Sequence[Candidate]], versions: int
) -> Iterator[tuple[float, AheadProblem, State]]:
    """The problem of each division, with the state of `_fitting` and its weight."""
    for split in splits(space.cluster):
        allowed = split.candidates(space, candidates)
        if allowed is None:
            continue
        problem = AheadProblem(space, allowed, split=split, versions=versions)
        state = _fitting(problem)
        yield problem.weight(state), problem, state


def _fitting(problem: AheadProblem) -> State:
    """The smallest candidates, replaced one by one, slowest call first, by the fastest candidates that fit."""
    lists = [problem.candidates[name] for name in problem.names]
    state = tuple(min(candidates, key=lambda c: c.cost.static + c.cost.transient) for candidates in lists)
    order = sorted(range(len(lists)), key=lambda call: -lists[call][0].seconds)
    for call in order:
        for candidate in lists[call]:
            changed = (*state[:call], candidate, *state[call + 1 :])
            if problem.space.pricing.fits(problem.memory(changed, set())[0]):
                state = changed
                break
    return state
