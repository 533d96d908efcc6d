"""Compares clusters: the best plan on each, beside the colocated run, and the knee of their costs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...common.errors import PlanError
from ..iteration.simulate import Overlap
from .decision import Alternative, Decision, why_not
from .fastest import search
from .priced_plan import PricedPlan
from .problem import Problem
from .space import Space


COLOCATED = "colocated"
COLOCATED_S = 1.0  # time limit of the search for it: some hundred layouts of each call on one mesh
UPDATES = 1000  # iterations for which device-hours and costs are given


def colocated(space: Space) -> PricedPlan | None:
    """The fastest plan in which every call runs on all devices, one call after the other, as a run of TRL does whose
    engines share the devices: training and scoring by ZeRO under any stage, generation by engines of any tensor degree,
    share and sleep. `None` where none fits in memory."""
    engines = tuple(engine for engine in space.engines if engine in (space.generation_engine, "zero"))
    whole = replace(space, engines=engines, smallest_mesh=space.cluster.size)
    plans = []
    for sleeps in {space.pricing.vllm_sleeps, space.pricing.vllm_sleeps is not False}:
        of_kind = replace(whole, pricing=replace(space.pricing, vllm_sleeps=sleeps))
        with contextlib.suppress(PlanError):
            problem = Problem(of_kind, of_kind.candidates(), Overlap.of_runs(space.graph, barrier=False))
            state = search(problem, time_limit_s=COLOCATED_S, keep=1).states[0]
            plans.append(problem.priced_plan(state, COLOCATED, exact=space.is_small))
    return min(plans, key=lambda plan: plan.seconds, default=None)


def with_colocated(decision: Decision) -> Decision:
    """The decision with `colocated` as its first alternative, unless it is the choice."""
    best = decision.best
    plan = colocated(best.space)
    if plan is None:
        reason = "it does not fit, whatever the ZeRO stage, and the tp, share and sleep of the engines"
        row = Alternative(COLOCATED, None, reason)
    elif all(plan.calls[name].assignment == best.calls[name].assignment for name in plan.calls):
        return decision
    else:
        row = Alternative(COLOCATED, plan, why_not(plan, best))
    return replace(decision, alternatives=(row, *decision.alternatives))


@dataclass(frozen=True)
class ClusterAnswer:
    """The plans of a recipe on one cluster.

    Args:
        cluster: as the user wrote it, like `h100:8x8`.
        kind: the device's name.
        best: `None` where no plan fits in memory.
        colocated: see `colocated`.
        own: the user's plan; `None` where none is given for a cluster of this size.
        refusal: why no plan fits; empty if one does.
        price: of an hour of a device, in any currency; `None` if it is not given.
    """

    cluster: str
    kind: str
    best: PricedPlan | None = None
    colocated: PricedPlan | None = None
    own: PricedPlan | None = None
    refusal: str = ""
    price: float | None = None

    @property
    def plans(self) -> dict[str, PricedPlan]:
        """The plans that there are, by `best`, `colocated` and `own`."""
        known = {"best": self.best, COLOCATED: self.colocated, "own": self.own}
        return {name: plan for name, plan in known.items() if plan is not None}

    def device_hours(self, plan: PricedPlan) -> float:
        """Hours of devices that `UPDATES` iterations take."""
        return UPDATES * plan.seconds * plan.space.cluster.size / 3600

    def cost(self, plan: PricedPlan) -> float | None:
        """Price of `UPDATES` iterations; `None` if an hour's is not known."""
        return None if self.price is None else self.price * self.device_hours(plan)

    @property
    def worth(self) -> float | None:
        """Seconds of an iteration times its price, or its device-hours where no price is known; `None` without a
        plan."""
        if self.best is None:
            return None
        cost = self.cost(self.best)
        return self.best.seconds * (self.device_hours(self.best) if cost is None else cost)


def saving(plan: PricedPlan, other: PricedPlan) -> float:
    """Share of the other plan's seconds that a plan saves; below 0 if it takes longer."""
    return 1 - plan.seconds / other.seconds


def tokens_per_second(plan: PricedPlan) -> float:
    """Tokens of prompts and responses that are generated and trained on in a second, on all devices together."""
    return plan.space.pricing.workload.tokens / plan.seconds


def knee(answers: Sequence[ClusterAnswer]) -> ClusterAnswer | None:
    """The cluster on which the product of an iteration's seconds and its price is smallest. On a faster one a time that
    is shorter by one percent costs more than one percent, on a cheaper one a price that is lower by one percent takes
    more than one percent longer. Prices are used if all clusters with a plan have one, else device-hours, which compare
    only devices of one kind. `None` where no cluster has a plan."""
    known = [answer for answer in answers if answer.best is not None]
    if any(answer.price is None for answer in known):
        known = [replace(answer, price=None) for answer in known]
    best = min(known, key=lambda answer: answer.worth or 0.0, default=None)
    return next((answer for answer in answers if best is not None and answer.cluster == best.cluster), None)
