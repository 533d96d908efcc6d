"""The part of a run's report on two calls that train together: the tasks of each stage in one mini-batch, and their
measured and scheduled duration.

`runtime/fused/mini_batch` records them. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from ...common.errors import PlanError
from ...common.files import exists
from ...plan.execution_plan import ExecutionPlan
from ...plan.picture import draw_timeline
from ...plan.stage_spans import MiniBatchStages
from ...planner.fused.lists import task_names
from ...planner.search.show import measured_schedule_table
from .estimate_part import markdown


STAGES_FILE = "stages.json"


def stages_of(folder: Path) -> tuple[ExecutionPlan, MiniBatchStages] | None:
    """The plan of a run and the stages of its last mini-batch; `None` if the plan fuses no calls, or nothing was
    recorded.

    Raises:
        PlanError: the file of the stages is damaged, or belongs to another plan.
    """
    file, plan_file = folder / STAGES_FILE, folder / "plan.yaml"
    if not exists(file) or not exists(plan_file):
        return None
    try:
        plan = ExecutionPlan.load(plan_file)
    except PlanError:  # the report shows the file's text instead
        return None
    if not plan.fused:
        return None
    ran, mesh = MiniBatchStages.load(file), plan.mesh(plan.fused[0])
    if any(span.call not in plan.fused or span.device not in mesh for span in ran.spans):
        raise PlanError(f"{file} has tasks of other calls or devices than those that {plan_file} fuses.")
    return (plan, ran) if ran.spans else None


def makespans(ran: MiniBatchStages) -> str:
    """A sentence with the measured and the expected seconds of the mini-batch."""
    update, measured_s = ran.measured.steps[0] + 1, ran.measured.seconds_per_step
    last = f"The last mini-batch of update {update} took {measured_s:.3f} s from its first forward to its last backward"
    if ran.expected is None:
        return f"{last}; its schedule was found by estimates, because the times of the stages were not measured."
    expected_s = ran.expected.seconds_per_step
    ratio = f" ({measured_s / expected_s - 1:+.0%})" if expected_s else ""
    return f"{last}; by its schedule, which takes messages to be free, {expected_s:.3f} s were expected{ratio}."


def stage_lines(folder: Path, plan: ExecutionPlan, ran: MiniBatchStages) -> list[str]:
    """Report lines. Writes the pictures `stages.png` and, for the schedule, `stages.expected.png`."""
    table, names = measured_schedule_table(plan, ran), task_names(plan)
    seconds = max(timeline.seconds_per_step for timeline in (ran.measured, ran.expected) if timeline is not None)
    draw_timeline(ran.measured, folder / "stages.png", title="a mini-batch, measured", calls=names, seconds=seconds)
    pictures = ["![a mini-batch, stages down, time across](stages.png)", ""]
    if ran.expected is not None:
        picture, title = folder / "stages.expected.png", "a mini-batch, by its schedule"
        draw_timeline(ran.expected, picture, title=title, calls=names, seconds=seconds)
        pictures += ["As the schedule had it, on the same scale:", "", "![the schedule](stages.expected.png)", ""]
    return [
        "### Stages of the fused pipelines",
        "",
        f"{makespans(ran)} {' is A, '.join(plan.fused)} is B. {table.caption}",
        "",
        *markdown(table),
        "",
        *pictures,
    ]
