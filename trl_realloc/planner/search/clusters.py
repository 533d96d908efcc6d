"""Compares clusters: the best plan on each, the colocated plan, and the knee of their costs."""

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
COLOCATED_S = 1.0  # longest time limit of its search: some hundred layouts of each call on one mesh
UPDATES = 1000  # number of iterations to which device-hours and costs refer


def colocated(space: Space, time_limit_s: float) -> PricedPlan | None:
    """The fastest plan in which every call runs on all devices, one call after the other, like TRL with colocated
    engines: training and scoring by ZeRO under any stage, generation under any tensor-parallel degree, memory share and
    sleep mode. `None` if none fits in memory."""
    engines = tuple(engine for engine in space.engines if engine in (space.generation_engine, "zero"))
    whole = replace(space, engines=engines, smallest_mesh=space.cluster.size)
    plans = []
    for sleeps in {space.pricing.vllm_sleeps, space.pricing.vllm_sleeps is not False}:
        of_kind = replace(whole, pricing=replace(space.pricing, vllm_sleeps=sleeps))
        with contextlib.suppress(PlanError):
            problem = Problem(of_kind, of_kind.candidates(), Overlap.of_runs(space.graph, barrier=False))
            state = search(problem, time_limit_s=min(COLOCATED_S, time_limit_s), keep=1).states[0]
            plans.append(problem.priced_plan(state, COLOCATED, exact=space.is_small))
    return min(plans, key=lambda plan: plan.seconds, default=None)


def with_colocated(decision: Decision, time_limit_s: float) -> Decision:
    """The decision with `colocated` as its first alternative, unless it is the choice."""
    best = decision.best
    plan = colocated(best.space, time_limit_s)
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
        cluster: the user's text, like `h100:8x8`.
        kind: name of the devices.
        best: best plan; `None` if no plan fits in memory.
        colocated: result of `colocated`.
        own: the user's plan; `None` without one for a cluster of this size.
        refusal: reason why no plan fits; empty if one does.
        price: price of a device-hour in any currency; `None` if unknown.
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
        """The plans that are not `None`, by `best`, `colocated` and `own`."""
        plans = {"best": self.best, COLOCATED: self.colocated, "own": self.own}
        return {name: plan for name, plan in plans.items() if plan is not None}

    def device_hours(self, plan: PricedPlan) -> float:
        """Device-hours of `UPDATES` iterations."""
        return UPDATES * plan.seconds * plan.space.cluster.size / 3600

    def cost(self, plan: PricedPlan) -> float | None:
        """Price of `UPDATES` iterations; `None` without `price`."""
        return None if self.price is None else self.price * self.device_hours(plan)

    @property
    def worth(self) -> float | None:
        """Seconds of an iteration times the price of `UPDATES` iterations, or times their device-hours without `price`;
        `None` without a plan."""
        if self.best is None:
            return None
        cost = self.cost(self.best)
        return self.best.seconds * (self.device_hours(self.best) if cost is None else cost)


def saving(plan: PricedPlan, other: PricedPlan) -> float:
    """Share of the other plan's seconds that a plan saves; below 0 if it takes longer."""
    return 1 - plan.seconds / other.seconds


def tokens_per_second(plan: PricedPlan) -> float:
    """Prompt and response tokens per second on all devices together."""
    return plan.space.pricing.workload.tokens / plan.seconds


def knee(answers: Sequence[ClusterAnswer]) -> ClusterAnswer | None:
    """The cluster with the smallest product of seconds and price. A faster cluster costs more than one percent for each
    percent of time that it saves, and a cheaper one takes more than one percent longer for each percent of price that
    it saves. Prices are used if all clusters with a plan have one, else device-hours, which can only be compared for
    devices of one kind. `None` if no cluster has a plan."""
    planned = [answer for answer in answers if answer.best is not None]
    if any(answer.price is None for answer in planned):
        planned = [replace(answer, price=None) for answer in planned]
    best = min(planned, key=lambda answer: answer.worth or 0.0, default=None)
    return next((answer for answer in answers if best is not None and answer.cluster == best.cluster), None)
