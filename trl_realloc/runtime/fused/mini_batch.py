"""A mini-batch of two models that train together, in the planner's terms: its pipelines and the order of its tasks.

`orders` chooses the order, `engines/training/fused_training` runs it.
"""

from __future__ import annotations

import numpy as np

from ...engines.training.stage_figures import FusedShape
from ...engines.training.stage_messages import StageTask
from ...engines.training.stage_run import Orders
from ...planner.fused.pipelines import MODELS, Array, FusedPipelines, FusedSchedule, Pipeline, Task


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
