"""`FusedOrders`: the order in which two models that train together run their micro-batches, by the planner's search.

The search is in `planner/fused/schedule_search`. Running the order is in `engines/training/fused_training`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

from ...engines.training.stage_figures import FusedShape
from ...engines.training.stage_run import Orders
from ...planner.fused.check import lower_bound, memory_limit, serial_time
from ...planner.fused.pipelines import FusedPipelines, FusedSchedule, Pipeline
from ...planner.fused.schedule_search import compile_search, search
from .mini_batch import pipelines_of, tasks_of


MIN_EFFORT, MAX_EFFORT = 5_000, 100_000  # tasks that a search places, about a million per second
WORTH = 0.05  # of the seconds that an order can save, the most for its search
TASKS_PER_SECOND = 1e6
MAX_KEPT = 256  # orders that are kept for later mini-batches
ROUNDING_STEPS = 32  # times and memory are rounded to such parts of the largest, so that orders can be used again


class FusedOrders:
    """Finds orders, and keeps the latest schedules by the rounded times that they were found for.

    Attributes:
        latest: the times of the latest mini-batch, and its schedule; `None` before the first.
    """

    def __init__(self) -> None:
        self.latest: tuple[FusedPipelines, FusedSchedule] | None = None
        self._kept: OrderedDict[Hashable, FusedSchedule] = OrderedDict()

    def compile(self) -> None:
        """Compile the search, which takes some 10 s if its machine code is not on the disk."""
        compile_search()

    def __call__(self, shape: FusedShape) -> Orders:
        """The tasks of each stage."""
        pipelines = pipelines_of(shape)
        rounded, unit = _rounded(pipelines)
        arrays = [(p.forward, p.backward, p.memory) for p in (rounded.a, rounded.b)]
        key = tuple((array.shape, array.tobytes()) for of_model in arrays for array in of_model)
        if key not in self._kept:
            saved = (serial_time(rounded) - lower_bound(rounded)) * unit if shape.is_measured else 0.0
            effort = int(np.clip(WORTH * saved * TASKS_PER_SECOND, MIN_EFFORT, MAX_EFFORT))
            self._kept[key] = search(rounded, effort=effort).schedule
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        self.latest = pipelines, self._kept[key]
        return tasks_of(self._kept[key], shape)


def _rounded(exact: FusedPipelines) -> tuple[FusedPipelines, float]:
    """The same with times and memory rounded up to whole numbers, and with a limit of memory; and the unit of its
    times."""
    pair = exact.a, exact.b
    unit = max(float(array.max()) for p in pair for array in (p.forward, p.backward)) / ROUNDING_STEPS or 1.0
    part = max(float(p.memory.max()) for p in pair) / ROUNDING_STEPS or 1.0
    a, b = (Pipeline(np.ceil(p.forward / unit), np.ceil(p.backward / unit), np.ceil(p.memory / part)) for p in pair)
    return FusedPipelines(a, b, (memory_limit(FusedPipelines(a, b)),) * exact.stages), unit
