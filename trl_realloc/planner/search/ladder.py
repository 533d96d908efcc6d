"""The ladder of a decision: the options for overlapping calls (fused training, streaming, staleness), each with the
seconds that it saves in addition to the options before it. `choose` tries them in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...plan.algorithm_graphs import has_host_loop
from .priced_plan import PricedPlan


FUSED, STREAMING, STALENESS = "fused training", "streaming", "staleness"  # names of the options
SAME = 0.005  # relative difference of seconds below which two plans are equally fast
NO_MORE = "which is within the estimates' error"


@dataclass(frozen=True)
class AllowedOptions:
    """The options for overlapping calls that a plan may use.

    Args:
        barrier: whether iterations must not overlap.
        deterministic: whether two runs of the plan must give the same bits.
        max_staleness: largest staleness.
        fused_training: whether two calls may train in fused pipelines.
        streams: whether samples may stream.
    """

    barrier: bool = False
    deterministic: bool = False
    max_staleness: int = 0
    fused_training: bool = True
    streams: bool = True


@dataclass(frozen=True)
class Option:
    """An option for overlapping calls, in addition to the options before it.

    Args:
        way: name of the option.
        whole: best plan without it.
        plans: best plans with it by name, in the order of preference.
        reason: text that says why there is no such plan.
    """

    way: str
    baseline: PricedPlan
    plans: Mapping[str, PricedPlan] = field(default_factory=dict)
    reason: str = ""

    @property
    def fastest(self) -> PricedPlan:
        """The fastest plan with or without the option. A gain within the estimates' error does not count."""
        best, error = self.baseline, self.baseline.space.pricing.rates.error
        for plan in self.plans.values():
            if plan.fits and plan.seconds * (1 + error) < best.seconds:
                best = plan
        return best

    @property
    def is_chosen(self) -> bool:
        """True if a plan with the option is the fastest."""
        return self.fastest is not self.baseline

    @property
    def best(self) -> PricedPlan:
        """The chosen plan with the option, or else the fastest plan with it. `plans` must not be empty."""
        return self.fastest if self.is_chosen else min(self.plans.values(), key=lambda plan: plan.seconds)

    @property
    def name(self) -> str:
        """The name of `best`."""
        return next(name for name, plan in self.plans.items() if plan is self.best)

    @property
    def worth(self) -> str:
        """The saving of `best`, as text."""
        return saving(self.best, self.baseline) + (f" ({ages(self.best)})" if self.best.staleness.versions else "")

    @property
    def sentence(self) -> str:
        """The saving of the option, or the reason why it has no plan. A sentence without a full stop."""
        if not self.plans:
            return f"{self.way}: {self.reason}"
        text = f"{self.name} {self.worth}"
        if self.is_chosen or 1 - self.best.seconds / self.baseline.seconds < SAME:
            return text
        return f"{text}, {NO_MORE}"


def saving(plan: PricedPlan, baseline: PricedPlan) -> str:
    """The share of an iteration that a plan saves compared with another, as text."""
    share = 1 - plan.seconds / baseline.seconds
    if abs(share) < SAME:
        return "saves nothing"
    if share > 0:
        return f"saves {'at most ' if plan.is_bound else ''}{share:.0%} of an iteration"
    return f"costs {'at least ' if plan.is_bound else ''}{-share:.0%} of an iteration"


def ages(plan: PricedPlan) -> str:
    """The ages of a plan's tokens, as text."""
    unit = "generations" if has_host_loop(plan.space.graph) else "updates"
    return f"tokens {plan.estimate.mean_age:.1f} {unit} old on average, {plan.estimate.oldest} at most"
