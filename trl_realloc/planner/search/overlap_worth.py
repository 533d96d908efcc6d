"""The ladder of a decision as text, for `trl-realloc plan --explain`: rows and sentences about the options for
overlapping calls, and the reasons of the choice. It also has plans that the choice did not need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...plan.algorithm_graphs import has_host_loop
from ...plan.dataflow import DataflowGraph
from ...plan.model_spec import ModelSpec
from ...plan.streams import early_call
from .ahead_choice import choose_staleness
from .choose import choose
from .decision import Decision
from .ladder import SAME, STALENESS, AllowedOptions, Option, ages, saving
from .priced_plan import PricedPlan


UNCORRECTED = "the loss is not corrected for old completions: vllm_importance_sampling_correction is false"
LOOKED_AT = 4  # updates: plans up to this staleness are shown, even if only a smaller one is allowed


@dataclass(frozen=True)
class OverlapRow:
    """A row about an option for overlapping calls.

    Args:
        plan: the best plan with the option; `None` if there is none.
        verdict: `chosen`, or the reason why it is not chosen.
    """

    name: str
    plan: PricedPlan | None
    verdict: str


@dataclass(frozen=True)
class OverlapWorth:
    """The ladder of a job as text.

    Args:
        allowed: options that were allowed.
        stale_graph: graph of a run with a staleness, which may have `actor.forward`.
        stale_specs: models that each call of `stale_graph` runs, by the call's name.
        corrects: whether the run corrects its loss for old rollouts, or may do so.
        time_limit_s: time limit of each further search.
    """

    decision: Decision
    allowed: AllowedOptions
    stale_graph: DataflowGraph
    stale_specs: Mapping[str, Sequence[ModelSpec]]
    corrects: bool = True
    time_limit_s: float = 5.0

    @property
    def baseline(self) -> PricedPlan:
        """The best plan without options."""
        return self.decision.ladder[0].baseline if self.decision.ladder else self.decision.best

    @cached_property
    def apart(self) -> PricedPlan:
        """The best plan without overlap of iterations."""
        deterministic = self.allowed.deterministic
        allowed = AllowedOptions(barrier=True, deterministic=deterministic, fused_training=False, streams=False)
        return choose(self.baseline.space, allowed, time_limit_s=self.time_limit_s).best

    @cached_property
    def ladder(self) -> tuple[Option, ...]:
        """The decision's ladder, with a larger staleness than is allowed."""
        return (*(option for option in self.decision.ladder if option.way != STALENESS), self._staleness())

    def _staleness(self) -> Option:
        option, most = self.decision.option(STALENESS), max(self.allowed.max_staleness, LOOKED_AT)
        baseline = self.decision.best if option is None else option.baseline
        if not self.corrects:
            return Option(STALENESS, baseline, reason=UNCORRECTED)
        if option is not None and (self.allowed.max_staleness >= most or not option.plans):
            return option
        space = replace(self.baseline.space, graph=self.stale_graph, specs=self.stale_specs)
        deterministic, limit_s = self.allowed.deterministic, self.time_limit_s
        larger = choose_staleness(space, baseline, most, deterministic=deterministic, time_limit_s=limit_s)
        return replace(larger, plans={**larger.plans, **(option.plans if option is not None else {})})

    @cached_property
    def rows(self) -> tuple[OverlapRow, ...]:
        """The rows in the order in which the options were tried. The first row is the baseline of the savings."""
        rows = [OverlapRow("one iteration after the other", self.apart, self._verdict(self.apart))]
        if not self._in_turn:
            rows.append(OverlapRow("the next generation begins early", self.baseline, self._verdict(self.baseline)))
        return (*rows, *(row for option in self.ladder for row in self._rows_of(option)))

    def _rows_of(self, option: Option) -> Iterator[OverlapRow]:
        if not option.plans:
            yield OverlapRow(option.way, None, option.reason)
        for name, plan in option.plans.items():
            verdict = self._verdict(plan)
            yield OverlapRow(name, plan, f"by a lower bound {verdict}" if plan.is_bound else verdict)

    @property
    def _in_turn(self) -> bool:
        """True if another library's loop asks for the generation, so that none begins early."""
        return has_host_loop(self.baseline.space.graph)

    def _verdict(self, plan: PricedPlan) -> str:
        best, error = self.decision.best, self.baseline.space.pricing.rates.error
        if plan is best:
            return "chosen"
        if self._is_beyond(plan):
            return f"{_would(plan, best)}; you allow {self.allowed.max_staleness} (max_staleness)"
        slower = plan.seconds / best.seconds - 1
        if slower >= 0:
            return "as fast as the chosen plan" if slower < SAME else f"{slower:.0%} slower than the chosen plan"
        gain = 1 - plan.seconds / best.seconds
        return f"{gain:.1%} faster than the chosen plan; differences below {error:.0%} do not count"

    def _is_beyond(self, plan: PricedPlan) -> bool:
        return plan.staleness.versions > self.allowed.max_staleness

    @property
    def sentences(self) -> tuple[str, ...]:
        """The steps in which the plan was chosen."""
        baseline, best, search = self.baseline, self.decision.best, self.decision.search
        early = early_call(baseline.space.graph, {name: c.assignment for name, c in baseline.calls.items()})
        cannot = "TRL's loop asks for it" if self._in_turn else "its engine sleeps or is not vLLM's"
        begins = "begins early" if early and not self._in_turn else f"cannot begin early, because {cannot}"
        searched = "all plans" if search.exhaustive else f"{search.evaluations:,} plans"
        differs = abs(1 - best.seconds / self.apart.seconds) >= SAME
        saved = f", which {saving(best, self.apart)}" if differs else ""
        return (
            f"Where calls run: the plan {baseline.name!r}, {baseline.seconds:.3g} s; of {searched} the fastest that "
            f"fits in memory, or a preset as fast as estimates can tell.",
            f"Iterations: the next generation {begins}, which {saving(baseline, self.apart)}.",
            *(f"{text[0].upper()}{text[1:]}." for text in map(self._sentence_of, self.ladder)),
            f"Chosen: the plan {best.name!r}, {best.seconds:.3g} s{saved}.",
        )

    def _sentence_of(self, option: Option) -> str:
        """The saving of an option, and the first of its plans with a larger staleness than is allowed."""
        allowed = {name: plan for name, plan in option.plans.items() if not self._is_beyond(plan)}
        parts = [replace(option, plans=allowed).sentence] if allowed or not option.plans else []
        for name, plan in [item for item in option.plans.items() if self._is_beyond(item[1])][:1]:
            would = _would(plan, self.decision.best)
            parts.append(f"{name} {would} ({ages(plan)}); you allow {self.allowed.max_staleness} (max_staleness)")
        return "; ".join(parts)


def _would(plan: PricedPlan, best: PricedPlan) -> str:
    share = 1 - plan.seconds / best.seconds
    return f"would save {share:.0%}" if share >= SAME else "would save nothing"
