"""A mini-batch of two models that train together, in the planner's terms: its pipelines, the order of its tasks, and
their times.

`orders` chooses the order, `engines/training/fused_training` runs it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ...engines.training.fused_training import FusedMiniBatch
from ...engines.training.stage_figures import FusedShape
from ...engines.training.stage_messages import StageTask
from ...engines.training.stage_run import Orders
from ...plan.stage_spans import StageSpan
from ...planner.fused.check import start_times
from ...planner.fused.pipelines import KINDS, MODELS, Array, FusedPipelines, FusedSchedule, Pipeline, Task


def pipelines_of(shape: FusedShape) -> FusedPipelines:
    """The planner's problem for a fused mini-batch of this shape, without a limit of memory."""
    a, b = (Pipeline(*_arrays(shape, model)) for model in range(2))
    return FusedPipelines(a, b)


def _arrays(shape: FusedShape, model: int) -> tuple[Array, Array, Array]:
    """Seconds of forwards and backwards, and memory. Shape `(copies, micro_batches, stages)`. If copies have different
    numbers of micro-batches, the missing ones are zeros."""
    tokens, figures = shape.tokens[model], shape.figures[model]
    copies, width = len(tokens), max(1, *map(len, tokens))
    stages = len(figures) // copies
    forward, backward, memory = np.zeros((3, copies, width, stages))
    for copy, lengths in enumerate(tokens):
        block = figures[copy * stages : (copy + 1) * stages]
        n, size = len(lengths), np.array(lengths, np.float64)
        for stage, stage_figures in enumerate(block if model == 0 else block[::-1]):
            forward[copy, :n, stage] = stage_figures.forward[0] + stage_figures.forward[1] * size
            backward[copy, :n, stage] = stage_figures.backward[0] + stage_figures.backward[1] * size
            memory[copy, :n, stage] = stage_figures.memory * size
    return forward, backward, memory


def tasks_of(schedule: FusedSchedule, shape: FusedShape) -> Orders:
    """The tasks of each stage of a schedule, without the micro-batches that do not exist."""

    def exists(task: Task) -> bool:
        return task.micro_batch < len(shape.tokens[MODELS.index(task.model)][task.copy])

    return tuple(
        tuple(
            StageTask(MODELS.index(task.model), task.micro_batch, task.kind == "backward")
            for task in tasks
            if exists(task)
        )
        for tasks in schedule.stages
    )


def stage_spans(ran: FusedMiniBatch, calls: tuple[str, str], step: int) -> tuple[StageSpan, ...]:
    """Times of a mini-batch's tasks on the stages of a line, and the expected times if the shape has measured ones.

    Args:
        calls: names of the two models' calls.
    """
    pipelines = pipelines_of(ran.shape)
    schedule = FusedSchedule(
        tuple(
            tuple(
                Task(
                    MODELS[task.model],
                    pipelines.own_stage(MODELS[task.model], stage)[0],
                    task.micro_batch,
                    KINDS[task.is_backward],
                )
                for task in tasks
            )
            for stage, tasks in enumerate(ran.orders)
        )
    )
    starts, _ = start_times(pipelines, schedule)
    spans = []
    for stage, (tasks, begun, times) in enumerate(zip(schedule.stages, starts, ran.times, strict=True)):
        for task, begin, (start, end) in zip(tasks, begun, times, strict=True):
            call = calls[MODELS.index(task.model)]
            expected = (begin, begin + pipelines.seconds(task, stage)) if ran.shape.is_measured else None
            kind: Literal["forward", "backward"] = "backward" if task.kind == "backward" else "forward"
            spans.append(StageSpan(call, kind, task.micro_batch, ran.ranks[stage], start, end, step, expected))
    return tuple(spans)
