"""A plan that goes stale: response lengths change while a policy learns, and with them which plan is fastest.

Watches the lengths, and searches again when they have moved the plan's estimate far enough. When the run moves is the
trainer's to say, between two updates; how its state does is `moving`'s business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..common.errors import PlanError
from ..planner.choose import Chosen, choose
from ..planner.profile import Profile
from ..runtime.process_groups import from_first_rank
from .auto_plan import Planned, at_lengths
from .job import Job


WINDOW = 4  # updates whose lengths count
WORTH = 0.02  # of an iteration, that another plan has to save


class Replanner:
    """Args:
    job: what the planner was told.
    planned: what it chose.
    threshold: how far, as a share, the estimate of the plan may move before the planner searches again; 0 for any.
    """

    def __init__(self, job: Job, planned: Planned, threshold: float) -> None:
        self.job, self.planned, self.threshold = job, planned, threshold
        self._seen: deque[Sequence[int]] = deque(maxlen=WINDOW)
        self._basis = planned.found.seconds if planned.found else 0.0

    def note(self, lengths: Sequence[int]) -> None:
        """The response lengths of an update."""
        self._seen.append(lengths)

    def better(self, updates_left: int, move_seconds: float, time_limit_s: float = 5.0) -> Planned | None:
        """Another plan, where the lengths have moved the estimate by more than the threshold, another is now faster,
        and what it saves in the updates that are left is more than moving takes. All ranks call this together."""
        profile = self.planned.profile
        if self.planned.chosen is None or profile is None or not self._seen:
            return None
        chosen: Chosen | None = None
        if self.job.rank == 0:
            chosen = self._search(profile, updates_left, move_seconds, time_limit_s)
        # Rank 0 decides whether as well as which: estimates depend on a device's memory, and devices may differ.
        self._basis, chosen = from_first_rank((self._basis, chosen))
        if chosen is None:
            return None
        self.planned = Planned.of(chosen, profile)
        return self.planned

    def _search(self, profile: Profile, updates_left: int, move_seconds: float, time_limit_s: float) -> Chosen | None:
        """A plan that is worth moving to, by this rank's estimates."""
        lengths = [length for seen in self._seen for length in seen]
        current = at_lengths(self.job, self.planned, lengths)
        assert current is not None, "what the planner chose has an estimate"
        if abs(current.seconds / self._basis - 1) <= self.threshold:
            return None
        self._basis = current.seconds
        pricing = self.job.pricing(profile, self.job.workload.of_lengths(lengths))
        try:
            specs, engine = self.job.models.specs, self.job.engine
            chosen = choose(specs, pricing, generation_engine=engine, time_limit_s=time_limit_s)
        except PlanError:
            return None
        saved = current.seconds - chosen.best.seconds
        if saved < current.seconds * WORTH or saved * updates_left < move_seconds:
            return None
        self._basis = chosen.best.seconds
        return chosen
