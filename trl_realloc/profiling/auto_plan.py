"""Makes the plan of a job (`plan: auto`): reads the machine's profile or specification, chooses, prints the decision.

Rank 0 searches, and all ranks receive the same plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from transformers.utils import logging

from ..common.errors import PlanError
from ..common.notices import notice, working
from ..plan.execution_plan import ExecutionPlan
from ..planner.cost.profile import Profile
from ..planner.search.decision import Decision
from ..planner.search.priced_plan import PricedPlan
from ..planner.search.problem import estimate_plan
from ..planner.search.show import alternatives_table, plan_cost_table
from ..runtime.process_groups import from_first_rank
from .job import Job
from .profile_cache import (
    cache_path,
    cached_profile,
    known_profile,
    measure_between_updates,
    starting_profile,
    unmeasured_profile,
)


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class JobPlan:
    """A job's plan with its estimate.

    Args:
        priced: the plan with its estimate; `None` if nothing was measured.
        decision: the planner's decision; `None` if the user named the plan.
        profile: measurements on which the estimate is based.
        refused: measurements with which no plan fits. The plan was then chosen by specification.
    """

    plan: ExecutionPlan
    priced: PricedPlan | None = None
    decision: Decision | None = None
    profile: Profile | None = None
    refused: Profile | None = None

    def allowed(self, check: Callable[[ExecutionPlan], None]) -> JobPlan:
        """This plan or, if `check` refuses it, the fastest alternative that `check` accepts.

        Raises:
            PlanError, ValueError: `check` refuses all plans; its error for this plan.
        """
        try:
            check(self.plan)
            return self
        except (PlanError, ValueError) as error:
            others = self.decision.alternatives if self.decision is not None else ()
            plans = sorted((other.plan for other in others if other.plan is not None), key=lambda plan: plan.seconds)
            for priced in plans:
                with contextlib.suppress(PlanError, ValueError):
                    check(priced.plan)
                    notice(f"{self.plan.name} cannot be run ({error}); the fastest plan that can is {priced.name}")
                    return replace(self, plan=replace(priced.plan, name=f"auto ({priced.name})"), priced=priced)
            raise

    @staticmethod
    def of(decision: Decision, profile: Profile) -> JobPlan:
        """The plan that the planner chose."""
        plan = replace(decision.best.plan, name=f"auto ({decision.best.name})")
        return JobPlan(plan, decision.best, decision, profile)


def plan_job(job: Job, *, measure_first: bool = False, time_limit_s: float = 5.0) -> JobPlan:
    """The plan with the shortest estimated iteration that the run can have (`Job.check`). All ranks call this together.

    Args:
        measure_first: whether a machine without a profile is measured now. Otherwise the plan is chosen by
            specification, and measuring waits until it pays off (`late_measuring`). A plan by specification is also
            used if no plan fits by the profile.

    Raises:
        PlanError, ValueError: the models fit on no plan, or on none that the run can have.
    """
    profile, is_new = cached_profile(job) if measure_first else (starting_profile(job), False)
    if not profile.observations:
        notice(
            "this machine was not measured for these models, so the run begins under a plan by specification; "
            "TRL_REALLOC_MEASURE=first measures before the first update"
        )
    try:
        return chosen_plan(job, profile, is_new=is_new, time_limit_s=time_limit_s)
    except (PlanError, ValueError) as error:  # on all ranks
        if not profile.observations:
            raise
        return _plan_by_specification(job, profile, error, time_limit_s)


def _plan_by_specification(job: Job, refused: Profile, error: Exception, time_limit_s: float) -> JobPlan:
    """The plan by specification, if no plan fits by the measurements. Raises `error` if there is none either. All ranks
    call this together."""
    links = refused.links or tuple(row for row in refused.observations if row.far)
    profile = replace(unmeasured_profile(job), links=links)
    try:
        chosen = chosen_plan(job, profile, is_new=False, time_limit_s=time_limit_s)
    except (PlanError, ValueError):
        raise error from None
    if job.rank == 0:
        logger.warning(
            f"No plan fits by the measurements of this machine: {error} The run begins under {chosen.plan.name}, "
            f"chosen by specification, and may run out of memory. To measure again, delete {cache_path(job)}."
        )
    return replace(chosen, refused=refused)


def chosen_plan(job: Job, profile: Profile, *, is_new: bool, time_limit_s: float = 5.0) -> JobPlan:
    """The plan with the shortest iteration by a profile's estimate that the run can have. All ranks call this together,
    and all or none of them raise.

    Args:
        is_new: whether the profile was measured in this run.

    Raises:
        PlanError, ValueError: the models fit on no plan, or on none that the run can have.
    """
    decision: Decision | PlanError | None = None
    if job.rank == 0:
        try:
            decision = job.choose(profile, time_limit_s=time_limit_s)
            print_decision(decision, profile, is_new=is_new)
        except PlanError as error:
            decision = error
    decision = from_first_rank(decision, job.options.collective_timeout_s)
    if isinstance(decision, PlanError):
        raise decision
    assert decision is not None, "rank 0 chose or refused"
    return JobPlan.of(decision, profile).allowed(job.check)


def measured_plan(job: Job, budget_s: float, current: JobPlan) -> JobPlan:
    """Measures the machine within `budget_s` seconds and chooses a plan. All ranks call this together.

    Args:
        current: the run's plan. It is returned if nothing was measured, if no plan fits by the measurements, or if the
            run can have none of the plans that fit.
    """
    with working("measuring this machine for the planner"):
        profile = measure_between_updates(job, budget_s)
    if not profile.observations:
        return current
    try:
        return chosen_plan(job, profile, is_new=True)
    except (PlanError, ValueError) as error:
        notice(
            f"the run continues under {current.plan.name}, because the measured machine leaves no other plan: {error}"
        )
        return current


def known_estimate(job: Job, plan: ExecutionPlan) -> JobPlan:
    """A plan that the user named. Rank 0 adds an estimate if the machine, the models and the network were measured
    before."""
    if job.rank != 0:
        return JobPlan(plan)
    try:
        profile = known_profile(job)
        if profile is None:
            return JobPlan(plan)
        return JobPlan(plan, estimate_plan(plan, job.models.specs, job.pricing(profile)), profile=profile)
    except PlanError:  # a split of the plan was not measured
        return JobPlan(plan)


def estimate_at_lengths(job: Job, job_plan: JobPlan, lengths: Sequence[int]) -> PricedPlan | None:
    """The plan's estimate for measured response lengths (tokens), to compare with a run's times; `None` if nothing was
    measured."""
    if job_plan.priced is None or job_plan.profile is None or not lengths:
        return job_plan.priced
    pricing = job.pricing(job_plan.profile, job.workload.of_lengths(lengths))
    return estimate_plan(job_plan.plan, job.models.specs, pricing)


def print_decision(decision: Decision, profile: Profile, *, is_new: bool) -> None:
    """Prints the chosen plan and its alternatives on stderr.

    Args:
        is_new: whether the profile was measured in this run.
    """
    console = Console(stderr=True)
    source = "measured just now" if is_new else "measured before" if profile.observations else "by specification"
    if corrected := profile.calibration.described():
        source += f", and corrected by the times of earlier runs: {corrected}"
    lengths = decision.best.space.pricing.workload.lengths_text
    console.print(f"plan: auto on {profile.hardware} ({source}), for {lengths}. {decision.summary}")
    console.print(plan_cost_table(decision.best))
    if decision.alternatives:
        console.print(alternatives_table(decision))
