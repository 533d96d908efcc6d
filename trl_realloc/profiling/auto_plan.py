"""`plan: auto` for a job: measure or remember, choose, say what and why; and what any plan is expected to take.

The same plan on every rank: rank 0 searches, all receive it. The choosing itself is `planner.choose`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from ..common.errors import PlanError
from ..plan.execution_plan import ExecutionPlan
from ..plan.model_spec import ModelSpec
from ..plan.presets import flatten
from ..planner.choose import Chosen, choose
from ..planner.cost import Pricing
from ..planner.problem import Found, Problem
from ..planner.profile import Profile
from ..planner.show import beaten_table, estimate_table
from ..planner.space import Space
from ..runtime.process_groups import from_first_rank
from .job import Job
from .profile_cache import cached_profile, known_profile


@dataclass(frozen=True)
class Planned:
    """A job's plan.

    Args:
        found: with its estimate; `None` where nothing was measured.
        chosen: what it was chosen over; `None` where the user named the plan.
        profile: the measurements behind it.
    """

    plan: ExecutionPlan
    found: Found | None = None
    chosen: Chosen | None = None
    profile: Profile | None = None

    @staticmethod
    def of(chosen: Chosen, profile: Profile) -> Planned:
        """The planner's own choice."""
        plan = replace(chosen.best.plan, name=f"auto ({chosen.best.name})")
        return Planned(plan, chosen.best, chosen, profile)


def plan_job(job: Job, *, time_limit_s: float = 5.0) -> Planned:
    """The fastest plan by estimate. All ranks call this together; the first time for a machine and its models it takes
    as long as measuring them.

    Raises:
        PlanError: the models fit on no plan.
    """
    if job.cluster.size == 1:
        return Planned(flatten(job.cluster, generation_engine=job.engine))  # there is nothing to choose
    profile, measured = cached_profile(job)
    chosen: Chosen | PlanError | None = None
    if job.rank == 0:
        pricing = job.pricing(profile)
        try:
            chosen = choose(job.models.specs, pricing, generation_engine=job.engine, time_limit_s=time_limit_s)
            say(chosen, profile, measured)
        except PlanError as error:
            chosen = error
    chosen = from_first_rank(chosen)
    if isinstance(chosen, PlanError):
        raise chosen
    assert chosen is not None, "rank 0 chose or refused"
    return Planned.of(chosen, profile)


def known_estimate(job: Job, plan: ExecutionPlan) -> Planned:
    """A plan that the user named, with its estimate where this machine, these models and, of several hosts, the network
    between them have been measured before."""
    if job.rank != 0:
        return Planned(plan)
    try:
        profile = known_profile(job)
        if profile is None:
            return Planned(plan)
        return Planned(plan, estimate(plan, job.models.specs, job.pricing(profile)), profile=profile)
    except PlanError:  # a split that was not measured
        return Planned(plan)


def estimate(plan: ExecutionPlan, specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing) -> Found:
    """What a written plan is expected to take.

    Raises:
        PlanError: a model or a split that the rates do not know.
    """
    space = Space(plan.cluster, plan.graph, specs, pricing)
    problem = Problem(space, {}, barrier=True)
    return problem.found(problem.state_of(plan.assignments), plan.name)


def at_lengths(job: Job, planned: Planned, lengths: Sequence[int]) -> Found | None:
    """The plan's estimate for responses of measured lengths, which is what a run's times are to be held against; `None`
    where nothing was measured."""
    if planned.found is None or planned.profile is None or not lengths:
        return planned.found
    return estimate(planned.plan, job.models.specs, job.pricing(planned.profile, job.workload.of_lengths(lengths)))


def say(chosen: Chosen, profile: Profile, measured: bool) -> None:
    console = Console(stderr=True)
    source = "measured just now" if measured else "measured before"
    console.print(f"plan: auto on {profile.hardware} ({source}). {chosen.said}")
    console.print(estimate_table(chosen.best))
    if chosen.beaten:
        console.print(beaten_table(chosen))
