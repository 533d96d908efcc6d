"""Decides whether a run whose first plan came from data sheets measures its machine between two updates.

Measuring must pay off: in the remaining updates a better plan must save more time than measuring takes. It must also
take no longer than the run has trained. `profile_cache` measures.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from ..common.errors import PlanError
from ..common.notices import notice
from ..planner.search.learning import MIN_UPDATES, WARM_UP
from ..planner.search.problem import estimate_plan
from ..runtime.process_groups import from_first_rank
from .job import Job
from .profile_cache import elements_of_short_runs, plans_of, short_runs
from .run_observer import RunObserver


# Share of an update that a measured plan is expected to save (assumed). In the runs of docs/planner.md the planner's
# plan took from 6 % more to 23 % less time than the best other preset.
GAIN = 0.1
OVERHEAD_S = 5.0  # seconds of measuring links, copies and shared processors


class MeasuringDecision(NamedTuple):
    """Rank 0's decision: measuring begins now and takes at most `budget_s` seconds, or does not begin if that is
    `None`. With `is_last` the decision is final."""

    budget_s: float | None
    is_last: bool


class LateMeasuring:
    """Decides whether a run measures its machine, when, and for how long.

    Args:
        unit: name of an iteration in messages.

    Attributes:
        is_over: whether the run has measured, or measuring cannot pay off any more. The same on all ranks.
    """

    def __init__(self, job: Job, observer: RunObserver, unit: str = "update") -> None:
        self.job, self.observer, self.unit = job, observer, unit
        profile = observer.job_plan.profile
        measured = observer.job_plan.refused or profile
        is_measured = measured is None or bool(measured.observations and measured.complete)
        # plans of one device differ in memory, which is computed and not measured
        self.is_over = is_measured or job.cluster.size == 1
        self._seconds: list[float] = []

    def note(self, seconds: float) -> None:
        """Add the seconds of an iteration."""
        self._seconds.append(seconds)

    def budget(self, updates_left: int, start_s: float) -> float | None:
        """The largest number of seconds that measuring may take if it should begin now, else `None`. All ranks call
        this together.

        Args:
            start_s: seconds to start the engines.
        """
        if self.is_over or len(self._seconds) <= WARM_UP + MIN_UPDATES:
            return None
        verdict = MeasuringDecision(None, False)
        if self.job.rank == 0:
            verdict = self._verdict(updates_left, start_s)
        verdict = from_first_rank(verdict, self.job.options.collective_timeout_s)
        self.is_over = verdict.is_last
        return verdict.budget_s

    def _verdict(self, updates_left: int, start_s: float) -> MeasuringDecision:
        saved_s, cost_s = GAIN * median(self._seconds[WARM_UP:]) * updates_left, self.cost(start_s)
        left = f"{updates_left} {self.unit}{'s' if updates_left != 1 else ''}"
        if saved_s < cost_s:
            if cost_s < math.inf:
                notice(
                    f"this machine is not measured for a better plan: measuring takes about {cost_s:.0f} s, and in the "
                    f"{left} left a better plan might save {saved_s:.0f} s"
                )
            return MeasuringDecision(None, True)
        trained_s = sum(self._seconds)
        if trained_s < cost_s:
            return MeasuringDecision(None, False)
        budget_s = min(saved_s, trained_s)
        notice(
            f"{self.unit} {len(self._seconds)}: measuring this machine for a better plan, for {budget_s:.0f} s at "
            f"most; in the {left} left a better plan might save {saved_s:.0f} s"
        )
        return MeasuringDecision(budget_s - start_s, True)  # the run's engines are started again after measuring

    def cost(self, start_s: float) -> float:
        """Expected seconds of the first short runs, which every plan's estimate needs, and of restarting the run's
        engines. If measuring was cut short before, of all short runs."""
        job, profile = self.job, self.observer.job_plan.profile
        assert profile is not None, "the planner chose the plan"
        # short runs have no reward functions, and send smaller batches
        profile = replace(profile, calibration=profile.calibration.without_seconds())
        runs = short_runs(job, elements_of_short_runs(job))
        plans = plans_of(job, runs)
        if not plans:
            return math.inf  # a device's memory does not hold the models
        seconds = 0.0
        for episodes, response in runs.sizes:
            work = job.workload.once(episodes, response)
            try:
                seconds += estimate_plan(plans[0], runs.models.specs, job.pricing(profile, work), exact=False).seconds
            except PlanError:  # no estimate: assume the time of an update
                seconds += median(self._seconds)
        rounds = len(plans) if profile.observations else 1
        return OVERHEAD_S + start_s + rounds * (start_s + seconds)
