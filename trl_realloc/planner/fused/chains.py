"""`FusedChains`: the micro-batches of fused pipelines as arrays, and schedules built from priorities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .check import one_f_one_b
from .kernel import Chains, Integers, Limits, construct
from .pipelines import KINDS, MODELS, Array, FusedPipelines, FusedSchedule, Pipeline, Task


BUILD_EFFORT = 100  # fixed cost of a build, in tasks that could be placed in the same time
STALE_BUILDS = 4  # number of builds without a better makespan after which building ends
SAME_TIME = 1e-9  # relative


@dataclass(frozen=True, eq=False)
class BuiltSchedule:
    """A schedule and the settings with which it was built.

    Args:
        makespan: infinity if the limits on micro-batches in flight allow no schedule.
        starts: start of each task. Shape `(tasks,)`.
        places: numbers that order the tasks of each stage. Shape `(tasks,)`.
        in_flight: value of `kernel.Limits.chains`.
        patience: argument of `kernel.choose`.
    """

    makespan: float
    starts: Array
    places: Integers | Array
    in_flight: Integers
    patience: float


@dataclass(frozen=True, eq=False)
class Group:
    """One copy of a model's pipeline.

    Args:
        route: stages of a forward in order.
        tasks: tasks of all micro-batches. Shape `(micro_batches, 2 * len(route))`.
        equal: whether the micro-batches have the same times and memory.
        nominal: start of each task in the model's 1F1B alone. Same shape.
        span: time of this 1F1B.
    """

    route: range
    tasks: Integers
    equal: bool
    nominal: Array
    span: float


class FusedChains:
    """The chains of fused pipelines, and schedules built from both ends of time."""

    def __init__(self, pipelines: FusedPipelines) -> None:
        self.stages = pipelines.stages
        self.groups: list[Group] = []
        self._names: list[Task] = []
        rows = [self._add(pipelines, model, copy) for model, copy in _copies(pipelines)]
        stages, seconds, memory = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        lengths = np.concatenate([np.full(len(group.tasks), group.tasks.shape[1]) for group in self.groups])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        numbers = np.repeat(np.arange(len(self.groups)), [len(group.tasks) for group in self.groups])
        self.chains = Chains(offsets, numbers, stages, seconds, memory)
        self._mirror = np.concatenate([group.tasks[:, ::-1].ravel() for group in self.groups])
        self._mirrored = self.chains._replace(seconds=seconds[self._mirror])
        self._takes = np.array([task.kind == "forward" for task in self._names])
        self._total = np.bincount(stages, memory * self._takes, minlength=self.stages)

    def _add(self, pipelines: FusedPipelines, model: str, copy: int) -> tuple[Integers, Array, Array]:
        """Append a group. Returns its tasks' stages, times and memory."""
        pipeline, route = pipelines.pipeline(model), pipelines.route(model, copy)
        span, starts = one_f_one_b(pipelines, model)
        count, width = pipeline.micro_batches, 2 * pipeline.stages
        tasks = len(self._names) + np.arange(count * width).reshape(count, width)
        self.groups.append(Group(route, tasks, _equal(pipeline, copy), starts[copy], span))
        self._names += [
            Task(model, copy, number, kind) for number in range(count) for kind in KINDS for _ in range(len(route))
        ]
        seconds = np.concatenate([pipeline.forward[copy], pipeline.backward[copy, :, ::-1]], axis=1)
        memory = np.concatenate([pipeline.memory[copy], pipeline.memory[copy, :, ::-1]], axis=1)
        return np.tile([*route, *route[::-1]], count).astype(np.int64), seconds.ravel(), memory.ravel()

    @property
    def tasks(self) -> int:
        return len(self._names)

    @property
    def build_effort(self) -> float:
        """Effort of one build, in tasks."""
        return self.tasks + BUILD_EFFORT

    @property
    def nominal(self) -> Array:
        """The start of each task in its model's 1F1B alone."""
        return np.concatenate([group.nominal.ravel() for group in self.groups])

    def least_memory(self) -> Array:
        """Memory of the largest micro-batch on each stage. Shape `(stages,)`."""
        least = np.zeros(self.stages)
        np.maximum.at(least, self.chains.stages, self.chains.memory)
        return least

    def build(
        self, priorities: Array, memory: Array, in_flight: Integers, patience: float, backward: bool
    ) -> BuiltSchedule:
        """A schedule from the beginning or, `backward`, from the end of time.

        Args:
            priorities: the task with the lowest number runs first or, `backward`, last.
            memory: memory limit of each stage.
        """
        limits = Limits(memory, bool((self._total > memory).any()), in_flight)
        starts, places = np.empty(self.tasks), np.empty(self.tasks, np.int64)
        chains = self._mirrored if backward else self.chains
        ordered = priorities[self._mirror] if backward else priorities
        makespan = construct(chains, limits, ordered, patience, starts, places)
        if backward:
            starts, places = (makespan - starts - chains.seconds)[self._mirror], -places[self._mirror]
        return BuiltSchedule(makespan, starts, places, in_flight, patience)

    def build_in_turn(
        self, priorities: Array, memory: Array, in_flight: Integers, patience: float
    ) -> tuple[BuiltSchedule, int]:
        """Build alternately from both ends of time while the makespan falls, each time with the last times as
        priorities. Returns the best schedule and the number of builds."""
        best = self.build(priorities, memory, in_flight, patience, False)
        built, builds, stale = best, 1, 0
        while stale < STALE_BUILDS and built.makespan < np.inf:
            backward = builds % 2 == 1
            times = -self.ends(built) if backward else built.starts
            built = self.build(times, memory, in_flight, patience, backward)
            builds += 1
            stale = 0 if built.makespan < best.makespan * (1 - SAME_TIME) else stale + 1
            best = built if stale == 0 else best
        return best, builds

    def ends(self, built: BuiltSchedule) -> Array:
        return built.starts + self.chains.seconds

    def peak(self, built: BuiltSchedule) -> float:
        """The largest memory of a stage."""
        held = np.where(self._takes, self.chains.memory, -self.chains.memory)
        return max(float(np.cumsum(held[order]).max()) for order in self._orders(built))

    def schedule(self, built: BuiltSchedule) -> FusedSchedule:
        return FusedSchedule(tuple(tuple(self._names[task] for task in order) for order in self._orders(built)))

    def _orders(self, built: BuiltSchedule) -> Iterator[NDArray[np.int64]]:
        order = np.argsort(built.places)
        for stage in range(self.stages):
            yield order[self.chains.stages[order] == stage]


def _copies(pipelines: FusedPipelines) -> Iterator[tuple[str, int]]:
    for model in MODELS:
        for copy in range(pipelines.pipeline(model).copies):
            yield model, copy


def _equal(pipeline: Pipeline, copy: int) -> bool:
    arrays = (pipeline.forward[copy], pipeline.backward[copy], pipeline.memory[copy])
    return all(bool((values == values[:1]).all()) for values in arrays)
