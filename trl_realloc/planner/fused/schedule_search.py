"""`search`: a fused schedule of least makespan and, among these, of little activation memory.

Schedules are built from priorities, alternately from the beginning and from the end of time, each with the times of the
last one as its priorities: this closes gaps. The first priorities are the times of each model's 1F1B alone, stretched
and shifted at random, with as many micro-batches in flight on a stage as in 1F1B, or some more. Later priorities are
the times of one of the best schedules so far, with noise. The search ends at the lower bound. It first tries to stay
within `check.MAX_MEMORY`. Then the memory limit is lowered as long as a schedule of the same makespan is found.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

import numpy as np

from .chains import BuiltSchedule, FusedChains
from .check import MAX_MEMORY, ROUNDING, SimulatedSchedule, check, lower_bound, memory_bound, serial_memory
from .kernel import Integers
from .pipelines import Array, FusedPipelines, FusedSchedule, Pipeline


EFFORT = 12_000_000  # tasks placed
ELITES = 4  # number of best schedules to which noise is added
FRESH = 0.1  # share of priorities that are not from an elite
STUCK = 200  # number of priorities without a better elite after which all elites are dropped
PATIENCE = (0.0, 0.3, 0.6, 1.0, 3.0, np.inf)
UNLIMITED = 1_000_000  # micro-batches
MORE_IN_FLIGHT = (0, 0, 1, 1, 2, 3, 4, UNLIMITED)  # than 1F1B
FIRST_EFFORT = 0.5  # share of the effort within `MAX_MEMORY`
NEAR, NEAR_EFFORT = 1.003, 1.0  # extra effort if makespan <= 1.003 x bound
SECOND_EFFORT = 0.7  # share of the effort with the whole memory
MEMORY_EFFORT = 0.3  # share of the effort for each lower memory limit; half of it if the pipelines have a limit
AIM_EFFORT = 0.5  # the same if the schedule needs more than `MAX_MEMORY`
FIRST_STEP, SECOND_STEP, MEMORY_STEP = 0.1, 0.04, 0.01  # steps of the memory limit, relative; the last is the smallest


@dataclass(frozen=True)
class FoundSchedule:
    """The result of a search.

    Args:
        simulated: times and memory of the schedule.
        bound: result of `check.lower_bound`.
    """

    schedule: FusedSchedule
    simulated: SimulatedSchedule
    bound: float


def search(pipelines: FusedPipelines, seed: int = 0, effort: int = EFFORT) -> FoundSchedule:
    """A schedule within the memory limit. The same seed and effort give the same schedule.

    Args:
        effort: number of tasks to place until the makespan is accepted. Lowering the memory then takes up to three
            times as many. A core places about a million per second.
    """
    run = _Search(pipelines, np.random.default_rng(seed))
    limit = np.array(pipelines.memory_limit or [np.inf] * pipelines.stages)
    low, aim = run.chains.least_memory(), MAX_MEMORY * serial_memory(pipelines)
    first = np.minimum(limit, np.maximum(low, aim))
    is_lower = bool((first < limit).any())
    target = memory_bound(pipelines, first)
    run.improve(first, target, (FIRST_EFFORT if is_lower else 1 - SECOND_EFFORT) * effort)
    if is_lower and target * (1 + ROUNDING) < run.makespan <= target * NEAR:
        run.improve(first, target, NEAR_EFFORT * effort)
    target = memory_bound(pipelines, limit)
    if run.makespan > target * (1 + ROUNDING):
        run.improve(limit, target, SECOND_EFFORT * effort)
    is_limited = pipelines.memory_limit is not None
    run.lower_memory(limit, float(low.max()), FIRST_STEP, (MEMORY_EFFORT / 2 if is_limited else MEMORY_EFFORT) * effort)
    if run.peak > aim * (1 + ROUNDING):  # try longer
        run.lower_memory(limit, aim, SECOND_STEP, AIM_EFFORT * effort)
    schedule = run.chains.schedule(run.best)
    return FoundSchedule(schedule, check(pipelines, schedule), run.bound)


def compile_search() -> None:
    """Compile the search, unless its machine code is on disk."""
    pipeline = Pipeline.of(1, 2, 1.0, 1.0)
    search(FusedPipelines(pipeline, pipeline), effort=1)


class _Search:
    """A search's best schedule, its memory peak, and the elites."""

    def __init__(self, pipelines: FusedPipelines, rng: np.random.Generator) -> None:
        self._pipelines = pipelines
        self.chains = FusedChains(pipelines)
        self.bound = lower_bound(pipelines)
        self._rng = rng
        self._elites: list[BuiltSchedule] = []
        self._best: BuiltSchedule | None = None
        self.peak = np.inf

    @property
    def best(self) -> BuiltSchedule:
        assert self._best is not None, "the first build has no limit of micro-batches in flight and cannot fail"
        return self._best

    @property
    def makespan(self) -> float:
        return self._best.makespan if self._best else np.inf

    def improve(self, memory: Array, target: float, effort: float) -> bool:
        """Build schedules within a memory limit until one has the makespan `target`. Returns whether one was found."""
        stuck = 0
        while effort > 0:
            priorities, in_flight, patience = self._disturbed() if self._take_elite() else self._fresh()
            built, builds = self.chains.build_in_turn(self._in_order(priorities), memory, in_flight, patience)
            effort -= builds * self.chains.build_effort
            if built.makespan < np.inf:
                better = not self._elites or built.makespan < self._elites[0].makespan * (1 - ROUNDING)
                stuck = 0 if better else stuck + 1
                self._keep(built)
                if stuck > STUCK:
                    self._elites.clear()
                if built.makespan <= target * (1 + ROUNDING):
                    return True
        return False

    def lower_memory(self, limit: Array, low: float, step: float, effort: float) -> None:
        """Lower the memory limit step by step below the best schedule's peak. The step is halved when no schedule of
        the same makespan is found, until it is small. `effort` is that of one step."""
        while step > MEMORY_STEP and self.peak > low * (1 + ROUNDING):
            memory = np.minimum(limit, max(low, self.peak * (1 - step)))
            self._elites = [replace(self.best, makespan=np.inf)]
            can_be = memory_bound(self._pipelines, memory) <= self.makespan * (1 + ROUNDING)
            if not (can_be and self.improve(memory, self.makespan, effort)):
                step /= 2

    def _keep(self, built: BuiltSchedule) -> None:
        if built.makespan <= self.makespan * (1 + ROUNDING):
            peak = self.chains.peak(built)
            if built.makespan < self.makespan * (1 - ROUNDING) or peak < self.peak:
                self._best, self.peak = built, peak
        place = bisect_right(self._elites, built.makespan, key=lambda elite: elite.makespan)
        self._elites.insert(place, built)
        del self._elites[ELITES:]

    def _take_elite(self) -> bool:
        return bool(self._elites) and self._rng.random() > FRESH

    def _fresh(self) -> tuple[Array, Integers, float]:
        """Priorities from each model's 1F1B alone, limits of micro-batches in flight, and patience."""
        rng = self._rng
        in_flight = np.full((len(self.chains.groups), self.chains.stages), UNLIMITED)
        parts = []
        for number, group in enumerate(self.chains.groups):
            room = max(self.bound - group.span, 0.0)
            stretch = 1 + rng.random() * room / group.span if group.span and rng.random() < 0.7 else 1.0
            shift = (self.bound - stretch * group.span) * (rng.random() if rng.random() < 0.7 else rng.integers(2))
            if rng.random() < 0.3:
                shift += rng.choice((0.2, 1.0)) * self.bound * rng.normal()
            parts.append((shift + stretch * group.nominal).ravel())
            if self._best is not None:  # the first build must succeed
                warm = np.arange(len(group.route), 0, -1)
                in_flight[number, list(group.route)] = warm + rng.choice(MORE_IN_FLIGHT)
        return np.concatenate(parts), in_flight, rng.choice(PATIENCE)

    def _disturbed(self) -> tuple[Array, Integers, float]:
        """The results of `_fresh`, but from an elite's times, with noise on all tasks, on a group's stages, in a window
        of time, on one task or on one micro-batch."""
        rng = self._rng
        elite = self._elites[int(len(self._elites) * rng.random() ** 2)]
        times = elite.starts.copy()
        span = times.max()
        noise = self.chains.chains.seconds.max() * 10 ** rng.uniform(-0.7, 0.8)
        kind = rng.integers(5)
        if kind == 0:
            times += rng.normal(0, noise, len(times))
        elif kind == 1:
            for group in self.chains.groups:
                times[group.tasks] += rng.normal(0, noise, group.tasks.shape[1])
        elif kind == 2:
            near = np.abs(times - rng.uniform(0, span)) < rng.uniform(0.05, 0.3) * span
            times[near] += rng.normal(0, noise, near.sum())
        elif kind == 3:
            times[rng.integers(len(times))] += rng.normal(0, 0.3 * span)
        else:
            chosen = self.chains.groups[rng.integers(len(self.chains.groups))]
            times[rng.choice(chosen.tasks)] += rng.normal(0, 0.3 * span)
        in_flight, patience = elite.in_flight, elite.patience
        if rng.random() < 0.3:
            in_flight = in_flight.copy()
            number = rng.integers(len(in_flight))
            in_flight[number] += rng.choice((-1, 1)) if rng.random() < 0.5 else rng.integers(-1, 2, self.chains.stages)
            in_flight = np.maximum(in_flight, 1)
        return times, in_flight, rng.choice(PATIENCE) if rng.random() < 0.3 else patience

    def _in_order(self, priorities: Array) -> Array:
        """Sorts priorities such that equal micro-batches keep their order."""
        for group in self.chains.groups:
            if group.equal:
                priorities[group.tasks] = np.sort(priorities[group.tasks], axis=0)
        return priorities
