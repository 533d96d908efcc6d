"""What a run of GRPO or RLOO leaves behind: times in its logs, a timeline, completions, a report."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_groups
from datasets import Dataset
from transformers import TrainerCallback

from trl_realloc import GRPOTrainer, RLOOTrainer
from trl_realloc.plan.timeline import Timeline
from trl_realloc.trainer.policy.user_spans import threaded_seconds
from trl_realloc.trainer.report.callbacks import MetricsWriter
from trl_realloc.trainer.report.logged_updates import load_metrics
from trl_realloc.trainer.report.run_report import report_run


def trainer(folder: Path, kind: Any = GRPOTrainer, **given: Any) -> Any:
    changes = {"max_steps": 10, "learning_rate": 1e-6, "plan": "flatten", **given.pop("changes", {})}
    parts = {"reward_funcs": tiny.short, "train_dataset": tiny.prompts(32), "eval_dataset": tiny.prompts(5)}
    parts["callbacks"] = [MetricsWriter(folder / "metrics.jsonl")]
    return tiny_groups.trainer(folder, kind, given={**parts, **given}, **changes)


def trained(folder: Path, kind: Any = GRPOTrainer, **given: Any) -> Any:
    made = trainer(folder, kind, **given)
    made.train()
    made.close()
    return made


def test_a_run_leaves_a_report_without_a_callback_and_with_logs_of_several_updates(tmp_path: Path) -> None:
    trained(tmp_path, callbacks=[], changes={"max_steps": 4, "logging_steps": 2})
    text = (tmp_path / "report.md").read_text()
    assert "4 updates." in text and "| logs | mean score |" in text and "![the mean score of every log]" in text
    assert "| reward: short |" in text and (tmp_path / "reward.png").is_file()


def test_before_the_training_the_timeline_is_empty_and_logs_have_no_times(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    assert made.timeline.spans == ()
    made.log({"loss": 1.0})
    assert "time/step" not in made.state.log_history[-1]


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_a_runs_report_has_its_rewards_the_times_of_its_calls_and_its_plan(tmp_path: Path, kind: Any) -> None:
    trained(tmp_path, kind, changes={"eval_strategy": "steps", "eval_steps": 5})
    rows = load_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["objective/scores"] for row in rows] == [row["reward"] for row in rows]
    calls = {"time/actor.generate", "time/actor.forward", "time/actor.train"}
    host = {"time/reward/short", "time/training_loop"}
    calls |= {"time/reference.forward"} if kind is RLOOTrainer else set()
    for row in rows:
        assert {name for name in row if name.startswith("time/")} == {*calls, *host, "time/step"}
        assert sum(row[name] for name in calls | host) == pytest.approx(row["time/step"], abs=0.01)
    timeline = Timeline.load(tmp_path / "timeline.json")
    assert timeline.steps == tuple(range(10)) and set(timeline.calls) == {
        *(call.removeprefix("time/") for call in calls),
        *("reward: short", "training loop"),
    }
    generations = [span for span in timeline.spans if span.call == "actor.generate"]
    assert len(generations) == 10, "those of the evaluation are left out"
    text = report_run(tmp_path).read_text()
    assert "10 updates." in text and "actor.train" in text and "calls:" in text
    algorithm = kind.__name__.removesuffix("Trainer")
    assert f"| algorithm | {algorithm} |" in text and "| hardware | 1 process on CPUs |" in text
    assert ", trl " in text and "| learning rate | " in text and "| entropy | " in text


def test_a_log_of_several_updates_has_their_mean_times(tmp_path: Path) -> None:
    made = trained(tmp_path, changes={"logging_steps": 5})
    first, second = load_metrics(tmp_path / "metrics.jsonl")
    whole = made.timeline.by_call()["actor.train"]
    assert (first["time/actor.train"] + second["time/actor.train"]) / 2 == pytest.approx(whole)
    tokens = made.state.num_input_tokens_seen
    assert 5 * sum(row["tokens/s"] * row["time/step"] for row in (first, second)) == pytest.approx(tokens)


def test_responses_before_the_training_are_in_no_record(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.run.placed.start()
    made.model.train()
    responses = made._generate_and_score_completions([{"prompt": "w2 w3"}] * 4)["completion_ids"]
    made.close()
    assert len(responses) == 4 and made.record.lengths is None


def test_completions_are_those_of_the_policy_at_its_most_probable_with_their_scores(tmp_path: Path) -> None:
    policy = tiny.policy()
    policy.lm_head.weight.data *= 100  # so that its most probable tokens are clearly so
    made = trainer(tmp_path, model=policy, changes={"max_steps": 1, "temperature": 1.0})
    before = made.generate_completions()
    assert before == made.generate_completions(), "near-greedy"
    assert [row["query"] for row in before] == tiny.prompts(5)["prompt"]
    assert [row["score"] for row in before] == pytest.approx(tiny.short([row["model response"] for row in before]))
    made.train()
    assert len(made.generate_completions()) == 5
    assert {span.step for span in made.timeline.spans} == {0}
    made.close()
    assert json.dumps(before)


def test_completions_between_updates_change_no_log_of_the_training(tmp_path: Path) -> None:
    def infinite_in_training(completions: list[str], **columns: Any) -> list[float]:
        return [float("inf") if len(completions) == 8 and at == 0 else 0.0 for at in range(len(completions))]

    class Shows(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            made.generate_completions()

    counts = []
    for callbacks in ([], [Shows()]):
        changes = {"max_steps": 2, "skip_nonfinite_updates": True, "logging_steps": 2}
        made = trained(tmp_path, reward_funcs=[infinite_in_training], callbacks=callbacks, changes=changes)
        counts.append(made.state.log_history[0]["rewards/nonfinite"])
    assert counts == [1.0, 1.0]


def test_completions_of_conversations_show_their_text(tmp_path: Path) -> None:
    talks = Dataset.from_dict({"prompt": [[{"role": "user", "content": "w2 w3"}], [{"role": "user", "content": "w9"}]]})

    def words(completions: Any, **columns: Any) -> list[float]:
        return [float(len(completion[0]["content"].split())) for completion in completions]

    made = trainer(tmp_path, reward_funcs=[words], train_dataset=talks, eval_dataset=talks)
    rows = made.generate_completions()
    made.close()
    assert [row["query"] for row in rows] == ["w2 w3", "w9"]
    assert [row["score"] for row in rows] == [len(row["model response"].split()) for row in rows]


@pytest.mark.parametrize("prompts", [None, Dataset.from_dict({"prompt": []})], ids=["none", "empty"])
def test_without_evaluation_prompts_there_are_no_completions(tmp_path: Path, prompts: Dataset | None) -> None:
    made = trainer(tmp_path, eval_dataset=prompts)
    assert made.generate_completions() == []
    made.close()


def slow_short(completions: list[str], **columns: Any) -> list[float]:
    time.sleep(0.05)
    return tiny.short(completions)


async def slow_async(completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0.05)
    return tiny.short(completions)


def test_reward_functions_have_spans_by_name_and_the_loop_has_the_rest_of_an_update(tmp_path: Path) -> None:
    changes = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
    trained(tmp_path, reward_funcs=[slow_short, slow_async], changes=changes)
    rows, timeline = load_metrics(tmp_path / "metrics.jsonl"), Timeline.load(tmp_path / "timeline.json")
    for name in ("slow_short", "slow_async"):
        spans = [span for span in timeline.spans if span.call == f"reward: {name}"]
        assert {span.step for span in spans} == {0, 1, 2}
        for row, step in zip(rows, range(3), strict=True):
            seconds = sum(span.seconds for span in spans if span.step == step)
            assert 0.05 <= seconds < row["time/step"], "and none of the evaluation after it"
            assert row[f"time/reward/{name}"] == pytest.approx(seconds)
    for row, step in zip(rows, range(3), strict=True):
        of_step = timeline.of_step(step)
        assert row["time/training_loop"] == pytest.approx(of_step.by_call()["training loop"])
        assert of_step.seconds_per_step == pytest.approx(row["time/step"], abs=0.05), "from its begin to its end"
        covered = sorted((span.start, span.end) for span in of_step.spans)
        assert all(start <= max(end for _, end in covered[:at]) + 1e-6 for at, (start, _) in enumerate(covered) if at)


def test_tools_have_spans_by_name_one_for_calls_that_follow_each_other(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    spans, tools = (
        made.run.adapter.spans,
        {"search": lambda word: time.sleep(0.02), "add": lambda one, other: one + other},
    )
    made._sync_tool_dicts = [dict(tools), dict(tools)]
    spans.time_tools()
    assert made._sync_tool_dicts[0]["add"](one=1, other=2) == 3
    for of_prompt in made._sync_tool_dicts:
        of_prompt["search"](word="a")
    time.sleep(0.01)
    made._sync_tool_dicts[1]["search"](word="a")
    spans.collect()
    taken = spans.take()
    assert [span.call for span in taken] == ["tool: add", "tool: search", "tool: search"]
    assert taken[1].seconds >= 0.04 and taken[2].seconds >= 0.02 and spans.take() == ()
    made.close()


def test_the_first_span_of_a_serial_tool_has_the_estimate_for_all_of_its_calls(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    spans = made.run.adapter.spans
    for completion, gap in ((0, 0.0), (1, 0.01), (1, 0.0)):
        spans.timed("tool: search", lambda: time.sleep(0.02), completion)()
        time.sleep(gap)
    spans.timed("tool: at_once", lambda: None)()
    spans.collect()
    at_once, first, second = spans.take()
    assert 0.04 <= first.threaded_s < first.seconds + second.seconds and second.threaded_s == at_once.threaded_s == 0
    made.close()


@pytest.mark.parametrize(
    ("calls", "workers", "seconds"),
    [
        ([], 8, 0.0),
        ([(0, 1.0), (1, 1.0), (2, 1.0)], 8, 1.0),
        ([(0, 1.0), (1, 1.0), (2, 1.0)], 2, 2.0),
        ([(0, 1.0), (0, 2.0), (1, 1.0)], 8, 3.0),  # those of a completion in their order
        ([(0, 4.0), (1, 1.0), (2, 1.0), (1, 1.0)], 2, 4.0),
    ],
)
def test_the_seconds_of_calls_in_threads(calls: list[tuple[int, float]], workers: int, seconds: float) -> None:
    assert threaded_seconds(calls, workers) == seconds
