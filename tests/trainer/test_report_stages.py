"""The report of a run in which two calls trained together, stage by stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_report import rows

from trl_realloc.cli.main import main
from trl_realloc.common.errors import PlanError
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.stage_spans import MiniBatchStages, StageSpan
from trl_realloc.plan.timeline import Span, Timeline
from trl_realloc.planner.fused.check import check
from trl_realloc.planner.fused.lists import example, measured_lists, schedule_timeline, stage_lists
from trl_realloc.planner.fused.pipelines import MODELS
from trl_realloc.trainer.report.run_record import save_record
from trl_realloc.trainer.report.run_report import report_run
from trl_realloc.trainer.report.stage_part import stages_of


PLAN = Path(__file__).parents[2] / "recipes" / "plans" / "fused-4.yaml"
PAIR = ("actor.train", "critic.train")


def stages(slower: float = 1.25, *, measured: bool = True) -> MiniBatchStages:
    """The example's schedule at some time of day, in which everything took `slower` times as long."""
    pipelines, schedule = example(ExecutionPlan.load(PLAN))
    starts = check(pipelines, schedule).starts
    return MiniBatchStages(
        StageSpan(
            PAIR[MODELS.index(task.model)],
            "forward" if task.kind == "forward" else "backward",
            task.micro_batch,
            stage,
            1e9 + slower * start,
            1e9 + slower * (start + pipelines.seconds(task, stage)),
            11,
            (start, start + pipelines.seconds(task, stage)) if measured else None,
        )
        for stage, tasks in enumerate(schedule.stages)
        for task, start in zip(tasks, starts[stage], strict=True)
    )


@pytest.fixture
def run(tmp_path: Path) -> Callable[[MiniBatchStages], Path]:
    """A function that makes the folder of a run with these stages."""

    def made(ran: MiniBatchStages) -> Path:
        plan = ExecutionPlan.load(PLAN)
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows([0.1] * 12)))
        spans = [Span(call, device, 1e9 - 5.0, 1e9 + 100.0, 11) for call in PAIR for device in range(4)]
        save_record(plan, Timeline(spans), None, tmp_path, stages=ran.spans)
        return tmp_path

    return made


def test_the_saved_stages_of_a_mini_batch_are_read_as_they_were(tmp_path: Path) -> None:
    for saved in (stages(), stages(measured=False)):
        saved.save(tmp_path / "stages.json")
        assert MiniBatchStages.load(tmp_path / "stages.json") == saved


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"end": -1.0}, r"\[0\] is .*ends \(-1.0 s\) before 1000000000.0 s"),
        ({"kind": "sideways"}, r"\[0\].kind is 'sideways'"),
        ({"start": float("nan")}, r"\[0\].start is nan"),
        ({"lane": 1}, r"there is no key \[0\].lane"),
        ({"call": "actor.generate"}, "has tasks of other calls or devices"),
        ({"device": 4}, "has tasks of other calls or devices"),
    ],
)
def test_a_damaged_record_of_stages_is_refused(
    changed: dict[str, object], sentence: str, run: Callable[[MiniBatchStages], Path]
) -> None:
    folder = run(stages())
    content = json.loads((folder / "stages.json").read_text())
    content[0] |= changed
    (folder / "stages.json").write_text(json.dumps(content))
    with pytest.raises(PlanError, match=sentence):
        stages_of(folder)


def test_the_measured_lists_and_times_of_a_run_that_keeps_to_its_schedule_are_the_schedules() -> None:
    plan = ExecutionPlan.load(PLAN)
    found, ran = example(plan), stages(1.0)
    for measured, planned in zip(measured_lists(plan, ran), stage_lists(plan, found), strict=True):
        assert replace(measured, busy=pytest.approx(planned.busy)) == planned
    drawn = {(span.call, span.device, span.start, span.end) for span in schedule_timeline(plan, found).spans}
    assert ran.expected is not None
    assert {(span.call, span.device, span.start, span.end) for span in ran.expected.spans} == drawn
    assert ran.measured.seconds_per_step == pytest.approx(check(*found).makespan)


def test_the_report_draws_the_stages_and_compares_them_with_the_schedule(
    run: Callable[[MiniBatchStages], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(stages(1.25))
    assert main(["report", str(folder)]) == 0
    promised = check(*example(ExecutionPlan.load(PLAN))).makespan
    sentence = (
        f"The last mini-batch of update 12 took {1.25 * promised:.3f} s from its first forward to its last backward; "
        f"by its schedule, which takes messages to be free, {promised:.3f} s were expected (+25%)."
    )
    assert sentence in " ".join(capsys.readouterr().out.split())
    text = (folder / "report.md").read_text()
    assert sentence in text and "| 0 | 1, 2 | A1 " in text
    for name in ("stages.png", "stages.expected.png"):
        assert f"({name})" in text and (folder / name).stat().st_size > 3000
    names = [event["name"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]]
    assert names.count("critic.train, backward") == 4 * 2


def test_a_schedule_by_estimates_is_reported_without_promised_seconds(run: Callable[[MiniBatchStages], Path]) -> None:
    folder = run(stages(measured=False))
    text = report_run(folder).read_text()
    assert "its schedule was found by estimates" in text and "stages.png" in text
    assert "stages.expected.png" not in text and not (folder / "stages.expected.png").exists()


def test_stages_of_an_earlier_run_in_the_folder_are_not_reported(run: Callable[[MiniBatchStages], Path]) -> None:
    folder = run(stages())
    run(MiniBatchStages(()))
    assert not (folder / "stages.json").exists()
    assert "Stages of the fused pipelines" not in report_run(folder).read_text()
