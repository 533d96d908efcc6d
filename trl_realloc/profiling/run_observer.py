"""`RunObserver`: compares the updates of a run with its plan's estimate, and saves the corrections for the next run.

The arithmetic is in `planner.search.learning`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..common.errors import PlanError
from ..common.notices import notice
from ..engines.base import DecodeStep
from ..plan.dataflow import CallKind
from ..plan.spans import Span
from ..planner.cost.profile import Profile
from ..planner.cost.specification import decode_host
from ..planner.search.learning import PlanEvidence
from ..planner.search.measured_update import MeasuredUpdate
from ..planner.search.priced_plan import PricedPlan
from .auto_plan import JobPlan, estimate_at_lengths
from .job import Job
from .profile_cache import cache_path, keep_calibration


CHANGE = 0.1  # relative change of a factor above which the corrections are saved again


class RunObserver:
    """Observes the updates of one run on rank 0. On the other ranks, and for a plan without an estimate, it does
    nothing.

    Attributes:
        job_plan: the run's plan, with the latest corrections in its profile.
    """

    def __init__(self, job: Job, job_plan: JobPlan) -> None:
        self.job = job
        self._kept: Profile | None = None
        self.follow(job_plan)

    def follow(self, job_plan: JobPlan) -> None:
        """Observe another plan from now on."""
        self._chosen = self.job_plan = job_plan
        self._evidence: PlanEvidence | None = None
        profile = job_plan.profile
        if self.job.rank == 0 and profile is not None and job_plan.priced is not None:
            self._kept = self._kept or profile
            try:
                self._evidence = PlanEvidence(job_plan.plan, self.job.models.specs, self.job.pricing(profile))
            except PlanError:  # a split of the plan was not measured
                return

    def note_decoding(self, steps: Mapping[str, Sequence[DecodeStep]]) -> None:
        """Adds the host time of decode steps to the profile of GPUs that were not measured, once, and saves it. Factors
        of generation calls are dropped, because they were learned without it.

        Args:
            steps: decode steps of this rank's engine, by call (`BackgroundEngine.decode_steps`).
        """
        profile, plan = self.job_plan.profile, self.job_plan.plan
        if self._evidence is None or profile is None or not profile.is_accelerator or profile.observations:
            return
        if profile.decode_host is not None:
            return
        for call, per_call in steps.items():
            (spec, *_) = self.job.models.specs[call]
            host = decode_host(self.job.pricing(profile), spec, plan[call], per_call)
            if host is not None:
                calibration = profile.calibration.without_calls(plan.graph.calls_of(CallKind.GENERATE))
                profile, chosen = replace(profile, decode_host=host, calibration=calibration), self._chosen
                self.follow(replace(self.job_plan, profile=profile))
                self._chosen = chosen
                self._keep()
                return

    def note(self, spans: Sequence[Span], lengths: Sequence[int], iterations: int = 1) -> None:
        """Adds the mean of `iterations` iterations, and corrects the profile.

        Args:
            spans: spans of all devices in these iterations, on rank 0.
            lengths: tokens of the responses.
        """
        profile = self.job_plan.profile
        if self._evidence is None or profile is None or not spans:
            return
        self._evidence.add(MeasuredUpdate.of(spans, lengths, iterations))
        corrected = replace(profile, calibration=self._evidence.calibration())
        self.job_plan = replace(self.job_plan, profile=corrected)
        if self._kept is None or _differ(corrected, self._kept):
            self._keep()

    def end(self, lengths: Sequence[int]) -> PricedPlan | None:
        """Saves the corrections for the next run, and prints them.

        Args:
            lengths: tokens of the run's responses.

        Returns:
            The plan's estimate for these lengths, to compare with the run's times; `None` if nothing was measured.
        """
        profile = self.job_plan.profile
        if self._evidence is not None and profile is not None and profile.calibration != self._evidence.before:
            self._keep()
            if text := profile.calibration.described():
                notice(
                    f"measured / estimated seconds of this run: {text}. Estimates are corrected by these factors, "
                    f"which are kept for the next run ({cache_path(self.job)})"
                )
        return estimate_at_lengths(self.job, self.job_plan, lengths)

    def when_chosen(self, lengths: Sequence[int]) -> PricedPlan | None:
        """The estimate for these lengths (tokens) without the corrections learned under the plan. `None` if there are
        none."""
        before, now = self._chosen.profile, self.job_plan.profile
        if before is None or now is None or before == now:
            return None
        return estimate_at_lengths(self.job, self._chosen, lengths)

    def _keep(self) -> None:
        self._kept = self.job_plan.profile
        if self._kept is not None:
            keep_calibration(self._kept, self.job)


def _differ(profile: Profile, other: Profile) -> bool:
    """True if a factor of one profile differs from that of the other by more than `CHANGE`."""
    new, old = profile.calibration, other.calibration
    pairs = [(factor, old.calls.get(name, 1.0)) for name, factor in new.calls.items()]
    pairs += [(factor, old.moves.get(name, 1.0)) for name, factor in new.moves.items()]
    return any(abs(factor / before - 1) > CHANGE for factor, before in pairs)
