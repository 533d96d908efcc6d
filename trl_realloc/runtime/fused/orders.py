"""`FusedOrders`: finds the order in which two models that train together run their micro-batches.

The search is in `planner/fused/schedule_search`; `engines/training/fused_training` runs the order.
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


MIN_EFFORT, MAX_EFFORT = 5_000, 100_000  # number of tasks that a search places
WORTH = 0.05  # maximum search time, as a share of the time that an order can save
TASKS_PER_SECOND = 1e6
MAX_KEPT = 256  # number of cached orders
ROUNDING_STEPS = 32  # times and memory are rounded to this fraction of the largest, so that cached orders are reused


class FusedOrders:
    """Finds orders, and caches schedules by their rounded times.

    Attributes:
        latest: times and schedule of the latest mini-batch; `None` before the first.
    """

    def __init__(self) -> None:
        self.latest: tuple[FusedPipelines, FusedSchedule] | None = None
        self._kept: OrderedDict[Hashable, FusedSchedule] = OrderedDict()

    def compile(self) -> None:
        """Compile the search, which takes about 10 s if its machine code is not cached on disk."""
        compile_search()

    def __call__(self, shape: FusedShape) -> Orders:
        """The tasks of each stage."""
        pipelines = pipelines_of(shape)
        rounded, unit = _rounded(pipelines)
        arrays = [(p.forward, p.backward, p.memory) for p in (rounded.a, rounded.b)]
        key = tuple((array.shape, array.tobytes()) for model_arrays in arrays for array in model_arrays)
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
    """(pipelines, unit of time): times and memory are rounded up to whole numbers, and a memory limit is added."""
    pair = exact.a, exact.b
    unit = max(float(array.max()) for p in pair for array in (p.forward, p.backward)) / ROUNDING_STEPS or 1.0
    part = max(float(p.memory.max()) for p in pair) / ROUNDING_STEPS or 1.0
    a, b = (Pipeline(np.ceil(p.forward / unit), np.ceil(p.backward / unit), np.ceil(p.memory / part)) for p in pair)
    return FusedPipelines(a, b, (memory_limit(FusedPipelines(a, b)),) * exact.stages), unit
