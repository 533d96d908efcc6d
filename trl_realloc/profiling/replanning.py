"""Decides when a run changes its plan, because the plan's estimate has changed: by the lengths of responses, or by the
run's own times (`run_observer`).

The trainer asks between two updates and makes the change; `runtime.placement.run_state` keeps the training state
meanwhile.
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


LENGTHS_WINDOW = 4  # updates whose response lengths are used
SEARCH_SHARE = 0.02  # of the updates that are left: the most time of this and of all earlier searches
SAME_LENGTHS = 0.2  # of the threshold: a change of lengths after which the current plan is not estimated again

_Lengths = tuple[float, int]  # the mean response length (tokens) and the largest


def suits(now: ExecutionPlan, other: ExecutionPlan, episodes: int) -> bool:
    """True if a run can change to another plan with the engines and groups that it has: the plans differ only in how
    calls overlap, and no generation engine gets more samples than it has been made for.

    Args:
        episodes: samples of a batch.
    """
    kept = ("cluster", "assignments", "graph", "staleness", "fused")
    if any(getattr(now, name) != getattr(other, name) for name in kept):
        return False
    return all(
        engine_samples(other, call, episodes) <= engine_samples(now, call, episodes)
        for call in now.graph.calls_of(CallKind.GENERATE)
    )


class Replanner:
    """Watches response lengths and searches for a faster plan.

    Args:
        observer: of the run, whose plan the planner chose.
        threshold: the planner searches again when the estimate of the current plan has changed by more than this share.
    """

    def __init__(self, job: Job, observer: RunObserver, threshold: float) -> None:
        self.job, self.observer, self.threshold = job, observer, threshold
        self._lengths: deque[Sequence[int]] = deque(maxlen=LENGTHS_WINDOW)
        self._searched_at = _estimate(observer.job_plan)  # the estimate at the last search
        # the latest estimate, and of what
        self._estimated: tuple[tuple[ExecutionPlan, Profile], _Lengths, PricedPlan] | None = None
        self._spent_s = 0.0  # on searches
        self._beyond_s = 0.0  # that the latest search took beyond its limit

    def follow(self, job_plan: JobPlan) -> None:
        """Watch another plan from now on: its estimate counts as that of the last search. Called before the observer
        follows the plan. A run that stays under its plan keeps the estimate of its last search."""
        if job_plan is not self.observer.job_plan:
            self._searched_at = _estimate(job_plan)

    def note(self, lengths: Sequence[int]) -> None:
        """Adds the response lengths (tokens) of one update."""
        self._lengths.append(lengths)

    def better(self, updates_left: int, move_seconds: float, time_limit_s: float = 5.0) -> JobPlan | None:
        """A faster plan that saves more in the remaining updates than changing to it costs, and that the run can have
        (`Job.check`); `None` where there is none, or where the estimate has not passed the threshold. All ranks call
        this together.

        Args:
            move_seconds: seconds that a change of plan takes.
        """
        profile = self.observer.job_plan.profile
        if self.observer.job_plan.decision is None or profile is None:
            return None
        found: JobPlan | None = None
        if self.job.rank == 0 and self._lengths:
            found = self._search(profile, updates_left, move_seconds, time_limit_s)
        # Rank 0 decides whether as well as which: estimates depend on a device's memory, and devices may differ.
        timeout_s = self.job.options.collective_timeout_s
        sent = None if found is None else replace(found, profile=None)
        self._searched_at, sent = from_first_rank((self._searched_at, sent), timeout_s)
        return None if sent is None else replace(sent, profile=profile)

    def _search(self, profile: Profile, updates_left: int, move_seconds: float, time_limit_s: float) -> JobPlan | None:
        lengths = [length for update in self._lengths for length in update]
        try:
            current = self._current(profile, lengths)
        except (PlanError, ValueError):  # the run's own plan has no estimate at these lengths
            return None
        remaining_s = current.seconds * updates_left
        if remaining_s < move_seconds:  # no plan can save that much
            return None
        # half of what is left for searches, because the first estimates change with each update
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
            found = JobPlan.of(decision, profile).allowed(self.job.check)
            keeps = suits(self.observer.job_plan.plan, found.plan, self.job.workload.episodes)
            worth = least if keeps else max(least, move_seconds / max(1, updates_left))
        except (PlanError, ValueError):  # no plan fits, or the run can have none of those that do
            return None
        finally:
            taken_s = time.perf_counter() - begun
            self._spent_s, self._beyond_s = self._spent_s + taken_s, max(0.0, taken_s - time_limit_s)
        if current.seconds - _estimate(found) < worth:
            return None
        self._searched_at = _estimate(found)
        return found

    def _current(self, profile: Profile, lengths: Sequence[int]) -> PricedPlan:
        """The estimate of the run's plan: the latest one, if the plan is the same, and the profile's corrections and
        the lengths have changed by no more than `SAME_LENGTHS` of the threshold. On many devices an estimate takes
        seconds, for which all ranks wait, and what a run teaches changes a little with each update."""
        plan, most = self.observer.job_plan.plan, SAME_LENGTHS * self.threshold
        now: _Lengths = fmean(lengths), max(lengths)
        if self._estimated is not None:
            (known, of_profile), of_lengths, estimate = self._estimated
            changes = [abs(new - old) / max(1, old) for new, old in zip(now, of_lengths, strict=True)]
            if known == plan and max(changes) <= most and is_near(of_profile, profile, plan, most):
                return estimate
        current = estimate_at_lengths(self.job, self.observer.job_plan, lengths)
        assert current is not None, "a plan that the planner chose has an estimate"
        self._estimated = (plan, profile), now, current
        return current


def is_near(one: Profile, other: Profile, plan: ExecutionPlan, most: float) -> bool:
    """True if two profiles are the same but for corrections of a plan's calls, none of which differs by more than the
    share `most`."""
    if replace(one, corrections=other.corrections) != other:
        return False
    old, new = one.corrections, other.corrections
    calls = [(old.factor(call, plan[call.name]), new.factor(call, plan[call.name])) for call in plan.graph.calls]
    moves = [(old.move(name), new.move(name)) for name in plan.order]
    names = {*old.functions, *new.functions}
    seconds = [(old.functions.get(name, 0.0), new.functions.get(name, 0.0)) for name in names]
    pairs = [*calls, *moves, *seconds, (old.handover or 0.0, new.handover or 0.0)]
    return all(abs(after - before) <= most * before for before, after in pairs)


def _estimate(job_plan: JobPlan) -> float:
    """Seconds of an iteration; 0 without an estimate."""
    return job_plan.priced.seconds if job_plan.priced else 0.0
