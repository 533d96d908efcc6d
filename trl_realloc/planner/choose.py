"""Which plan to run, of all there are, and what is to be said about it: the alternatives, and why each lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..common.errors import PlanError
from ..plan.cluster import Cluster
from ..plan.dataflow import DataflowGraph, ppo_graph
from ..plan.model_spec import ModelSpec
from ..plan.presets import PRESETS
from .cost import PARTS, CallCost, Pricing
from .problem import Found, Problem
from .search import Outcome, search
from .space import Space


MOST_DEVICES = 1024  # that a remedy names
MANY = 256  # devices; beyond, a schedule takes seconds, and the chosen plan's alone are made


@dataclass(frozen=True)
class Beaten:
    """A plan that was not chosen, and why. `found` is `None` where it cannot be at all."""

    name: str
    found: Found | None
    reason: str


@dataclass(frozen=True)
class Chosen:
    """The plan to run, and what it was chosen over."""

    best: Found
    beaten: tuple[Beaten, ...]
    outcome: Outcome

    @property
    def said(self) -> str:
        """In a sentence."""
        how = "all of them" if self.outcome.exhaustive else "a search"
        return (
            f"{self.best.name}: an estimated {self.best.seconds:.3g} s per iteration, the best of "
            f"{self.outcome.evaluations} plans ({how}, {self.outcome.seconds:.1f} s)"
        )


def choose(
    specs: Mapping[str, Sequence[ModelSpec]],
    pricing: Pricing,
    *,
    graph: DataflowGraph | None = None,
    generation_engine: str = "vllm",
    zero_stages: Sequence[int] | None = None,
    barrier: bool = True,
    seed: int = 0,
    time_limit_s: float = 5.0,
) -> Chosen:
    """The fastest plan by estimate that fits.

    Args:
        specs: by call, the models that it runs.
        zero_stages: of the engine zero to choose from; by default all where memory is known, else 0 alone, for the
            others give memory for time.
        barrier: iterations do not overlap.

    Raises:
        PlanError: the models fit on no plan; with the smallest cluster on which they would.
    """
    options: dict[str, Any] = {
        "graph": graph or ppo_graph(),
        "generation_engine": generation_engine,
        "zero_stages": zero_stages,
        "barrier": barrier,
        "seed": seed,
        "time_limit_s": time_limit_s,
    }
    try:
        return _choose(specs, pricing, **options)
    except PlanError as error:
        size = smallest_cluster(specs, pricing, options)
        would = (
            f"{size} of these devices would do." if size else f"{MOST_DEVICES} of these devices would not do either."
        )
        raise PlanError(*error.problems, would) from None


def _choose(
    specs: Mapping[str, Sequence[ModelSpec]],
    pricing: Pricing,
    *,
    graph: DataflowGraph,
    generation_engine: str,
    zero_stages: Sequence[int] | None,
    barrier: bool,
    seed: int,
    time_limit_s: float,
) -> Chosen:
    stages = tuple(zero_stages) if zero_stages is not None else ((0, 1, 2, 3) if pricing.memory is not None else (0,))
    engines = (generation_engine, "zero", "megatron")
    space = Space(
        pricing.cluster, graph, specs, pricing, engines, offload=pricing.memory is not None, zero_stages=stages
    )
    problem = Problem(space, space.choices(), barrier=barrier)
    presets: dict[str, Found] = {}
    beaten: list[Beaten] = []
    is_ppo, few = graph == ppo_graph(), pricing.cluster.size <= MANY
    for name, preset in PRESETS.items() if is_ppo else ():
        every = []
        for stage in stages:
            label = name if stage == 0 else f"{name}, ZeRO-{stage}"
            plan = preset(pricing.cluster, generation_engine=generation_engine, zero_stage=stage)
            every.append(problem.found(problem.state_of(plan.assignments), label, exact=few))
        fitting = [found for found in every if found.fits]
        if fitting:  # of a preset the ZeRO stage that suits it
            found = min(fitting, key=lambda each: each.seconds)
            presets[found.name] = found
        else:
            smallest = min(every, key=lambda each: each.estimate.memory)
            beaten.append(Beaten(smallest.name, None, _too_large(smallest)))
    starts = [tuple(found.choices.values()) for found in presets.values()]
    outcome = search(problem, seed=seed, time_limit_s=time_limit_s, starts=starts)
    every = [problem.found(state, "searched", exact=few) for state in outcome.states]
    ranked = sorted(every, key=lambda each: each.seconds)
    best = ranked[0] if few else problem.found(tuple(ranked[0].choices.values()), "searched")
    simple = min(presets.values(), key=lambda each: each.seconds, default=best)
    if simple.seconds <= best.seconds * (1 + pricing.rates.error):
        best = simple  # estimates are no better than that
    for label, found in sorted(presets.items(), key=lambda item: item[1].seconds):
        if found is not best:
            beaten.append(Beaten(label, found, why_slower(found, best)))
    if best.name != ranked[0].name:
        gain = 1 - ranked[0].seconds / best.seconds
        reason = f"{gain:.1%} faster by estimate, which is no more than estimates are good for"
        beaten.append(Beaten("searched", ranked[0], reason))
    elif (other := _different(ranked, best)) is not None:
        beaten.append(Beaten("next best", other, why_slower(other, best)))
    return Chosen(best, tuple(beaten), outcome)


def why_slower(found: Found, best: Found) -> str:
    """The call that costs a plan most against the best one, in a sentence."""
    more = found.seconds - best.seconds
    if more < 0.01 * best.seconds:
        return f"{more / best.seconds:.1%} slower by estimate"
    slower = {name: found.costs[name].seconds - best.costs[name].seconds for name in found.costs}
    name = max(slower, key=lambda each: slower[each])
    if slower[name] > 0.25 * more:
        here, there = (each.choices[name].assignment for each in (found, best))
        return (
            f"{name} takes {found.costs[name].seconds:.3g} s on {here.mesh} ({here.strategy}), not "
            f"{best.costs[name].seconds:.3g} s on {there.mesh} ({there.strategy})"
        )
    moved = sum(found.estimate.moves.values()) - sum(best.estimate.moves.values())
    if moved > 0.25 * more:
        return f"its reallocations take {moved:.3g} s more"
    work, least = found.device_seconds, best.device_seconds
    spent, enough = sum(work.values()), sum(least.values())
    if spent / enough > (found.seconds / best.seconds) ** 0.5:  # more than idle devices, which make the rest
        part = max(work, key=lambda each: work[each] - least.get(each, 0.0))
        return f"its calls take {spent:.3g} s of devices, those of the best {enough:.3g} s: more of {PARTS[part]}"
    size = found.space.cluster.size
    busy, better = spent / (size * found.seconds), enough / (size * best.seconds)
    return f"its calls wait for each other: its devices work {busy:.0%} of the time, those of the best {better:.0%}"


def explain(cost: CallCost) -> str:
    """What bounds a call, in numbers."""
    parts = sorted(cost.parts.items(), key=lambda item: -item[1])
    whole = cost.seconds
    return "; ".join(
        f"{seconds / whole:.0%} {PARTS[name]} ({seconds:.3g} s)" for name, seconds in parts if seconds > 0.005 * whole
    )


def _different(ranked: Sequence[Found], best: Found) -> Found | None:
    def layouts(found: Found) -> tuple[object, ...]:
        each = [choice.assignment for choice in found.choices.values()]
        return tuple((a.mesh, a.engine, a.strategy.layout) for a in each)

    return next((found for found in ranked if layouts(found) != layouts(best)), None)


def _too_large(found: Found) -> str:
    memory = found.space.pricing.memory or 0.0
    wanted = found.estimate.memory / 1e9
    return f"device {found.estimate.fullest} would hold {wanted:.1f} GB, and has {memory / 1e9:.0f} GB"


def smallest_cluster(
    specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing, options: Mapping[str, Any]
) -> int | None:
    """The fewest devices, doubling from those there are, on which the models fit; `None` beyond `MOST_DEVICES`."""
    per_node, size = pricing.cluster.devices_per_node, 2 * pricing.cluster.size
    while size <= MOST_DEVICES:
        cluster = Cluster(max(1, size // per_node), min(size, per_node), pricing.cluster.memory_gb)
        try:
            _choose(specs, replace(pricing, cluster=cluster), **{**options, "time_limit_s": 1.0})
            return cluster.size
        except PlanError:
            size *= 2
    return None
