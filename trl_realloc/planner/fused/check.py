"""Simulates and checks a fused schedule, and computes its baselines: the lower bound, and the time and memory of 1F1B.

The search for a schedule is in `schedule_search`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...common.errors import PlanError
from ...plan import batching
from .pipelines import MODELS, Array, FusedPipelines, FusedSchedule, Task


MAX_MEMORY = 1.25  # largest activation memory, relative to training one model after the other
MAX_NAMED = 4  # largest number of tasks in a message
ROUNDING = 1e-9  # relative


@dataclass(frozen=True)
class SimulatedSchedule:
    """Times and memory of a schedule in which every task begins as early as it can. Sending takes no time.

    Args:
        makespan: end of the last task.
        starts: start of each task, by stage and position in the stage's list.
        memory_peaks: peak of the activation memory on each stage.
    """

    makespan: float
    starts: tuple[tuple[float, ...], ...]
    memory_peaks: tuple[float, ...]


def check(pipelines: FusedPipelines, schedule: FusedSchedule) -> SimulatedSchedule:
    """Simulates a schedule.

    Raises:
        PlanError: a task is missing, unknown, twice or on a wrong stage; tasks wait for each other in a circle; or a
            stage exceeds its memory limit.
    """
    if len(schedule.stages) != pipelines.stages:
        raise PlanError(f"The schedule has {len(schedule.stages)} stages, the pipelines {pipelines.stages}.")
    for stage, tasks in enumerate(schedule.stages):
        _check_tasks(pipelines, stage, tasks)
    starts, makespan = _start_times(pipelines, schedule)
    peaks = tuple(_memory_peak(pipelines, stage, tasks) for stage, tasks in enumerate(schedule.stages))
    for stage, (peak, limit) in enumerate(zip(peaks, pipelines.memory_limit or [np.inf] * len(peaks), strict=True)):
        if peak > limit * (1 + ROUNDING):
            raise PlanError(f"Stage {stage} holds {peak:g} of activations, more than its limit of {limit:g}.")
    return SimulatedSchedule(makespan, starts, peaks)


def _check_tasks(pipelines: FusedPipelines, stage: int, tasks: tuple[Task, ...]) -> None:
    expected = Counter(_tasks_of_stage(pipelines, stage))
    actual = Counter(tasks)
    for difference, (verb, kind) in (
        (actual - expected, ("has", "duplicate or misplaced ")),
        (expected - actual, ("lacks", "")),
    ):
        if difference:
            names = ", ".join(str(task) for task in sorted(difference)[:MAX_NAMED])
            raise PlanError(f"Stage {stage} {verb} {difference.total()} {kind}tasks: {names}.")


def _tasks_of_stage(pipelines: FusedPipelines, stage: int) -> list[Task]:
    return [
        Task(model, pipelines.own_stage(model, stage)[0], micro_batch, kind)
        for model in MODELS
        for micro_batch in range(pipelines.pipeline(model).micro_batches)
        for kind in ("forward", "backward")
    ]


def _start_times(pipelines: FusedPipelines, schedule: FusedSchedule) -> tuple[tuple[tuple[float, ...], ...], float]:
    """The start of every task, by stage and position in the stage's list, and the makespan. The schedule may lack
    micro-batches. Raises `PlanError` if tasks wait for each other."""
    starts: list[list[float]] = [[] for _ in schedule.stages]
    free = [0.0] * len(schedule.stages)
    ends: dict[tuple[Task, int], float] = {}
    awaited: dict[tuple[Task, int], int] = {}  # a task on a stage -> the stage that waits for it
    ready = list(range(len(schedule.stages)))
    while ready:
        stage = ready.pop()
        tasks = schedule.stages[stage]
        while len(starts[stage]) < len(tasks):
            task = tasks[len(starts[stage])]
            before = _predecessor(pipelines, task, stage)
            if before is not None and before not in ends:
                awaited[before] = stage
                break
            start = max(free[stage], 0.0 if before is None else ends[before])
            starts[stage].append(start)
            free[stage] = ends[task, stage] = start + pipelines.seconds(task, stage)
            if (task, stage) in awaited:
                ready.append(awaited.pop((task, stage)))
    waiting = [
        f"stage {stage} at {tasks[len(done)]}"
        for stage, (tasks, done) in enumerate(zip(schedule.stages, starts, strict=True))
        if len(done) < len(tasks)
    ]
    if waiting:
        raise PlanError(f"The stages wait for each other: {', '.join(waiting[:MAX_NAMED])}.")
    return tuple(tuple(times) for times in starts), max(free)


def _predecessor(pipelines: FusedPipelines, task: Task, stage: int) -> tuple[Task, int] | None:
    """The task whose output a task reads, with its stage."""
    route = pipelines.route(task.model, task.copy)
    position = route.index(stage)
    if task.kind == "forward":
        return (task, route[position - 1]) if position else None
    if position == len(route) - 1:
        return task._replace(kind="forward"), stage
    return task, route[position + 1]


def _memory_peak(pipelines: FusedPipelines, stage: int, tasks: tuple[Task, ...]) -> float:
    held = peak = 0.0
    for task in tasks:
        position = pipelines.own_stage(task.model, stage)[1]
        memory = float(pipelines.pipeline(task.model).memory[task.copy, task.micro_batch, position])
        held += memory if task.kind == "forward" else -memory
        peak = max(peak, held)
    return peak


def lower_bound(pipelines: FusedPipelines) -> float:
    """A lower bound of the makespan of all schedules.

    For each stage, for A's tasks, B's tasks and all tasks on it: the earliest arrival of a first forward, plus the work
    of these tasks, plus the shortest time from the end of a last backward to the end of its micro-batch. With equal
    times this includes each model's 1F1B alone, (micro_batches + stages - 1) * (forward + backward).
    """
    chains = [
        float((pipelines.pipeline(model).forward + pipelines.pipeline(model).backward).sum(axis=2).max())
        for model in MODELS
    ]
    bound = max(chains)
    for stage in range(pipelines.stages):
        parts = [_stage_part(pipelines, model, stage) for model in MODELS]
        joined = (min(p[0] for p in parts), sum(p[1] for p in parts), min(p[2] for p in parts))
        bound = max(bound, *(sum(part) for part in (*parts, joined)))
    return bound


def memory_bound(pipelines: FusedPipelines, memory: Array) -> float:
    """A lower bound of the makespan of schedules within a memory limit; `lower_bound` or more.

    Before the first backward on a stage, the stage runs only forwards, and only as many as fit in memory: it is idle
    for the rest of this time. The same holds after its last forward. If these two times cannot overlap, both idle times
    count.

    Args:
        memory: memory limit of each stage.
    """
    bound = lower_bound(pipelines)
    for stage in range(pipelines.stages):
        work = sum(_stage_part(pipelines, model, stage)[1] for model in MODELS)
        (first, idle, begun), (last, idle_after, ended) = (
            _edge(pipelines, stage, float(memory[stage]), is_end) for is_end in (False, True)
        )
        least = first + work + last
        bound = max(bound, least + idle, least + idle_after)
        if bound >= begun + ended:
            bound = max(bound, least + idle + idle_after)
    return bound


def _edge(pipelines: FusedPipelines, stage: int, memory: float, is_end: bool) -> tuple[float, float, float]:
    """Times of a stage at the start of a schedule, before its first backward; with `is_end` at the end of the schedule,
    counted backwards, where the last backwards correspond to first forwards.

    Returns:
        The earliest start of a first forward, the least idle time of the stage before its first backward, because its
        memory has no room for more forwards, and the earliest start of a first backward.
    """
    arrivals, others, counts = [], [], []
    for model in MODELS:
        pipeline = pipelines.pipeline(model)
        copy, position = pipelines.own_stage(model, stage)
        there, back = pipeline.forward[copy], pipeline.backward[copy]
        if is_end:
            there, back = back, there
        arrivals.append(there[:, :position].sum(axis=1).min())
        others.append((there.sum(axis=1) + back[:, position + 1 :].sum(axis=1)).min())
        # by number of micro-batches: the least memory that they hold, and the most seconds that they take
        held, seconds = np.sort(pipeline.memory[copy, :, position]), np.sort(there[:, position])[::-1]
        counts.append((np.concatenate([[0], np.cumsum(held)]), np.concatenate([[0], np.cumsum(seconds)])))
    (held_a, seconds_a), (held_b, seconds_b) = counts
    room = memory * (1 + ROUNDING) - held_a
    most = np.searchsorted(held_b, room, side="right") - 1  # most micro-batches of B, by number of A's micro-batches
    work = float((seconds_a + seconds_b[most])[room >= 0].max())
    first, other = float(min(arrivals)), float(min(others))
    return first, max(other - first - work, 0.0), other


class UniformPipeline(NamedTuple):
    """A model's pipeline whose stages and micro-batches are all alike.

    Args:
        micro_batches: number of micro-batches of one copy.
        forward, backward, memory: values of `Pipeline` for one micro-batch on one stage.
    """

    stages: int
    micro_batches: int
    forward: float
    backward: float
    memory: float


def uniform_bound(a: UniformPipeline, b: UniformPipeline) -> float:
    """`lower_bound` of two uniform pipelines, computed in microseconds instead of milliseconds."""
    alone = max((p.micro_batches + p.stages - 1) * (p.forward + p.backward) for p in (a, b))
    work = sum(p.micro_batches * (p.forward + p.backward) for p in (a, b))
    around = 0.0
    for stage in range(max(a.stages, b.stages)):
        own_a, own_b = stage % a.stages, b.stages - 1 - stage % b.stages
        first = min(own_a * a.forward, own_b * b.forward)
        around = max(around, first + min(own_a * a.backward, own_b * b.backward))
    return max(alone, work + around)


def _stage_part(pipelines: FusedPipelines, model: str, stage: int) -> tuple[float, float, float]:
    """Earliest arrival, work and shortest rest of a model's micro-batches on a stage."""
    pipeline = pipelines.pipeline(model)
    copy, position = pipelines.own_stage(model, stage)
    forward, backward = pipeline.forward[copy], pipeline.backward[copy]
    arrival = forward[:, :position].sum(axis=1).min()
    rest = backward[:, :position].sum(axis=1).min()
    return float(arrival), float(forward[:, position].sum() + backward[:, position].sum()), float(rest)


def one_f_one_b(pipelines: FusedPipelines, model: str) -> tuple[float, Array]:
    """1F1B of one model's copies alone.

    Returns:
        The makespan, and starts of shape `(copies, micro_batches, 2 * stages)`: the forwards in the order of the route,
        then the backwards in the order in which they run.
    """
    pipeline = pipelines.pipeline(model)
    micro_batches, stages = pipeline.micro_batches, pipeline.stages
    times = np.concatenate([pipeline.forward, pipeline.backward[:, :, ::-1]], axis=2)
    ends = np.full(times.shape, np.nan)
    for copy in range(pipeline.copies):
        orders = [batching.one_f_one_b(micro_batches, stages, stage) for stage in range(stages)]
        done, free = [0] * stages, [0.0] * stages
        while sum(done) < 2 * micro_batches * stages:
            for stage, order in enumerate(orders):
                while done[stage] < len(order):
                    micro_batch, is_backward = order[done[stage]]
                    position = 2 * stages - 1 - stage if is_backward else stage
                    before = ends[copy, micro_batch, position - 1] if position else 0.0
                    if np.isnan(before):
                        break
                    free[stage] = max(free[stage], before) + times[copy, micro_batch, position]
                    ends[copy, micro_batch, position] = free[stage]
                    done[stage] += 1
    return float(ends.max()), ends - times


def serial_time(pipelines: FusedPipelines) -> float:
    """Time of both models one after the other, each with 1F1B."""
    return sum(one_f_one_b(pipelines, model)[0] for model in MODELS)


def memory_limit(pipelines: FusedPipelines) -> float:
    """The activation memory that a schedule may take on a stage: `MAX_MEMORY` times that of both models one after the
    other, and at least that of a micro-batch of each."""
    largest = sum(float(pipelines.pipeline(model).memory.max()) for model in MODELS)
    return max(MAX_MEMORY * serial_memory(pipelines), largest)


def serial_memory(pipelines: FusedPipelines) -> float:
    """The largest activation memory of a stage when both models train one after the other with 1F1B."""
    peak = 0.0
    for model in MODELS:
        pipeline = pipelines.pipeline(model)
        for position in range(pipeline.stages):
            warm = min(pipeline.micro_batches, pipeline.stages - position)
            for memory in pipeline.memory[:, :, position]:
                peak = max(peak, float(np.convolve(memory, np.ones(warm), "valid").max()))
    return peak
