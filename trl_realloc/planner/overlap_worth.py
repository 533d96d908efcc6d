"""What each way of letting calls overlap is worth, and why the chosen plan is chosen, in words: the rows and the
sentences of `trl-realloc plan --explain`.

The choice itself is in `choose`; this adds the plans that it had no reason to look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..plan.algorithm_graphs import has_host_loop
from ..plan.dataflow import DataflowGraph
from ..plan.model_spec import ModelSpec
from ..plan.streams import early_call
from .ahead_choice import SAME, StalenessChoice, ages, choose_staleness, saving
from .choose import MANY, choose
from .decision import Decision
from .fused_choice import NOT_ALLOWED
from .priced_plan import PricedPlan
from .space import Space


UNCORRECTED = "the loss is not corrected for old completions: vllm_importance_sampling_correction is false"
LOOKED_AT = 4  # updates: the least staleness up to which plans are shown, also where fewer are allowed


@dataclass(frozen=True)
class Way:
    """A way of letting calls overlap.

    Args:
        plan: the best plan that uses it; `None` where there is none.
        verdict: that it is chosen, or why it is not.
    """

    name: str
    plan: PricedPlan | None
    verdict: str


@dataclass(frozen=True)
class OverlapWorth:
    """What overlapping calls is worth for a job.

    Args:
        decision: for the job.
        stale_graph: of a run with a staleness, which may have `actor.forward`.
        stale_specs: the models that each call of it runs, by the call's name.
        allowed: the largest staleness that the user allows.
        corrects: the run corrects its loss for old rollouts, or may.
        generation_engine, time_limit_s, engines, deterministic: as of `choose`.
    """

    decision: Decision
    stale_graph: DataflowGraph
    stale_specs: Mapping[str, Sequence[ModelSpec]]
    allowed: int
    generation_engine: str = "vllm"
    time_limit_s: float = 5.0
    corrects: bool = True
    engines: Sequence[str] = ("zero", "megatron")
    deterministic: bool = False

    @cached_property
    def whole(self) -> PricedPlan:
        """The best plan without fused training, streams and a staleness."""
        if self.decision.fused is not None:
            return self.decision.fused.whole
        return self.decision.streams.whole if self.decision.streams is not None else self._synchronous

    @property
    def _synchronous(self) -> PricedPlan:
        return self.decision.staleness.whole if self.decision.staleness is not None else self.decision.best

    @cached_property
    def apart(self) -> PricedPlan:
        """The best plan in which an iteration begins when the one before has ended."""
        space = self.whole.space
        found = choose(
            space.specs,
            space.pricing,
            graph=space.graph,
            generation_engine=self.generation_engine,
            engines=self.engines,
            deterministic=self.deterministic,
            barrier=True,
            fuses=False,
            splits=space.splits,
            time_limit_s=self.time_limit_s,
        )
        return found.streams.whole if found.streams is not None else found.best

    @cached_property
    def staleness(self) -> StalenessChoice:
        """What a staleness is worth, also of more updates than are allowed."""
        if not self.corrects:
            return StalenessChoice(self._synchronous, reason=UNCORRECTED)
        known, most = self.decision.staleness, max(self.allowed, LOOKED_AT)
        if known is not None and (self.allowed >= most or not known.by_versions):
            return known
        space: Space = replace(self.whole.space, graph=self.stale_graph, specs=self.stale_specs)
        exact = space.cluster.size <= MANY
        found = choose_staleness(
            space,
            self._synchronous,
            most,
            deterministic=self.deterministic,
            time_limit_s=self.time_limit_s,
            exact=exact,
        )
        by_versions = {**found.by_versions, **(known.by_versions if known is not None else {})}
        return replace(found, by_versions=dict(sorted(by_versions.items())))

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """In the order in which they were added to plans; the first one is what the savings refer to."""
        return (
            Way("one iteration after the other", self.apart, self._verdict(self.apart)),
            *self._early(),
            *self._fused(),
            *self._streams(),
            *self._stalenesses(),
        )

    def _early(self) -> Iterator[Way]:
        """The next generation that begins while others still train; no loop of another library begins it."""
        if not self._in_turn:
            yield Way("the next generation begins early", self.whole, self._verdict(self.whole))

    @property
    def _in_turn(self) -> bool:
        return has_host_loop(self.whole.space.graph)

    def _fused(self) -> Iterator[Way]:
        """Fused training: of the best plan without a staleness, and beside one."""
        choices = {"fused training": self.decision.fused, "fused training, staleness": self.decision.fused_ahead}
        for name, choice in choices.items():
            if choice is None:
                continue
            plan = choice.fused
            if plan is None:
                yield Way(name, None, choice.reason)
                continue
            versions = f" {plan.staleness.versions}" if plan.staleness.versions else ""
            is_bound = plan.fused_cost is not None and plan.fused_cost.found is None
            verdict = self._verdict(plan)
            if not choice.is_allowed and plan.seconds < self.decision.best.seconds:
                verdict += f"; {NOT_ALLOWED}"
            yield Way(f"{name}{versions}", plan, f"by a lower bound {verdict}" if is_bound else verdict)

    def _streams(self) -> Iterator[Way]:
        streams = self.decision.streams
        if streams is None or streams.still is None:
            reason = streams.reason if streams is not None else "not simulated for so large a cluster"
            yield Way("streams", None, reason)
            return
        yield Way("streams", streams.still, self._verdict(streams.still))
        if streams.moved is not None:
            yield Way("streams, the last samples moved", streams.moved, self._verdict(streams.moved))

    def _stalenesses(self) -> Iterator[Way]:
        if not self.staleness.by_versions:
            yield Way("staleness", None, self.staleness.reason)
        for versions, plan in self.staleness.by_versions.items():
            yield Way(f"staleness {versions}", plan, self._verdict(plan))

    def _verdict(self, plan: PricedPlan) -> str:
        best, error = self.decision.best, self.whole.space.pricing.rates.error
        if plan is best:
            return "chosen"
        if plan.staleness.versions > self.allowed:
            return f"{_would(plan, best)}; you allow {self.allowed} (max_staleness)"
        slower = plan.seconds / best.seconds - 1
        if slower >= 0:
            return "as fast as the chosen plan" if slower < SAME else f"{slower:.0%} slower than the chosen plan"
        gain = 1 - plan.seconds / best.seconds
        return f"{gain:.1%} faster than the chosen plan; differences below {error:.0%} do not count"

    @property
    def sentences(self) -> tuple[str, ...]:
        """How the plan was chosen, step by step."""
        whole, best, search = self.whole, self.decision.best, self.decision.search
        early = early_call(whole.space.graph, {name: c.assignment for name, c in whole.calls.items()})
        cannot = "TRL's loop asks for it" if self._in_turn else "its engine sleeps or is not vLLM's"
        begins = "begins early" if early and not self._in_turn else f"cannot begin early, because {cannot}"
        found = "all plans" if search.exhaustive else f"{search.evaluations:,} plans"
        lines = [
            f"Where calls run: the plan {whole.name!r}, {whole.seconds:.3g} s; of {found} the fastest that fits in "
            f"memory, or a preset as fast as estimates can tell.",
            f"Iterations: the next generation {begins}, which {saving(whole, self.apart)}.",
        ]
        for choice, where in ((self.decision.fused, ""), (self.decision.fused_ahead, "beside a staleness ")):
            if choice is not None:
                lines.append(f"Fused training: {where}{choice.sentence}.")
        if self.decision.streams is not None:
            lines.append(f"Streams: {self.decision.streams.sentence}.")
        lines.append(f"Staleness: {self._staleness_sentence}.")
        differs = abs(1 - best.seconds / self.apart.seconds) >= SAME
        saved = f", which {saving(best, self.apart)}" if differs else ""
        lines.append(f"Chosen: the plan {best.name!r}, {best.seconds:.3g} s{saved}.")
        return tuple(lines)

    @property
    def _staleness_sentence(self) -> str:
        if not self.staleness.by_versions:
            return self.staleness.reason
        allowed = {k: plan for k, plan in self.staleness.by_versions.items() if k <= self.allowed}
        parts = [replace(self.staleness, by_versions=allowed).sentence] if allowed else []
        more = next((plan for k, plan in self.staleness.by_versions.items() if k > self.allowed), None)
        if more is not None:
            best = self.decision.best
            text = f"staleness {more.staleness.versions} {_would(more, best)}"
            parts.append(f"{text} ({ages(more)}); you allow {self.allowed} (max_staleness)")
        return "; ".join(parts)


def _would(plan: PricedPlan, best: PricedPlan) -> str:
    share = 1 - plan.seconds / best.seconds
    return f"would save {share:.0%}" if share >= SAME else "would save nothing"
