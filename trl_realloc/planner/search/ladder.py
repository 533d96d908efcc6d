"""The ladder of a decision: the seconds that each way of letting calls overlap saves, beside the ways below it.

How the best plan of a way is found is in `fused_choice`, `stream_choice` and `ahead_choice`; in which order they are
tried is in `choose`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...plan.algorithm_graphs import has_host_loop
from .priced_plan import PricedPlan


FUSED, STREAMING, STALENESS = "fused training", "streaming", "staleness"  # the ways, by name
SAME = 0.005  # difference of two plans, as a share of the seconds, below which one is as fast as the other
NO_MORE = "which is within the estimates' error"


@dataclass(frozen=True)
class Ways:
    """The ways of letting calls overlap that a plan may use.

    Args:
        barrier: its iterations do not overlap.
        deterministic: two runs of the plan give the same bits.
        max_staleness: the largest staleness.
        fuses: what it is worth to train two calls in fused pipelines is looked for.
        fused_training: such a plan may be the choice.
        streams: samples may stream.
    """

    barrier: bool = False
    deterministic: bool = False
    max_staleness: int = 0
    fuses: bool = True
    fused_training: bool = True
    streams: bool = True


@dataclass(frozen=True)
class Rung:
    """A way of letting calls overlap, beside those below it.

    Args:
        way: its name.
        whole: the best plan without it.
        plans: the best plans with it by name, those that are preferred first.
        reason: why there is none, in words.
        refusal: why none may be chosen, in words; empty if one may.
    """

    way: str
    whole: PricedPlan
    plans: Mapping[str, PricedPlan] = field(default_factory=dict)
    reason: str = ""
    refusal: str = ""

    @property
    def fastest(self) -> PricedPlan:
        """The plan with the fewest seconds, without what gains no more than the estimates' error."""
        best, error = self.whole, self.whole.space.pricing.rates.error
        for plan in () if self.refusal else self.plans.values():
            if plan.fits and plan.seconds * (1 + error) < best.seconds:
                best = plan
        return best

    @property
    def is_chosen(self) -> bool:
        """True if a plan with the way is the fastest."""
        return self.fastest is not self.whole

    @property
    def best(self) -> PricedPlan:
        """The fastest plan with the way; if none is chosen, that with the fewest seconds. There is one."""
        return self.fastest if self.is_chosen else min(self.plans.values(), key=lambda plan: plan.seconds)

    @property
    def name(self) -> str:
        """The name of `best`."""
        return next(name for name, plan in self.plans.items() if plan is self.best)

    @property
    def worth(self) -> str:
        """The saving of `best`, in words."""
        return saving(self.best, self.whole) + (f" ({ages(self.best)})" if self.best.staleness.versions else "")

    @property
    def sentence(self) -> str:
        """The saving of the way, in words; or the reason why it has no plan. A sentence without its full stop."""
        if not self.plans:
            return f"{self.way}: {self.reason}"
        text = f"{self.name} {self.worth}"
        if self.is_chosen or 1 - self.best.seconds / self.whole.seconds < SAME:
            return text
        return f"{text}; {self.refusal}" if self.refusal else f"{text}, {NO_MORE}"


def saving(plan: PricedPlan, whole: PricedPlan) -> str:
    """The seconds that a plan saves of another's, in words."""
    share = 1 - plan.seconds / whole.seconds
    if abs(share) < SAME:
        return "saves nothing"
    if share > 0:
        return f"saves {'at most ' if plan.is_bound else ''}{share:.0%} of an iteration"
    return f"costs {'at least ' if plan.is_bound else ''}{-share:.0%} of an iteration"


def ages(plan: PricedPlan) -> str:
    """The ages of a plan's tokens, in words."""
    unit = "generations" if has_host_loop(plan.space.graph) else "updates"
    return f"tokens {plan.estimate.mean_age:.1f} {unit} old on average, {plan.estimate.oldest} at most"
