"""What a run did, for a person: the summary, the tables, the picture, and the recipes that people start from."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from llamas import pricing, specs, work
from trl import ModelConfig, TrlParser

from trl_realloc import GRPOConfig, PPOConfig, RLOOConfig
from trl_realloc.cli.main import main
from trl_realloc.cli.train import RunArguments
from trl_realloc.common.errors import PlanError
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten, separate
from trl_realloc.plan.spans import LOOP, Span, loop_spans
from trl_realloc.plan.staleness import Staleness
from trl_realloc.plan.timeline import Timeline
from trl_realloc.planner.search.problem import estimate_plan
from trl_realloc.trainer.report.callbacks import MetricsWriter
from trl_realloc.trainer.report.logged_updates import load_metrics, logged_updates
from trl_realloc.trainer.report.run_files import RunFiles
from trl_realloc.trainer.report.run_record import save_record
from trl_realloc.trainer.report.run_report import print_summary, report_run, two_updates
from trl_realloc.trainer.report.run_tables import call_times, reward_summary


ROOT = Path(__file__).parents[2]


def rows(scores: list[float]) -> list[dict[str, float]]:
    times = {"time/actor.generate": 1.0, "time/actor.train": 2.0, "time/step": 4.0, "tokens/s": 100.0}
    return [{"step": at, "objective/scores": score, "episode": 8.0 * at, **times} for at, score in enumerate(scores, 1)]


def test_a_rise_is_clear_beyond_three_standard_errors() -> None:
    flat = [1.0, 1.1, 0.9, 1.0, 1.05]
    assert not reward_summary(rows(flat * 2)).rose_clearly
    assert reward_summary(rows([*flat, *(score + 1 for score in flat)])).rose_clearly
    assert not reward_summary(rows([*(score + 1 for score in flat), *flat])).rose_clearly


@given(st.lists(st.floats(-10, 10), min_size=10, max_size=40))
def test_the_summary_is_of_the_first_and_last_updates(scores: list[float]) -> None:
    summary = reward_summary(rows(scores))
    assert summary.first == pytest.approx(sum(scores[:5]) / 5, abs=1e-9)
    assert summary.last == pytest.approx(sum(scores[-5:]) / 5, abs=1e-9)
    variance = sum((x - summary.last) ** 2 for x in scores[-5:]) / 4
    assert summary.last_error == pytest.approx(math.sqrt(variance / 5), abs=1e-9)


@pytest.mark.parametrize("updates", range(2, 10))
def test_the_halves_of_a_short_run_are_compared_and_no_rise_of_it_is_called_clear(tmp_path: Path, updates: int) -> None:
    summary = reward_summary(rows([float(at) for at in range(updates)]))
    assert summary.window == updates // 2 and summary.rise > 0 and not summary.rose_clearly
    text = report_run(RunFiles(tmp_path, rows([float(at) for at in range(updates)]))).read_text()
    assert "too few updates to tell" in text and "nan" not in text


@pytest.mark.parametrize("logs", [0, 1])
def test_a_run_with_a_timeline_and_fewer_than_two_logs_is_reported_without_a_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logs: int
) -> None:
    plan = flatten(Cluster(1, 1))
    spans = [
        Span(call, 0, 10.0 * step + at, 10.0 * step + at + 1, step)
        for step in range(3)
        for at, call in enumerate(plan.order)
    ]
    spans += [
        Span(f"{plan.order[-1]} -> {plan.order[0]}", d, 10.0 * n + 6, 10.0 * n + 8, n, bytes=5_000_000)
        for n in range(3)
        for d in (0, 1)
    ]
    save_record(plan, Timeline(spans), None, tmp_path, facts={"algorithm": "PPO"})
    assert {"report.md", "timeline.png"} <= {path.name for path in tmp_path.iterdir()}, "without the command"
    if logs:
        (tmp_path / "metrics.jsonl").write_text(json.dumps(rows([0.5])[0]))
    assert main(["report", str(tmp_path)]) == 0
    printed, text = " ".join(capsys.readouterr().out.split()), (tmp_path / "report.md").read_text()
    for sentence in ("curve of the reward and metrics of the first and the last updates are left out", "5.0"):
        assert sentence in text and sentence in printed
    assert "3 updates." in text and "| algorithm | PPO |" in text and "| actor.train | 1.000 |" in text
    assert "| actor.generate | 5.0 | 2.000 |" in text and "# Waits" in text and "name: flatten" in text
    assert "timeline.png" in text and "## Reward" not in text and not (tmp_path / "reward.png").exists()


def test_one_log_without_a_timeline_is_refused_and_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows([0.5])[0]))
    with pytest.raises(PlanError, match="1 log of an update, where a report compares 2; train longer"):
        report_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_report_has_the_reward_the_times_the_plan_and_completions(tmp_path: Path) -> None:
    made = rows([at / 10 for at in range(20)])
    before = [{"query": "a | b", "model response": "x<eos>", "score": 1.0}]
    text = report_run(
        RunFiles(tmp_path, made, None, "name: flatten\n", {}, {"before": before, "after": before})
    ).read_text()
    assert "![" in text and (tmp_path / "reward.png").stat().st_size > 5000
    assert "| actor.train | 2.000 | 50% |" in text and "name: flatten" in text and "a \\| b" in text
    assert call_times(made) == {"actor.generate": (1.0, 0.25), "actor.train": (2.0, 0.5)}


def test_times_that_first_appear_after_a_change_of_the_plan_are_in_the_table() -> None:
    made = [{"time/step": 4.0, "time/actor.train": 2.0}, {"time/step": 4.0, "time/critic.train": 1.0}]
    assert call_times(made) == {"actor.train": (1.0, 0.25), "critic.train": (0.5, 0.125)}
    compiling = {"time/step": 40.0, "time/actor.train": 30.0, "time/reward/judge": 1.0}
    host = {"time/training_loop": 0.5, "time/reward/judge": 2.0, "time/tool/search": 1.0}
    times = call_times([compiling, *({**row, **host} for row in made)])
    assert list(times) == ["actor.train", "critic.train", "reward: judge", "tool: search", "training loop"]
    assert times["actor.train"] == (1.0, 0.25) and times["reward: judge"] == (2.0, 0.5)


def test_the_report_says_how_many_tokens_were_not_computed_again(tmp_path: Path) -> None:
    shared = {"shared_tokens/actor.train": 41_000.0}
    text = report_run(RunFiles(tmp_path, [{**row, **shared} for row in rows([0.1] * 10)])).read_text()
    assert "| actor.train | 2.000 | 50% | 41,000 |" in text and "| actor.generate | 1.000 | 25% |  |" in text


def test_the_report_says_what_threads_would_bring_to_tools_that_run_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = [Span(LOOP, 0, 10.0 * step, 10.0 * step + 10, step) for step in range(3)]
    for step in range(3):
        for name, seconds, threaded in (("search", 3.1, 0.5), ("ask", 2.0, 1.5), ("add", 0.5, 0.1), ("wait", 4.0, 0.0)):
            spans.append(Span(f"tool: {name}", 0, 10.0 * step, 10.0 * step + seconds / 2, step, threaded_s=threaded))
            spans.append(Span(f"tool: {name}", 0, 10.0 * step + 5, 10.0 * step + 5 + seconds / 2, step))
    run = RunFiles(tmp_path, [], Timeline(spans))
    text = report_run(run).read_text()
    line = "tool search: its calls one after the other took 31% of an update; tool_workers 8 would take about 5%"
    assert f"\n{line}.\n" in text and text.count("one after the other") == 1
    print_summary(run)
    assert line in " ".join(capsys.readouterr().out.split())


def test_a_runs_report_is_made_again_from_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows([0.1] * 12)))
    (tmp_path / "run.json").write_text(json.dumps({"algorithm": "GRPO", "script": "a | b.py"}))
    flatten(Cluster(1, 1)).save(tmp_path / "plan.yaml")
    order = list(enumerate(flatten(Cluster(1, 1)).order))
    starts = [(call, 4.5 * step + at / 2, step) for step in range(12) for at, call in order]
    spans = [Span(call, 0, start, start + 0.5 + 9 * (step == 0), step) for call, start, step in starts]
    for step in range(12):  # the first update compiles, and is left out
        spans.append(Span("reward: judge", 0, 4.5 * step + 3, 4.5 * step + 3.6, step))
        spans += loop_spans(spans[-1:], 4.5 * step + 3, 4.5 * step + 4, step)[1:]  # after the function
        spans += [Span(LOOP, 0, 4.5 * step, 4.5 * step, step)]
    Timeline(spans).save(tmp_path / "timeline.json")
    assert main(["report", str(tmp_path)]) == 0
    assert "written to" in capsys.readouterr().out
    text = (tmp_path / "report.md").read_text()
    assert text.index("| run |") < text.index("| score | 0.1 | 0.1 |") < text.index("## Reward")
    assert "| algorithm | GRPO |" in text and "| script | a \\| b.py |" in text and "| KL |" not in text
    assert text.index("```yaml\nname: flatten") > text.index("## Time by call") and "# An execution plan" not in text
    assert "timeline.png" in text and (tmp_path / "timeline.png").stat().st_size > 3000
    assert "| actor.train | 0.500 | 12% |" in text and "| reward: judge | 0.600 | 15% |" in text
    assert "| whole update | 4.000 | 100 tokens/s |" in text and "saving | 0.500 |" in text
    assert text.count("mean of updates 2-12, without the first, which compiles") == 1
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 1 + 12 * 9


def test_what_was_expected_stands_beside_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows([0.1] * 12)))
    measured = [Span("actor.generate", 0, 10.0 * step, 10.0 * step + 2.0, step) for step in range(3)]
    slow = Span("actor.generate", 0, 0.0, 8.0, 0)  # the first update warms up, and is left out
    Timeline([slow, *measured[1:]]).save(tmp_path / "timeline.json")
    Timeline([Span("actor.generate", 0, 0.0, 3.0, 1)]).save(tmp_path / "estimate.json")
    report = report_run(tmp_path).read_text()
    assert "| actor.generate | 3.000 s | 2.000 s | +50% |" in report
    assert "| iteration | 3.000 s | 2.000 s | +50% |" in report
    assert "estimate.png" in report
    assert (tmp_path / "estimate.png").is_file()
    Timeline([Span("actor.generate", 0, 0.0, 1.0, 1)]).save(tmp_path / "first_estimate.json")
    report = report_run(tmp_path).read_text()
    assert "| call | when chosen | error | corrected | measured | error |" in report
    assert "| actor.generate | 1.000 s | -50% | 3.000 s | 2.000 s | +50% |" in report
    assert "| iteration | 1.000 s | -50% | 3.000 s | 2.000 s | +50% |" in report


def test_predicted_seconds_of_a_run_that_generates_ahead_stand_beside_the_measured_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = replace(separate(Cluster(1, 2), generation_engine="vllm"), staleness=Staleness(1))
    costs = replace(pricing(1, 2, work(episodes=8, response_tokens=(60,), epochs=1)), memory=None)
    expected = estimate_plan(plan, specs(1, 1), costs)
    iteration = expected.seconds
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows([0.1] * 10)))
    twice = [replace(s, start=2 * s.start, end=2 * s.end) for s in expected.timeline.spans]  # so slow was the run
    save_record(plan, Timeline(twice), expected, tmp_path, facts={})
    report = report_run(tmp_path).read_text()
    lengths = costs.workload.lengths_text
    assert lengths.endswith("responses of 60") and f"| estimated for | {lengths} |" in report
    assert f"estimate for {lengths} against measurement" in " ".join(capsys.readouterr().err.split())
    row = re.search(r"\| iteration \| ([0-9.]+) s \| ([0-9.]+) s \|", report)
    assert row is not None
    assert float(row[1]) == pytest.approx(iteration, rel=0.05)
    assert float(row[2]) == pytest.approx(2 * iteration, rel=0.05), "and not the time from a batch's first token"
    save_record(plan, Timeline(twice), expected, tmp_path, of_update=False)
    assert "| iteration |" not in report_run(tmp_path).read_text()


def test_a_run_without_an_estimate_is_not_compared_with_that_of_an_earlier_run(tmp_path: Path) -> None:
    for file in ("run.json", "estimate.json", "first_estimate.json"):
        (tmp_path / file).write_text("{}")
    save_record(flatten(Cluster(1, 1)), Timeline([Span("actor.generate", 0, 0.0, 3.0, 1)]), None, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"plan.yaml", "timeline.json"}


def test_a_report_that_cannot_be_written_fails_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.md").mkdir()
    timeline = Timeline(Span("actor.generate", 0, 3.0 * n, 3.0 * n + 1, n) for n in range(3))
    save_record(flatten(Cluster(1, 1)), timeline, None, tmp_path)
    assert f"trl-realloc report {tmp_path} writes it again" in capsys.readouterr().err


def test_the_picture_of_a_run_that_generates_ahead_shows_what_is_generated_for_later_updates() -> None:
    spans = [
        span
        for step in range(6)
        for span in (
            Span("actor.generate", 1, 4.0 * step, 4.0 * step + 4, step),
            Span("actor.train", 0, 4.0 * step + 4, 4.0 * step + 8, step),
        )
    ]
    drawn = two_updates(Timeline(spans), versions=1)
    assert {(span.call, span.step) for span in drawn.spans if span.start < 20} == {
        ("actor.train", 3),
        ("actor.generate", 4),
    }
    for device in (0, 1):
        assert sum(span.seconds for span in drawn.spans if span.device == device) == 8.0, "no device is idle"
    assert two_updates(Timeline(spans), versions=0).steps == (4, 5)
    assert two_updates(Timeline(spans[:2]), versions=3).spans == tuple(spans[:2]), "a run as short as the staleness"


def test_an_empty_folder_is_refused_with_what_a_run_would_leave_in_it(tmp_path: Path) -> None:
    told = r"holds no timeline.json.* no logs of updates: no metrics.jsonl, and no trainer_s"
    with pytest.raises(PlanError, match=told):
        report_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 2


def test_a_run_without_a_metrics_file_is_reported_by_the_state_of_its_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = {"step": 10, "eval_objective/scores": 9.0}
    for step in (9, 12):  # by name the first is the newest
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = {"global_step": step, "log_history": [*rows([0.1] * step), evaluation]}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    assert main(["report", str(tmp_path)]) == 0
    assert "| actor.train | 2.000 | 50% |" in (tmp_path / "report.md").read_text()
    assert "12 updates, 96 episodes" in (tmp_path / "report.md").read_text()
    rewards = [{"step": at, "reward": at / 10, "step_time": 2.0, "kl": math.nan} for at in range(1, 12)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [*rewards, {"train_runtime": 1.0}]}))
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "11 updates." in text and "## Time by call" not in text and "## Plan" not in text
    older = {"global_step": 11, "log_history": rewards}  # the run was resumed after `save_state`
    (tmp_path / "trainer_state.json").write_text(json.dumps(older))
    assert len(logged_updates(tmp_path)) == 12
    without_plan_first = [*rewards, *rows([0.1] * 12)[11:]]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 12, "log_history": without_plan_first}))
    assert len(logged_updates(tmp_path)) == 12
    assert logged_updates(tmp_path / "absent") == []
    of_earlier_run = tmp_path / "metrics.jsonl"
    of_earlier_run.write_text(json.dumps(rows([0.1])[0]))
    assert len(logged_updates(tmp_path)) == 1
    os.utime(of_earlier_run, (0, 0))
    assert len(logged_updates(tmp_path)) == 12
    of_earlier_run.unlink()
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": 7}))
    assert main(["report", str(tmp_path)]) == 2
    assert "log_history is a list of logs, not 7" in capsys.readouterr().err


def test_metrics_are_written_once_per_step_also_after_resuming(tmp_path: Path) -> None:
    class State:
        is_world_process_zero = True
        global_step = 0

    writer, state = MetricsWriter(tmp_path / "run" / "metrics.jsonl"), State()
    for first, last in ((0, 4), (2, 6)):  # stopped at 4, resumed from 2
        state.global_step = first
        writer.on_train_begin(None, state, None)
        for step in range(first + 1, last + 1):
            state.global_step = step
            writer.on_log(None, state, None, logs={"objective/scores": step + first / 10})
    assert [row["objective/scores"] for row in load_metrics(writer.path)] == [1.0, 2.0, 3.2, 4.2, 5.2, 6.2]
    assert all(json.loads(line)["step"] for line in writer.path.read_text().splitlines())


def test_an_evaluation_before_any_training_is_written_into_a_new_folder(tmp_path: Path) -> None:
    writer, state = MetricsWriter(tmp_path / "run" / "metrics.jsonl"), SimpleNamespace(is_world_process_zero=True)
    state.global_step = 0
    writer.on_log(None, state, None, logs={"eval_objective/scores": 1.0})
    assert json.loads(writer.path.read_text()) == {"step": 0, "eval_objective/scores": 1.0}


def test_a_training_keeps_the_lines_of_an_evaluation_before_it_and_none_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "objective/scores": 9.0}\n', encoding="utf-8")
    writer, state = MetricsWriter(path), SimpleNamespace(is_world_process_zero=True, global_step=0)
    writer.on_log(None, state, None, logs={"eval_objective/scores": 1.0})
    for score in (2.0, 3.0):
        state.global_step = 0
        writer.on_train_begin(None, state, None)
        state.global_step = 1
        writer.on_log(None, state, None, logs={"objective/scores": score})
        writer.on_train_end(None, state, None)
        written = [json.loads(line) for line in path.read_text().splitlines()]
        before = [{"step": 0, "eval_objective/scores": 1.0}] if score == 2.0 else []
        assert written == [*before, {"step": 1, "objective/scores": score}]
        writer.on_log(None, state, None, logs={"eval_objective/scores": 4.0})  # of this policy, not of the next one


def test_a_run_is_resumed_whose_last_line_of_metrics_is_cut_off(tmp_path: Path) -> None:
    writer, state = MetricsWriter(tmp_path / "metrics.jsonl"), SimpleNamespace(is_world_process_zero=True)
    writer.path.write_text('{"step": 1, "objective/scores": 2.0}\n{"step": 2, "obj', encoding="utf-8")
    state.global_step = 2
    writer.on_train_begin(None, state, None)
    assert [row["step"] for row in load_metrics(writer.path)] == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_recipe_can_be_loaded(path: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    if "calls" in content:
        assert ExecutionPlan.load(path).to_dict()
    elif "compute_environment" in content:
        from accelerate.commands.config.config_args import load_config_from_file

        assert load_config_from_file(str(path)).num_processes >= 1
    else:
        config = {"ppo": PPOConfig, "grpo": GRPOConfig, "rloo": RLOOConfig}[path.stem.partition("-")[0]]
        known = {key: value for key, value in content.items() if key in config.__dataclass_fields__}
        of_script = {"dataset_path", "task", *RunArguments.__dataclass_fields__, *ModelConfig.__dataclass_fields__}
        assert set(content) - set(known) <= of_script
        known["use_cpu"] = True  # recipes for GPUs too
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(known))
        (args,) = TrlParser([config]).parse_args_and_config(args=["--config", str(recipe)])
        assert args.max_steps > 0 or args.total_episodes > 0
