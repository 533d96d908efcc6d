"""`Replanner`: decides when a run changes its plan, because the lengths of responses or the run's times
(`run_observer`) have changed the plan's estimate. The trainer asks it between two updates and makes the change.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from ..common.errors import PlanError
from ..plan.dataflow import CallKind
from ..plan.execution_plan import ExecutionPlan
from ..planner.cost.profile import Profile
from ..planner.cost.specification import rates_of
from ..planner.iteration.stream import engine_samples
from ..planner.search.priced_plan import PricedPlan
from ..runtime.process_groups import from_first_rank
from .auto_plan import JobPlan, estimate_at_lengths
from .job import Job
from .run_observer import RunObserver


LENGTHS_WINDOW = 4  # number of updates whose response lengths are used
SEARCH_SHARE = 0.02  # time limit of all searches together, as a share of the time of the remaining updates
# The current plan is estimated again if lengths or corrections have changed by more than this share of the threshold.
SAME_LENGTHS = 0.2

_Lengths = tuple[float, int]  # (mean, largest) response length, tokens


def suits(now: ExecutionPlan, other: ExecutionPlan, episodes: int) -> bool:
    """True if a run can change to another plan without new engines and process groups: the plans differ only in streams
    and barrier, and no generation engine gets more samples than it was made for.

    Args:
        episodes: number of samples in a batch.
    """
    fixed = ("cluster", "assignments", "graph", "staleness", "fused")
    if any(getattr(now, name) != getattr(other, name) for name in fixed):
        return False
    return all(
        engine_samples(other, call, episodes) <= engine_samples(now, call, episodes)
        for call in now.graph.calls_of(CallKind.GENERATE)
    )


class Replanner:
    """Watches response lengths and searches for a faster plan.

    Args:
        observer: observer of the run.
        threshold: relative change of the current plan's estimate above which the planner searches again.
    """

    def __init__(self, job: Job, observer: RunObserver, threshold: float) -> None:
        self.job, self.observer, self.threshold = job, observer, threshold
        self._lengths: deque[Sequence[int]] = deque(maxlen=LENGTHS_WINDOW)
        self._searched_at = _estimate(observer.job_plan)  # the estimate at the last search
        # the latest estimate, with the plan, profile and lengths that it is for
        self._estimated: tuple[tuple[ExecutionPlan, Profile], _Lengths, PricedPlan] | None = None
        self._spent_s = 0.0  # seconds of all searches
        self._beyond_s = 0.0  # seconds by which the latest search exceeded its limit

    def follow(self, job_plan: JobPlan) -> None:
        """Watch another plan from now on, with its estimate as that of the last search. Called before the observer
        follows the plan. If the plan is the same, nothing changes."""
        if job_plan is not self.observer.job_plan:
            self._searched_at = _estimate(job_plan)

    def note(self, lengths: Sequence[int]) -> None:
        """Adds the response lengths (tokens) of one update."""
        self._lengths.append(lengths)

    def better(self, updates_left: int, move_seconds: float, time_limit_s: float = 5.0) -> JobPlan | None:
        """A faster plan that the run can have (`Job.check`) and that saves more time in the remaining updates than the
        change takes. `None` if there is none, or if the estimate has not passed the threshold. All ranks call this
        together.

        Args:
            move_seconds: seconds of a change of plan.
        """
        profile = self.observer.job_plan.profile
        if self.observer.job_plan.decision is None or profile is None:
            return None
        better: JobPlan | None = None
        if self.job.rank == 0 and self._lengths:
            better = self._search(profile, updates_left, move_seconds, time_limit_s)
        # Rank 0 decides for all: estimates depend on a device's memory, and devices may differ.
        timeout_s = self.job.options.collective_timeout_s
        sent = None if better is None else replace(better, profile=None)
        self._searched_at, sent = from_first_rank((self._searched_at, sent), timeout_s)
        return None if sent is None else replace(sent, profile=profile)

    def _search(self, profile: Profile, updates_left: int, move_seconds: float, time_limit_s: float) -> JobPlan | None:
        lengths = [length for update in self._lengths for length in update]
        try:
            current = self._current(profile, lengths)
        except (PlanError, ValueError):  # the run's plan has no estimate at these lengths
            return None
        remaining_s = current.seconds * updates_left
        if remaining_s < move_seconds:  # no plan can save that much
            return None
        # half of the remaining time for searches, because the first estimates change with each update
        time_limit_s = min(time_limit_s, (SEARCH_SHARE * remaining_s - self._spent_s) / 2 - self._beyond_s)
        if abs(current.seconds / self._searched_at - 1) <= self.threshold or time_limit_s <= 0:
            return None
        self._searched_at = current.seconds
        begun = time.perf_counter()
        try:
            decision = self.job.choose(profile, self.job.workload.of_lengths(lengths), time_limit_s=time_limit_s)
            least = current.seconds * rates_of(profile).error
            if current.seconds - decision.best.seconds < least:
                return None
            better = JobPlan.of(decision, profile).allowed(self.job.check)
            keeps = suits(self.observer.job_plan.plan, better.plan, self.job.workload.episodes)
            worth = least if keeps else max(least, move_seconds / max(1, updates_left))
        except (PlanError, ValueError):  # no plan fits, or the run can have none of them
            return None
        finally:
            taken_s = time.perf_counter() - begun
            self._spent_s, self._beyond_s = self._spent_s + taken_s, max(0.0, taken_s - time_limit_s)
        if current.seconds - _estimate(better) < worth:
            return None
        self._searched_at = _estimate(better)
        return better

    def _current(self, profile: Profile, lengths: Sequence[int]) -> PricedPlan:
        """The estimate of the run's plan. The latest one is used again if the plan is the same and corrections and
        lengths have hardly changed (`SAME_LENGTHS`): on many devices an estimate takes seconds, for which all ranks
        wait, and corrections change a little with each update."""
        plan, most = self.observer.job_plan.plan, SAME_LENGTHS * self.threshold
        now: _Lengths = fmean(lengths), max(lengths)
        if self._estimated is not None:
            (old_plan, old_profile), old_lengths, estimate = self._estimated
            changes = [abs(new - old) / max(1, old) for new, old in zip(now, old_lengths, strict=True)]
            if old_plan == plan and max(changes) <= most and is_near(old_profile, profile, plan, most):
                return estimate
        current = estimate_at_lengths(self.job, self.observer.job_plan, lengths)
        assert current is not None, "a plan that the planner chose has an estimate"
        self._estimated = (plan, profile), now, current
        return current


def is_near(profile: Profile, other: Profile, plan: ExecutionPlan, most: float) -> bool:
    """True if two profiles differ only in corrections of a plan's calls, each by no more than the share `most`."""
    if replace(profile, calibration=other.calibration) != other:
        return False
    old, new = profile.calibration, other.calibration
    calls = [(old.factor(call, plan[call.name]), new.factor(call, plan[call.name])) for call in plan.graph.calls]
    moves = [(old.move(name), new.move(name)) for name in plan.order]
    names = {*old.functions, *new.functions}
    seconds = [(old.functions.get(name, 0.0), new.functions.get(name, 0.0)) for name in names]
    pairs = [*calls, *moves, *seconds, (old.dispatch or 0.0, new.dispatch or 0.0)]
    return all(abs(after - before) <= most * before for before, after in pairs)


def _estimate(job_plan: JobPlan) -> float:
    """Seconds of an iteration; 0 without an estimate."""
    return job_plan.priced.seconds if job_plan.priced else 0.0
