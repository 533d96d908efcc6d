"""A fused schedule for display: the list of each stage as text, and its times as a `Timeline`.

A run's schedule depends on the times of its stages (`runtime/fused/orders`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...plan.assignment import Assignment
from ...plan.execution_plan import ExecutionPlan
from ...plan.spans import Span
from ...plan.timeline import Timeline
from .check import check
from .pipelines import KINDS, MODELS, FusedPipelines, FusedSchedule, Task


Found = tuple[FusedPipelines, FusedSchedule]

EXAMPLE_EFFORT = 200_000  # tasks that the search for an example places
MAX_TASKS = 48  # largest number of tasks of a stage that are shown


@dataclass(frozen=True)
class StageList:
    """Tasks of one pipeline stage, as text.

    Args:
        devices: devices of the stage in all data-parallel pipelines, like `0, 2` or `0-1`.
        holds: number of the stage in each model's pipeline, from 1.
        tasks: tasks in order: `A1` is the forward of the first call's first micro-batch, `a1` its backward; `B1` and
            `b1` are those of the second call.
        busy: share of the time in which the stage computes.
    """

    devices: str
    holds: tuple[int, int]
    tasks: str
    busy: float


def example(plan: ExecutionPlan) -> Found:
    """An example schedule for a plan that fuses two calls: each pipeline has as many micro-batches as stages, all
    stages are alike, and a backward takes twice as long as a forward."""
    from .schedule_search import search  # importing numba takes a second

    assert plan.fused, "the plan fuses two calls"
    a, b = (plan[name].strategy.pp for name in plan.fused)
    pipelines = FusedPipelines.uniform((a, b), (a, b), (1.0, 1.0), (1.0, 1.0))
    return pipelines, search(pipelines, effort=EXAMPLE_EFFORT).schedule


def stage_lists(plan: ExecutionPlan, found: Found) -> list[StageList]:
    """A list for each stage of a pipeline. All data-parallel pipelines of a mesh have the same lists."""
    pipelines, schedule = found
    simulated, lists = check(pipelines, schedule), []
    for stage, tasks in enumerate(schedule.stages):
        numbers = tuple(pipelines.own_stage(model, stage)[1] + 1 for model in MODELS)
        work = sum(pipelines.seconds(task, stage) for task in tasks)
        busy = work / simulated.makespan if simulated.makespan else 0.0
        lists.append(StageList(_devices(plan, pipelines, stage), (numbers[0], numbers[1]), text_of(tasks), busy))
    return lists


def schedule_timeline(plan: ExecutionPlan, found: Found) -> Timeline:
    """The tasks of one mini-batch on the devices of the first data-parallel pipeline."""
    pipelines, schedule = found
    starts, spans = check(pipelines, schedule).starts, []
    calls = dict(zip(MODELS, plan.fused, strict=False))
    for stage, (tasks, begun) in enumerate(zip(schedule.stages, starts, strict=True)):
        for task, start in zip(tasks, begun, strict=True):
            end = start + pipelines.seconds(task, stage)
            name = task_name(calls[task.model], task.kind)
            spans += [Span(name, device, start, end, 0) for device in _ranks(plan, stage)]
    return Timeline(spans)


def task_name(call: str, kind: str) -> str:
    """Name of a call's forwards or backwards in a timeline."""
    return f"{call}, {kind}"


def task_names(plan: ExecutionPlan) -> tuple[str, ...]:
    """Names of the tasks in a `schedule_timeline`; their order is that of their colours."""
    return tuple(task_name(call, kind) for call in plan.fused for kind in KINDS)


def _home(plan: ExecutionPlan) -> Assignment:
    """Assignment of the first fused call (both share mesh and tp)."""
    assert plan.fused, "the plan fuses two calls"
    return plan[plan.fused[0]]


def _ranks(plan: ExecutionPlan, stage: int) -> range:
    """The devices of a stage in the first data-parallel pipeline."""
    home = _home(plan)
    first, tp = home.mesh.first, home.strategy.tp
    return range(first + stage * tp, first + (stage + 1) * tp)


def _devices(plan: ExecutionPlan, pipelines: FusedPipelines, stage: int) -> str:
    """Devices of a stage in all data-parallel pipelines, as text."""
    home = _home(plan)
    tp, texts = home.strategy.tp, []
    for line in range(home.mesh.size // (pipelines.stages * tp)):
        texts.append(_range(_ranks(plan, stage).start + line * pipelines.stages * tp, tp))
    return ", ".join(texts)


def _range(first: int, tp: int) -> str:
    return f"{first}" if tp == 1 else f"{first}-{first + tp - 1}"


def text_of(tasks: tuple[Task, ...]) -> str:
    """The text of `StageList.tasks`."""
    shown = [
        f"{task.model if task.kind == 'forward' else task.model.lower()}{task.micro_batch + 1}"
        for task in tasks[:MAX_TASKS]
    ]
    more = len(tasks) - len(shown)
    return " ".join(shown) + (f" and {more} more" if more > 0 else "")
