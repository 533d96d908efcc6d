"""The planner's estimates of the phases of `staleness_measured`: the machine is measured by the job's own processes,
and the plan simulated at the lengths of the responses that a phase has trained.

The comparison is in `staleness_ages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any


class Expectation:
    """Of one job. All ranks make it together; rank 0 uses it.

    Args:
        job: of the trainer.

    Attributes:
        profile: as measured, and corrected by the phases that it has learned from.
    """

    def __init__(self, job: Any) -> None:
        from trl_realloc.profiling.profile_cache import measure

        self.job = job
        self.profile = measure(job)

    def learn(self, plan: Any, updates: Sequence[Mapping[str, Any]]) -> None:
        """Correct the profile by updates without a staleness, as a run does."""
        from trl_realloc.plan.timeline import Span
        from trl_realloc.planner.search.learning import MeasuredUpdate, PlanEvidence

        evidence = PlanEvidence(plan, self.job.models.specs, self.job.pricing(self.profile))
        for update in updates:
            spans = [Span(call, device, start, end, update["step"]) for call, device, start, end in update["spans"]]
            evidence.add(MeasuredUpdate.of(spans, update["lengths"]))
        self.profile = replace(self.profile, corrections=evidence.corrections())

    def of(self, plan: Any, updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The planner's estimate of a plan at the lengths of some updates: seconds of an update, ages of tokens, and
        seconds of each call alone."""
        from trl_realloc.planner.search.problem import estimate_plan

        lengths = [length for update in updates for length in update["lengths"]]
        pricing = self.job.pricing(self.profile, self.job.workload.of_lengths(lengths))
        priced = estimate_plan(plan, self.job.models.specs, pricing)
        moves = {
            f"{edge.source} -> {edge.target}": priced.estimate.moves.get(edge.target, 0.0)
            for edge in plan.reallocations
        }
        return {
            "seconds": priced.seconds,
            "mean_age": priced.estimate.mean_age,
            "oldest": priced.estimate.oldest,
            "calls": {**{name: cost.seconds for name, cost in priced.costs.items()}, **moves},
        }
