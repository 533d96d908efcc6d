"""What a person sees of two calls that train together: lists, tables, pictures and reports."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from click.testing import CliRunner
from llamas import pricing, specs, work

from trl_realloc.cli.main import commands
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.fused import joined, parted
from trl_realloc.plan.spans import Span
from trl_realloc.plan.timeline import Timeline
from trl_realloc.planner.fused.check import check
from trl_realloc.planner.fused.lists import MAX_TASKS, example, schedule_timeline, stage_lists, text_of
from trl_realloc.planner.search.problem import estimate_plan
from trl_realloc.planner.search.show import draw_estimate


PLAN = Path(__file__).parents[2] / "recipes" / "plans" / "fused-4.yaml"
PAIR = ("actor.train", "critic.train")


def plan() -> ExecutionPlan:
    return ExecutionPlan.load(PLAN)


def test_each_stage_lists_the_tasks_of_both_models_in_the_schedules_order() -> None:
    found = example(plan())
    stages = stage_lists(plan(), found)
    assert [stage.devices for stage in stages] == ["0", "1", "2", "3"]
    assert [stage.holds for stage in stages] == [(1, 2), (2, 1), (3, 2), (4, 1)]
    for stage in stages:
        tasks = stage.tasks.split()
        counts = {"A": 4, "a": 4, "B": 2, "b": 2}
        assert sorted(tasks) == sorted(f"{m}{n}" for m, count in counts.items() for n in range(1, count + 1))
        assert all(tasks.index(f"{m}{n}") < tasks.index(f"{m.lower()}{n}") for m in "AB" for n in (1, 2))
        assert 0.5 < stage.busy <= 1.0


def test_a_stage_with_many_tasks_says_how_many_are_left_out() -> None:
    _, schedule = example(plan())
    stages = [stage * 5 for stage in schedule.stages]
    assert text_of(stages[0]).endswith(f" and {len(stages[0]) - MAX_TASKS} more")


def test_lines_of_several_replicas_and_tensor_ranks_name_all_their_devices() -> None:
    base = plan()
    wide = {name: replace(base[name].strategy, dp=1, tp=2, pp=2) for name in PAIR}
    calls = {name: replace(base[name], strategy=strategy) for name, strategy in wide.items()}
    calls["critic.forward"] = calls["critic.train"]
    changed = replace(base, assignments={**base.assignments, **calls})
    assert [stage.devices for stage in stage_lists(changed, example(changed))] == ["0-1", "2-3"]
    twice = {name: replace(base[name], strategy=replace(base[name].strategy, dp=2, tp=1, pp=2)) for name in PAIR}
    changed = replace(base, assignments={**base.assignments, **twice})
    assert [stage.devices for stage in stage_lists(changed, example(changed))] == ["0, 2", "1, 3"]


def test_the_drawn_schedule_has_every_task_at_its_time_and_none_over_another() -> None:
    found = example(plan())
    timeline = schedule_timeline(plan(), found)
    assert max(span.end for span in timeline.spans) == check(*found).makespan
    assert set(timeline.calls) == {f"{call}, {kind}" for call in PAIR for kind in ("forward", "backward")}
    for device in timeline.devices:
        spans = sorted((span for span in timeline.spans if span.device == device), key=lambda span: span.start)
        assert len(spans) == 12
        assert all(other.start >= one.end - 1e-9 for one, other in pairwise(spans))


def test_a_plan_that_fuses_is_shown_stage_by_stage() -> None:
    shown = CliRunner().invoke(commands, ["show", str(PLAN)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "actor.train (A) and critic.train (B) in fused pipelines" in shown.output
    assert "A run chooses the order by its times" in " ".join(shown.output.split())


def test_an_estimated_schedule_has_a_picture_of_its_own(tmp_path: Path) -> None:
    prices = replace(pricing(1, 4, work()), memory=None)
    priced = estimate_plan(plan(), specs(1, 1), prices)
    assert [path.name for path in draw_estimate(priced, tmp_path / "plan")] == [
        "plan.png",
        "plan.trace.json",
        "plan.schedule.png",
    ]
    assert (tmp_path / "plan.schedule.png").stat().st_size > 1000


def test_calls_that_train_together_are_one_bar_and_others_stay() -> None:
    """As a run measures them: both begin at once, the second's end is read a moment later."""
    spans = [Span("critic.forward", 0, 0.0, 1.0, 0), Span(PAIR[0], 0, 1.0, 3.0, 0), Span(PAIR[1], 0, 1.0, 3.001, 0)]
    apart = [Span(PAIR[0], 0, 4.0, 5.0, 1), Span(PAIR[1], 0, 5.0, 6.0, 1)]
    timeline = Timeline([*spans, *apart])
    one = Span(joined(PAIR), 0, 1.0, 3.001, 0)
    assert set(timeline.joined(PAIR).spans) == {spans[0], one, *apart}
    assert set(timeline.joined(()).spans) == set(timeline.spans)
    assert parted(joined(PAIR)) == PAIR
