"""Chooses the plan to run. The result, with why each alternative was not chosen, is in `decision`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..common.errors import PlanError
from ..plan.algorithm_graphs import ppo_graph
from ..plan.assignment import MEMORY_SHARE, Assignment, ParallelStrategy
from ..plan.cluster import Cluster
from ..plan.dataflow import DataflowGraph, Role
from ..plan.model_spec import ModelSpec
from ..plan.presets import flatten, presets_of, with_sleeping_engines
from .ahead_choice import StalenessChoice, choose_staleness
from .cost import Pricing
from .decision import Alternative, Decision, too_large, why_slower
from .engine_refusal import SmallShareError
from .fused_choice import FusedChoice, choose_fused
from .priced_plan import PricedPlan
from .problem import Problem
from .search import search
from .simulate import Overlap
from .space import Space, State, TrainingSplits
from .stream_choice import StreamChoice, choose_streams


MOST_SUGGESTED_DEVICES = 1024  # of the cluster that a refusal suggests
FUSED_SHARE = 0.25  # of a search's time limit: the time in which fused training is looked for
STREAMS_SHARE = 0.25  # of a search's time limit: the time in which streams are simulated
PRICED_SHARE = 0.5  # of a search's time limit: the time in which what it has found is priced by transfer schedules
WORSE = 0.25  # a plan that takes so much longer than the best without streams is not simulated with them
MOST_STREAMED = 1024  # devices; on more, the simulation of streams takes several seconds
# Estimates of plans of one device err alike: the same calls run on the same device, one after the other. So a preset is
# preferred there only if it takes less than this longer.
AS_FAST = 0.02
ADAPTERS = 0.01  # of a policy's elements: those of large adapters, which a refusal suggests
MANY = 256  # devices; on more, a transfer schedule takes seconds, so only the chosen plan's are made


def choose(
    specs: Mapping[str, Sequence[ModelSpec]],
    pricing: Pricing,
    *,
    graph: DataflowGraph | None = None,
    generation_engine: str = "vllm",
    engines: Sequence[str] = ("zero", "megatron"),
    zero_stages: Sequence[int] | None = None,
    barrier: bool = False,
    deterministic: bool = False,
    max_staleness: int = 0,
    fuses: bool = True,
    fused_training: bool = True,
    streams: bool = True,
    splits: TrainingSplits | None = None,
    seed: int = 0,
    time_limit_s: float = 5.0,
) -> Decision:
    """The plan with the shortest estimated iteration that fits in memory.

    Args:
        specs: the models that each call runs, by the call's name.
        engines: that may score and train.
        zero_stages: stages that the engine zero may use. By default all of them where a device's memory is known, else
            0 alone, because the other stages save memory and cost time.
        barrier: the plan's iterations do not overlap.
        deterministic: two runs of the plan give the same bits.
        max_staleness: the largest staleness of a plan.
        fuses: what it is worth to train two calls in fused pipelines is looked for.
        fused_training: such a plan may be the choice.
        streams: samples may stream.
        splits: how the optimizer and the adapters allow training calls to be split; by default in every way.
        time_limit_s: of the search; where a staleness is allowed, of a second search too. Pricing what it has found,
            and looking for fused training and streams, take up to 1.25 times as long after it, and one step each at
            least; listing and pricing the candidates before it is not limited.

    Raises:
        PlanError: the models fit on no plan; names the smallest cluster on which they fit, or what a vLLM engine's
            share of a device lacks.
    """
    options: dict[str, Any] = {
        "graph": graph or ppo_graph(),
        "generation_engine": generation_engine,
        "engines": engines,
        "zero_stages": zero_stages,
        "barrier": barrier,
        "deterministic": deterministic,
        "fuses": fuses,
        "fused_training": fused_training,
        "may_stream": streams,
        "splits": splits or TrainingSplits(),
        "seed": seed,
        "time_limit_s": time_limit_s,
    }
    decision = _synchronous(specs, pricing, options)
    if max_staleness < 1:
        return decision
    space = replace(decision.best.space, pricing=pricing)  # without engines that sleep because nothing fits otherwise
    choice = choose_staleness(
        space,
        decision.best,
        max_staleness,
        deterministic=deterministic,
        seed=seed,
        time_limit_s=time_limit_s,
        exact=pricing.cluster.size <= MANY,
    )
    fused = _fused_ahead(space, choice, time_limit_s, is_allowed=fused_training) if fuses else None
    if fused is not None and fused.fastest is fused.fused:
        by_versions = {**choice.by_versions, fused.fastest.staleness.versions: fused.fastest}
        choice = replace(choice, by_versions=by_versions)
    return replace(_with_staleness(decision, choice), fused_ahead=fused)


def _fused_ahead(space: Space, choice: StalenessChoice, time_limit_s: float, *, is_allowed: bool) -> FusedChoice | None:
    """What fused training is worth beside the best staleness; `None` where no staleness was found."""
    if not choice.by_versions:
        return None
    best = choice.fastest
    if not best.staleness.versions:
        best = min(choice.by_versions.values(), key=lambda plan: plan.seconds)
    deadline = time.perf_counter() + FUSED_SHARE * time_limit_s
    latest, exact = deadline + FUSED_SHARE * time_limit_s, space.cluster.size <= MANY
    return choose_fused(space, space.candidates(), [best], deadline, latest, exact=exact, is_allowed=is_allowed)


def _with_staleness(decision: Decision, choice: StalenessChoice) -> Decision:
    """The decision where a staleness is allowed."""
    best, whole = choice.fastest, decision.best
    alternatives = list(decision.alternatives)
    if best is not whole:
        alternatives = [
            replace(other, reason=why_slower(other.plan, best)) if other.plan else other for other in alternatives
        ]
        alternatives.insert(0, Alternative(whole.name, whole, f"without a staleness; {choice.sentence}"))
    for plan in choice.by_versions.values():
        if plan is not best:
            alternatives.append(Alternative(plan.name, plan, _why_not(plan, best)))
    return replace(decision, best=best, alternatives=tuple(alternatives), staleness=choice)


def _why_not(plan: PricedPlan, best: PricedPlan) -> str:
    """Why another staleness is not chosen, in words."""
    if plan.seconds >= best.seconds:
        slower, versions = plan.seconds / best.seconds - 1, plan.staleness.versions
        passed = "1 update passes" if versions == 1 else f"{versions} updates pass"
        return f"{slower:.1%} slower by estimate; {passed} at most between a token and its training"
    return f"{1 - plan.seconds / best.seconds:.1%} faster by estimate, which is no more than estimates are good for"


def _synchronous(specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing, options: Mapping[str, Any]) -> Decision:
    """The decision without a staleness. Raises `PlanError` as `choose`."""
    generation_engine = options["generation_engine"]
    if generation_engine == "vllm" and pricing.memory is not None and pricing.vllm_share is not None:
        pricing.memory.check_engine(pricing.vllm_share)  # no cluster is large enough for such an engine
    try:
        return _choose(specs, pricing, **options)
    except PlanError as error:
        if pricing.vllm_sleeps is None and pricing.memory is not None and generation_engine == "vllm":
            with contextlib.suppress(PlanError):
                return _choose(specs, replace(pricing, vllm_sleeps=True), **options)
        if isinstance(error, SmallShareError):
            raise
        size = smallest_cluster(specs, pricing, options)
        would = (
            f"{size} of these devices would do."
            if size
            else f"{MOST_SUGGESTED_DEVICES} of these devices would not do either."
        )
        raise PlanError(
            *error.problems, *_unsplit(options["splits"]), would, *_on_one(specs, pricing, options)
        ) from None


def _on_one(specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing, options: Mapping[str, Any]) -> tuple[str, ...]:
    """What would make the models fit on a cluster of one device, in a sentence; none for a larger cluster."""
    if pricing.cluster.size > 1:
        return ()
    trains = options["graph"].train_call(Role.ACTOR)
    adapted: dict[str, Sequence[ModelSpec]] = dict(specs)
    if trains is not None:
        adapted[trains] = [replace(spec, trained_share=min(spec.trained_share, ADAPTERS)) for spec in specs[trains]]
        frozen = [call.name for call in options["graph"].calls if call.role is Role.REFERENCE]
        adapted |= {name: [replace(spec, is_base=True) for spec in specs[name]] for name in frozen}
    narrow: dict[str, Sequence[ModelSpec]] = {
        name: [_in_16_bits(spec) for spec in of_call] for name, of_call in adapted.items()
    }
    ways = {"adapters for the policy (peft_config; in a recipe use_peft: true)": adapted}
    ways["adapters, and models in bfloat16 (dtype of model_init_kwargs, or of a recipe)"] = narrow
    sleeping = replace(pricing, vllm_sleeps=True if pricing.vllm_sleeps is None else pricing.vllm_sleeps)
    for way, changed in ways.items():
        with contextlib.suppress(PlanError):
            _choose(changed, sleeping, **{**options, "fuses": False, "time_limit_s": 1.0})
            return (f"On this one {way} would do.",)
    return ()


def _in_16_bits(spec: ModelSpec) -> ModelSpec:
    return replace(spec, bytes_per_element=min(spec.bytes_per_element, 2))


def _unsplit(splits: TrainingSplits) -> tuple[str, ...]:
    """What of a training call may not be split, in sentences; none if all of it may."""
    unsplit = {"An adapter that is not plain LoRA is not split by tp.": splits.tensor}
    unsplit["An adapter whose parameters several layers share is not split by pp."] = splits.stages
    adapter = tuple(sentence for sentence, allowed in unsplit.items() if not allowed)
    if splits.elements:
        return adapter
    further = "" if splits.parameters else ", nor distributed over pipeline stages"
    return (
        *adapter,
        f"The optimizer needs whole parameters, so the state of what trains is not sharded by ZeRO or tp{further}; "
        f"with an optimizer such as adamw_torch it can be.",
    )


def _choose(
    specs: Mapping[str, Sequence[ModelSpec]],
    pricing: Pricing,
    *,
    graph: DataflowGraph,
    generation_engine: str,
    engines: Sequence[str],
    zero_stages: Sequence[int] | None,
    barrier: bool,
    deterministic: bool,
    fuses: bool,
    fused_training: bool,
    may_stream: bool,
    splits: TrainingSplits,
    seed: int,
    time_limit_s: float,
) -> Decision:
    stages = tuple(zero_stages) if zero_stages is not None else ((0, 1, 2, 3) if pricing.memory is not None else (0,))
    able = (generation_engine, *engines)
    may_rest = pricing.memory is not None
    space = Space(pricing.cluster, graph, specs, pricing, able, offload=may_rest, zero_stages=stages, splits=splits)
    problem = Problem(space, space.candidates(), Overlap.of_runs(graph, barrier=barrier))
    is_small = pricing.cluster.size <= MANY
    presets, alternatives = _price_presets(problem, generation_engine, is_small=is_small)
    starts = [tuple(preset.calls.values()) for preset in presets]
    result = search(problem, seed=seed, time_limit_s=time_limit_s, starts=starts)
    deadline = time.perf_counter() + PRICED_SHARE * time_limit_s
    searched = [problem.priced_plan(result.states[0], "searched", exact=is_small)]
    for state in result.states[1:]:
        if time.perf_counter() < deadline:
            searched.append(problem.priced_plan(state, "searched", exact=is_small))
    if pricing.cluster.size == 1:
        searched.insert(0, problem.priced_plan(_roomier(problem, result.states[0]), "searched"))
    ranked = sorted(searched, key=lambda plan: plan.seconds)
    best = ranked[0] if is_small else problem.priced_plan(tuple(ranked[0].calls.values()), "searched")
    error = pricing.rates.error if pricing.cluster.size > 1 else AS_FAST
    alone = _preferred([*sorted(presets, key=lambda plan: plan.seconds), best], error)  # each call trains by itself
    fused = None
    if fuses:
        plans = [alone, *(plan for plan in (*ranked[:2], *presets) if plan.calls != alone.calls)]
        deadline = time.perf_counter() + FUSED_SHARE * time_limit_s
        latest = deadline + FUSED_SHARE * time_limit_s
        fused = choose_fused(
            space, problem.candidates, plans, deadline, latest, exact=is_small, is_allowed=fused_training
        )
    best = alone if fused is None else fused.fastest
    streams = None
    if 1 < pricing.cluster.size <= MOST_STREAMED and may_stream:  # one device scores after it has generated
        others = [*presets, *ranked[:2]] if is_small else []  # estimated without a transfer schedule on more devices
        deadline = time.perf_counter() + STREAMS_SHARE * time_limit_s
        streams = _streamed([best, *others], deadline, deterministic)
    whole, best = (best, best) if streams is None else (streams.whole, streams.fastest)
    if best is not whole:
        reason = f"without streams; {streams.sentence if streams is not None else ''}"
        alternatives.append(Alternative(whole.name, whole, reason))
    if best.fused:
        reason = f"without fused training; {fused.sentence if fused is not None else ''}"
        alternatives.append(Alternative(alone.name, alone, reason))
    for preset in sorted(presets, key=lambda plan: plan.seconds):
        if preset is not whole and preset is not alone:
            alternatives.append(Alternative(preset.name, preset, why_slower(preset, best)))
    if not whole.fused and whole.name != ranked[0].name:
        gain = 1 - ranked[0].seconds / whole.seconds
        reason = f"{gain:.1%} faster by estimate, which is no more than estimates are good for"
        alternatives.append(Alternative("searched", ranked[0], reason))
    elif (other := _next_layouts(ranked, best)) is not None:
        alternatives.append(Alternative("next best", other, why_slower(other, best)))
    return Decision(best, tuple(alternatives), result, streams, fused=fused)


def _preferred(plans: Sequence[PricedPlan], error: float) -> PricedPlan:
    """The fastest plan, but an earlier one if the difference is within the error of the estimates."""
    fastest = min(plan.seconds for plan in plans)
    return next(plan for plan in plans if plan.seconds <= fastest * (1 + error))


def _roomier(problem: Problem, state: State) -> State:
    """A state with forwards of as many tokens as the settings allow, and an engine with its usual share, where the
    memory holds that and a call takes no longer for it than by `AS_FAST`. By formula small matrix products are as fast
    as large ones, and a cache that is just large enough is as good as a larger one."""
    for at in reversed(range(len(state))):  # generation last
        candidate = state[at]
        for assignment in _roomier_ways(problem, problem.names[at], candidate.assignment):
            larger = problem.priced(problem.names[at], assignment)
            changed = (*state[:at], larger, *state[at + 1 :])
            if larger.seconds <= (1 + AS_FAST) * candidate.seconds and problem.fits(changed):
                state = changed
                break
    return state


def _roomier_ways(problem: Problem, name: str, assignment: Assignment) -> Iterator[Assignment]:
    """The assignment with a larger share of the memory up to `MEMORY_SHARE`, or with larger forwards; the largest
    first."""
    strategy, pricing = assignment.strategy, problem.space.pricing
    if assignment.memory_share is not None:
        shares = (share for share in pricing.shares if assignment.memory_share < share <= MEMORY_SHARE)
        yield from (replace(assignment, memory_share=share) for share in sorted(shares, reverse=True))
    if strategy.micro_batch_tokens is not None:
        tokens: int | None = None
        while tokens is None or tokens > strategy.micro_batch_tokens:
            yield replace(assignment, strategy=replace(strategy, micro_batch_tokens=tokens))
            tokens = (tokens or pricing.budget(problem.space.graph.call(name).kind, ParallelStrategy())) // 2


def _streamed(plans: Sequence[PricedPlan], deadline: float, deterministic: bool) -> StreamChoice:
    """What streams are worth for the plan that is fastest with its best streams. An earlier plan is preferred if the
    difference is within the error of the estimates."""
    choices = [choose_streams(plans[0], deadline, deterministic=deterministic)]
    error = plans[0].space.pricing.rates.error
    for plan in plans[1:]:
        known = any(plan.calls == other.whole.calls for other in choices)
        if not known and plan.seconds <= plans[0].seconds * (1 + WORSE) and time.perf_counter() < deadline:
            choices.append(choose_streams(plan, deadline, deterministic=deterministic))
    best = choices[0]
    for choice in choices[1:]:
        if choice.fastest is not choice.whole and choice.fastest.seconds * (1 + error) < best.fastest.seconds:
            best = choice
    return best


def _price_presets(
    problem: Problem, generation_engine: str, *, is_small: bool
) -> tuple[list[PricedPlan], list[Alternative]]:
    """The presets that fit in memory, each under its fastest ZeRO stage; and those that do not fit."""
    fitting: list[PricedPlan] = []
    unfit: list[Alternative] = []
    cluster, graph = problem.space.cluster, problem.space.graph
    for name, preset in (presets_of(graph) if cluster.size > 1 else {"flatten": flatten}).items():
        by_stage = []
        for stage in problem.space.training_stages:
            label = name if stage == 0 else f"{name}, ZeRO-{stage}"
            plan = preset(cluster, generation_engine=generation_engine, zero_stage=stage, graph=graph)
            if problem.space.pricing.vllm_sleeps:
                plan = with_sleeping_engines(plan)
            by_stage.append(problem.priced_plan(problem.state_of(plan.assignments), label, exact=is_small))
        if any(plan.fits for plan in by_stage):
            fitting.append(min((plan for plan in by_stage if plan.fits), key=lambda plan: plan.seconds))
        else:
            smallest = min(by_stage, key=lambda plan: plan.estimate.memory)
            unfit.append(Alternative(smallest.name, None, too_large(smallest)))
    return fitting, unfit


def _next_layouts(ranked: Sequence[PricedPlan], best: PricedPlan) -> PricedPlan | None:
    """The fastest plan whose meshes, engines or layouts differ from the best one's."""

    def layouts(plan: PricedPlan) -> tuple[object, ...]:
        assignments = [candidate.assignment for candidate in plan.calls.values()]
        return tuple((a.mesh, a.engine, a.strategy.layout) for a in assignments)

    return next((plan for plan in ranked if layouts(plan) != layouts(best)), None)


def smallest_cluster(
    specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing, options: Mapping[str, Any]
) -> int | None:
    """The smallest cluster, in devices, on which the models fit: the given one doubled until they do; `None` above
    `MOST_SUGGESTED_DEVICES`."""
    per_node, size = pricing.cluster.devices_per_node, 2 * pricing.cluster.size
    while size <= MOST_SUGGESTED_DEVICES:
        cluster = Cluster(max(1, size // per_node), min(size, per_node), pricing.cluster.memory_gb)
        try:
            changed = {**options, "fuses": False, "time_limit_s": 1.0}
            sleeps = True if pricing.vllm_sleeps is None else pricing.vllm_sleeps  # as `_synchronous`, at last
            _choose(specs, replace(pricing, cluster=cluster, vllm_sleeps=sleeps), **changed)
            return cluster.size
        except PlanError:
            size *= 2
    return None
