"""Chooses the plan to run. The result is a `decision.Decision`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...common.errors import PlanError
from ...plan.assignment import MEMORY_SHARE, Assignment, ParallelStrategy
from ...plan.cluster import Cluster
from ...plan.presets import flatten, presets_of, with_sleeping_engines
from ..cost.engine_refusal import SmallShareError
from ..iteration.simulate import Overlap
from .ahead_choice import choose_staleness
from .decision import Alternative, Decision, too_large, why_not
from .fastest import SearchResult, search
from .fused_choice import choose_fused, pair_of
from .ladder import STALENESS, AllowedOptions, Option
from .priced_plan import PricedPlan
from .problem import Problem
from .space import Space, State, TrainingSplits
from .stream_choice import choose_streams


MAX_SUGGESTED_DEVICES = 1024  # largest cluster that an error message suggests
WAY_SHARE = 0.25  # time of the search for fused training, and of the one for streams, as a share of the time limit
PRICED_SHARE = 0.5  # time in which plans are priced by transfer schedules, as a share of the time limit
# On one device the estimates of all plans have the same error: the same calls run one after the other. So a preset is
# preferred there only if it takes no more than this share longer.
AS_FAST = 0.02


@dataclass(frozen=True)
class _Found:
    """The best plans without fused training, streams and staleness.

    Args:
        best: the fastest plan, or a preset that is as fast as estimates can tell.
        presets: presets that fit in memory.
        unfit: the other presets.
        ranked: plans of the search, the fastest first.
    """

    problem: Problem
    result: SearchResult
    best: PricedPlan
    presets: Sequence[PricedPlan]
    unfit: Sequence[Alternative]
    ranked: Sequence[PricedPlan]


def choose(space: Space, allowed: AllowedOptions | None = None, *, time_limit_s: float = 5.0) -> Decision:
    """The plan with the shortest estimated iteration that fits in memory: the best plan without options, with each
    option (fused training, streams, staleness) that makes its iteration shorter.

    Args:
        space: space of a run (`Space.of_run`).
        allowed: options that the plan may use; *optional*, defaults to `AllowedOptions()`.
        time_limit_s: time of the search, and of a second search if a staleness is allowed. Pricing the plans, fused
            training and streams then take up to 1.25 times as long, and at least one step each. The time to price the
            candidates before the search is not limited.

    Raises:
        PlanError: the models fit on no plan. The message names the smallest cluster on which they fit, or how much a
            vLLM engine needs.
    """
    allowed = allowed or AllowedOptions()
    base = _fitting(space, allowed, time_limit_s)
    best, ladder = base.best, list[Option]()
    for way in (_fused, _streaming, _ahead):
        ladder += way(space, base, best, allowed, time_limit_s)
        best = ladder[-1].fastest if ladder else best
    return Decision(best, _alternatives(best, ladder, base), base.result, tuple(ladder))


# --- the options, in the order in which they are tried ----------------------------------------------------------------


def _fused(
    space: Space, base: _Found, best: PricedPlan, allowed: AllowedOptions, time_limit_s: float
) -> Iterator[Option]:
    if allowed.fused_training and pair_of(space.graph):
        deadline = time.perf_counter() + WAY_SHARE * time_limit_s
        latest = deadline + WAY_SHARE * time_limit_s
        yield choose_fused(best.space, base.problem.candidates, best, deadline, latest)


def _streaming(
    space: Space, base: _Found, best: PricedPlan, allowed: AllowedOptions, time_limit_s: float
) -> Iterator[Option]:
    if allowed.streams and space.cluster.size > 1:  # a single device cannot score while it generates
        deadline = time.perf_counter() + WAY_SHARE * time_limit_s
        plans = [best, *base.presets, *base.ranked[:2]]
        yield choose_streams(plans, deadline, deterministic=allowed.deterministic)


def _ahead(
    space: Space, base: _Found, best: PricedPlan, allowed: AllowedOptions, time_limit_s: float
) -> Iterator[Option]:
    """Each staleness. `space` is the original one, in which engines sleep only if the user has set it."""
    if allowed.max_staleness:
        most, deterministic = allowed.max_staleness, allowed.deterministic
        yield choose_staleness(space, best, most, deterministic=deterministic, time_limit_s=time_limit_s)


def _alternatives(best: PricedPlan, ladder: Sequence[Option], base: _Found) -> tuple[Alternative, ...]:
    """Plans that are not chosen: without a chosen option, with another staleness, and with other layouts."""
    alternatives: list[Alternative] = []
    below = best  # the best plan without the options passed so far
    for option in reversed(ladder):
        if option.is_chosen and option.fastest is below:
            below = option.baseline
            alternatives.append(Alternative(below.name, below, f"without {option.name}, which {option.worth}"))
    plans = [plan for option in ladder if option.way == STALENESS for plan in option.plans.values()]
    plans += sorted(base.presets, key=lambda plan: plan.seconds)
    fastest = base.ranked[0]
    other = fastest if below.name != fastest.name else _next_layouts(base.ranked, best)
    for plan in (*plans, *([other] if other is not None else ())):
        if plan is not best and not any(plan is alternative.plan for alternative in alternatives):
            name = "next best" if plan is other and other is not fastest else plan.name
            alternatives.append(Alternative(name, plan, why_not(plan, best)))
    return (*alternatives, *base.unfit)


# --- the plans without options ----------------------------------------------------------------------------------------


def _fitting(space: Space, allowed: AllowedOptions, time_limit_s: float) -> _Found:
    """The best plans; with sleeping engines if nothing fits otherwise. Raises `PlanError` like `choose`."""
    pricing = space.pricing
    generates_by_vllm = space.generation_engine == "vllm"
    if generates_by_vllm and pricing.memory is not None and pricing.vllm_share is not None:
        pricing.memory.check_engine(pricing.vllm_share)  # no cluster is large enough for such an engine
    try:
        return _found(space, allowed, time_limit_s)
    except PlanError as error:
        if pricing.vllm_sleeps is None and pricing.memory is not None and generates_by_vllm:
            with contextlib.suppress(PlanError):
                return _found(_sleeping(space), allowed, time_limit_s)
        if isinstance(error, SmallShareError):
            raise
        size = smallest_cluster(space)
        would = (
            f"{size} of these devices would be enough."
            if size
            else f"{MAX_SUGGESTED_DEVICES} of these devices would not be enough either."
        )
        raise PlanError(*error.problems, *_unsplit(space.splits), would) from None


def _sleeping(space: Space) -> Space:
    """The space with sleeping engines, unless the user has set whether they sleep."""
    if space.pricing.vllm_sleeps is not None:
        return space
    return replace(space, pricing=replace(space.pricing, vllm_sleeps=True))


def _unsplit(splits: TrainingSplits) -> tuple[str, ...]:
    """Sentences about the splits of a training call that are not allowed. Empty if all are."""
    unsplit = {"An adapter that is not plain LoRA is not split by tp.": splits.tensor}
    unsplit["An adapter whose parameters several layers share is not split by pp."] = splits.stages
    adapter = tuple(sentence for sentence, allowed in unsplit.items() if not allowed)
    if splits.elements:
        return adapter
    further = "" if splits.parameters else ", nor distributed over pipeline stages"
    why = "needs whole parameters" if splits.parameters else "may not support training in parts"
    return (
        *adapter,
        f"The optimizer {why}, so its state and gradients are not sharded by ZeRO or tp{further}; "
        f"with an optimizer such as adamw_torch it can be.",
    )


def _found(space: Space, allowed: AllowedOptions, time_limit_s: float) -> _Found:
    """The best plans without options. Raises `PlanError` if none fits in memory."""
    overlap = Overlap.of_runs(space.graph, barrier=allowed.barrier)
    problem = Problem(space, space.candidates(), overlap)
    presets, unfit = _price_presets(problem)
    starts = [tuple(preset.calls.values()) for preset in presets]
    result = search(problem, time_limit_s=time_limit_s, starts=starts)
    deadline = time.perf_counter() + PRICED_SHARE * time_limit_s
    searched = [problem.priced_plan(result.states[0], "searched", exact=space.is_small)]
    for state in result.states[1:]:
        if time.perf_counter() < deadline:
            searched.append(problem.priced_plan(state, "searched", exact=space.is_small))
    if space.cluster.size == 1:
        searched.insert(0, problem.priced_plan(_roomier(problem, result.states[0]), "searched"))
    ranked = sorted(searched, key=lambda plan: plan.seconds)
    fastest = ranked[0] if space.is_small else problem.priced_plan(tuple(ranked[0].calls.values()), "searched")
    error = space.pricing.rates.error if space.cluster.size > 1 else AS_FAST
    best = _preferred([*sorted(presets, key=lambda plan: plan.seconds), fastest], error)
    return _Found(problem, result, best, presets, unfit, ranked)


def _preferred(plans: Sequence[PricedPlan], error: float) -> PricedPlan:
    """The fastest plan, but an earlier one if the difference is within the error of the estimates."""
    fastest = min(plan.seconds for plan in plans)
    return next(plan for plan in plans if plan.seconds <= fastest * (1 + error))


def _roomier(problem: Problem, state: State) -> State:
    """The state with larger forwards and the usual memory share of the engine, if these fit in memory and no call takes
    longer by more than `AS_FAST`. They are faster than the formulas say, for which small matrix products are as fast as
    large ones, and a cache that is just large enough is as good as a larger one."""
    for call in reversed(range(len(state))):  # generation last
        candidate = state[call]
        for assignment in _roomier_ways(problem, problem.names[call], candidate.assignment):
            larger = problem.priced(problem.names[call], assignment)
            changed = (*state[:call], larger, *state[call + 1 :])
            if larger.seconds <= (1 + AS_FAST) * candidate.seconds and problem.fits(changed):
                state = changed
                break
    return state


def _roomier_ways(problem: Problem, name: str, assignment: Assignment) -> Iterator[Assignment]:
    """The assignment with larger memory shares up to `MEMORY_SHARE`, or with larger forwards; the largest first."""
    strategy, pricing = assignment.strategy, problem.space.pricing
    if assignment.memory_share is not None:
        shares = (share for share in pricing.shares if assignment.memory_share < share <= MEMORY_SHARE)
        yield from (replace(assignment, memory_share=share) for share in sorted(shares, reverse=True))
    if strategy.micro_batch_tokens is not None:
        tokens: int | None = None
        while tokens is None or tokens > strategy.micro_batch_tokens:
            yield replace(assignment, strategy=replace(strategy, micro_batch_tokens=tokens))
            tokens = (tokens or pricing.budget(problem.space.graph.call(name).kind, ParallelStrategy())) // 2


def _price_presets(problem: Problem) -> tuple[list[PricedPlan], list[Alternative]]:
    """The presets that fit in memory, each under its fastest ZeRO stage, and the presets that do not fit."""
    fitting: list[PricedPlan] = []
    unfit: list[Alternative] = []
    space, cluster, graph = problem.space, problem.space.cluster, problem.space.graph
    for name, preset in (presets_of(graph) if cluster.size > 1 else {"flatten": flatten}).items():
        by_stage = []
        for stage in space.training_stages:
            label = name if stage == 0 else f"{name}, ZeRO-{stage}"
            plan = preset(cluster, generation_engine=space.generation_engine, zero_stage=stage, graph=graph)
            if space.pricing.vllm_sleeps:
                plan = with_sleeping_engines(plan)
            by_stage.append(problem.priced_plan(problem.state_of(plan.assignments), label, exact=space.is_small))
        if any(plan.fits for plan in by_stage):
            fitting.append(min((plan for plan in by_stage if plan.fits), key=lambda plan: plan.seconds))
        else:
            smallest = min(by_stage, key=lambda plan: plan.estimate.memory)
            unfit.append(Alternative(smallest.name, None, too_large(smallest)))
    return fitting, unfit


def _next_layouts(ranked: Sequence[PricedPlan], best: PricedPlan) -> PricedPlan | None:
    """The fastest plan whose meshes, engines or layouts differ from those of `best`."""

    def layouts(plan: PricedPlan) -> tuple[object, ...]:
        assignments = [candidate.assignment for candidate in plan.calls.values()]
        return tuple((a.mesh, a.engine, a.strategy.layout) for a in assignments)

    return next((plan for plan in ranked if layouts(plan) != layouts(best)), None)


def smallest_cluster(space: Space) -> int | None:
    """Number of devices of the smallest cluster on which the models fit: the given cluster doubled until they fit.
    `None` above `MAX_SUGGESTED_DEVICES`."""
    per_node, size = space.cluster.devices_per_node, 2 * space.cluster.size
    while size <= MAX_SUGGESTED_DEVICES:
        cluster = Cluster(max(1, size // per_node), min(size, per_node), space.cluster.memory_gb)
        try:
            pricing = replace(_sleeping(space).pricing, cluster=cluster)
            _found(replace(space, cluster=cluster, pricing=pricing), AllowedOptions(), time_limit_s=1.0)
            return cluster.size
        except PlanError:
            size *= 2
    return None
