"""`FusedPipelines`: two models' training pipelines on the same stages. `FusedSchedule`: the order of their tasks.

Model A runs forwards from the first stage to the last, model B from the last to the first. The model with fewer stages
has several copies, each on a block of neighbouring stages. Every copy runs its own micro-batches: `micro_batches`
counts those of one copy, not of all copies together. (With 8 and 4 stages, 16 and 8 micro-batches and forwards of 5
and 4, 1F1B takes (16 + 7) * 15 + (8 + 3) * 12 = 477, as published, only if each of the two copies of B runs 8.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...common.errors import PlanError


MODELS = ("A", "B")
KINDS = ("forward", "backward")
Array = NDArray[np.float64]


class Task(NamedTuple):
    """A forward or backward of one micro-batch on one stage.

    Args:
        model: `A` or `B`.
        copy: number of the model's pipeline, counted from the first stage.
        micro_batch: number within the copy.
        kind: `forward` or `backward`.
    """

    model: str
    copy: int
    micro_batch: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.model} copy {self.copy} micro-batch {self.micro_batch}"


@dataclass(frozen=True, eq=False)
class Pipeline:
    """One model's pipeline and its copies.

    Args:
        forward, backward: seconds (or any unit of time). Shape `(copies, micro_batches, stages)`, with the stages in
            the order of the model's forward.
        memory: activation memory of a micro-batch on a stage, held from the beginning of its forward to the end of its
            backward. Same shape, any unit.

    Raises:
        PlanError: shapes differ or are empty, or a value is negative or not finite.
    """

    forward: Array
    backward: Array
    memory: Array

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "memory"):
            values = np.array(getattr(self, name), np.float64)
            if values.ndim != 3 or not values.size or values.shape != np.shape(self.forward):
                raise PlanError(
                    f"{name} has shape {values.shape}; write (copies, micro_batches, stages) for all three."
                )
            if not np.isfinite(values).all() or (values < 0).any():
                raise PlanError(f"{name} has a value that is negative or not finite.")
            values.flags.writeable = False
            object.__setattr__(self, name, values)

    @classmethod
    def of(
        cls,
        stages: int,
        micro_batches: int,
        forward: ArrayLike,
        memory: ArrayLike,
        backward: ArrayLike | None = None,
        copies: int = 1,
    ) -> Pipeline:
        """A pipeline whose times and memory are broadcast to `(copies, micro_batches, stages)`.

        Args:
            backward: *optional*, defaults to twice `forward`.
        """
        if min(stages, micro_batches, copies) < 1:
            raise PlanError(f"{stages} stages, {micro_batches} micro-batches, {copies} copies: all must be at least 1.")
        shape = (copies, micro_batches, stages)
        twice = 2 * np.asarray(forward, np.float64)
        arrays = (forward, twice if backward is None else backward, memory)
        return cls(*(np.broadcast_to(np.asarray(values, np.float64), shape) for values in arrays))

    @property
    def copies(self) -> int:
        return int(self.forward.shape[0])

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one copy."""
        return int(self.forward.shape[1])

    @property
    def stages(self) -> int:
        return int(self.forward.shape[2])


@dataclass(frozen=True, eq=False)
class FusedPipelines:
    """Two models' pipelines on the same stages.

    Args:
        a: the model whose forwards run from the first stage to the last.
        b: the model whose forwards run from the last stage of a copy's block to its first.
        memory_limit: *optional*, largest activation memory on each stage, in the unit of `Pipeline.memory`.

    Raises:
        PlanError: the copies do not cover the same stages, no pipeline has all stages, or a micro-batch alone exceeds
            the limit.
    """

    a: Pipeline
    b: Pipeline
    memory_limit: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        a, b = self.a, self.b
        if a.stages * a.copies != b.stages * b.copies or min(a.copies, b.copies) != 1:
            raise PlanError(
                f"A has {a.copies} x {a.stages} stages and B {b.copies} x {b.stages}: one of them must have one copy, "
                "and the other as many as cover the same stages."
            )
        if self.memory_limit is None:
            return
        if len(self.memory_limit) != self.stages:
            raise PlanError(f"memory_limit has {len(self.memory_limit)} values for {self.stages} stages.")
        for stage, limit in enumerate(self.memory_limit):
            needed = max(
                float(self.pipeline(model).memory[copy, :, position].max())
                for model in MODELS
                for copy, position in [self.own_stage(model, stage)]
            )
            if not needed <= limit:
                raise PlanError(f"One micro-batch needs {needed:g} on stage {stage}, more than its limit of {limit:g}.")

    @classmethod
    def uniform(
        cls,
        stages: tuple[int, int],
        micro_batches: tuple[int, int],
        forward: tuple[float, float],
        memory: tuple[float, float],
        memory_limit: tuple[float, ...] | None = None,
    ) -> FusedPipelines:
        """Pipelines with the same times on every stage and for every micro-batch, from values of A and B. A backward
        takes twice as long as a forward."""
        if min(stages) < 1 or max(stages) % min(stages):
            raise PlanError(f"{stages[0]} and {stages[1]} stages: one number must divide the other.")
        pipelines = [
            Pipeline.of(length, count, seconds, held, copies=max(stages) // length)
            for length, count, seconds, held in zip(stages, micro_batches, forward, memory, strict=True)
        ]
        return cls(pipelines[0], pipelines[1], memory_limit)

    @property
    def stages(self) -> int:
        return self.a.stages * self.a.copies

    def pipeline(self, model: str) -> Pipeline:
        return self.a if model == "A" else self.b

    def own_stage(self, model: str, stage: int) -> tuple[int, int]:
        """The copy of a model that a stage runs, and the number of the stage in this copy's forward."""
        length = self.pipeline(model).stages
        copy, position = divmod(stage, length)
        return copy, position if model == "A" else length - 1 - position

    def seconds(self, task: Task, stage: int) -> float:
        """Duration of a task on one of its stages, in the unit of `Pipeline.forward`."""
        pipeline = self.pipeline(task.model)
        times = pipeline.forward if task.kind == "forward" else pipeline.backward
        return float(times[task.copy, task.micro_batch, self.own_stage(task.model, stage)[1]])

    def route(self, model: str, copy: int) -> range:
        """The stages that a forward of a copy runs through, in order."""
        length = self.pipeline(model).stages
        block = range(copy * length, (copy + 1) * length)
        return block if model == "A" else block[::-1]


@dataclass(frozen=True)
class FusedSchedule:
    """The tasks of each stage in the order in which the stage runs them."""

    stages: tuple[tuple[Task, ...], ...]
