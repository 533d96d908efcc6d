"""What is shown with a pretrained model, as far as it needs neither the model nor the tasks: the reward, the recipes,
and the rows of the results."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from run_trl_tests import make_tokenizer
from trl import ModelConfig, get_peft_config

from trl_realloc import GRPOConfig, PPOConfig
from trl_realloc.cli.recipe_parser import parse_recipe


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def evidence() -> ModuleType:
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "smollm2")]
    return importlib.import_module("evidence")


def test_only_the_answer_alone_is_rewarded(evidence: ModuleType) -> None:
    texts = [" 12", "12\n", "1", "12.", "7 + 5 = 12", "", "-12"]
    reward = importlib.import_module("tasks").right_answer
    assert reward([""] * len(texts), texts, ["12"] * len(texts)) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_reward_that_trls_ppo_gets_is_of_the_text_after_the_prompt(evidence: ModuleType) -> None:
    words = make_tokenizer(300)
    rows = [{"prompt": f"{n} + 5 =\nAnswer:", "answer": str(n + 5)} for n in (3, 17)]
    texts = [" 8<eos>", "22", " 22<eos>", "8"]
    ids = [words(row["prompt"] + text)["input_ids"] for row, text in zip(rows * 2, texts, strict=True)]
    batch = words.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    model = evidence.answer_model(words, rows)
    scores = model.score(getattr(model, model.base_model_prefix)(**batch).hidden_states[-1])
    assert scores.shape == (*batch["input_ids"].shape, 1)
    assert scores[:, -1, 0].tolist() == [1.0, 1.0, 0.0, 0.0]


def test_held_out_rows_are_not_trained_on(evidence: ModuleType) -> None:
    pytest.importorskip("reasoning_gym", reason="`make setup-evidence` installs it")
    tasks = importlib.import_module("tasks")
    for name in tasks.TASKS:
        held_out = {row["prompt"] for row in tasks.held_out_rows(name)}
        assert len(held_out) == tasks.HELD_OUT
        for seed in (tasks.TRAIN_SEED, tasks.START_SEED):
            assert not held_out & {row["prompt"] for row in tasks.training_rows(name, 150, seed)}


@dataclass
class Script:
    """What the scripts read of their recipes besides the trainer's configuration."""

    task: str
    value_model_path: str = ""


@pytest.mark.parametrize("name", ["grpo", "grpo-lora", "grpo-qlora", "ppo"])
def test_the_recipes_are_read(evidence: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config: type[Any] = PPOConfig if name == "ppo" else GRPOConfig
    own, args, model = parse_recipe((Script, config, ModelConfig), ["--config", f"recipes/smollm2/{name}.yaml"])
    assert (own.task, args.plan, args.per_device_train_batch_size) == ("sums", "auto", 64)
    row = evidence.Row("grpo", "sums", "ours", adapters=name.removeprefix("grpo").removeprefix("-"))
    given, lora = evidence.adapters(row) if name.startswith("grpo-") else {}, get_peft_config(model)
    assert {key: getattr(lora, key, None) for key in ("r", "lora_alpha", "target_modules")} == {
        key: getattr(given.get("peft_config"), key, None) for key in ("r", "lora_alpha", "target_modules")
    }
    assert model.load_in_4bit == (given.get("quantization_config") is not None) == (name == "grpo-qlora")
    expected = evidence.ADAPTERS_LEARNING_RATE if given else evidence.LEARNING_RATE
    assert args.learning_rate == expected


def made(row: Any, curve: list[tuple[int, float, float]]) -> dict[str, Any]:
    return {
        **vars(row),
        **{"name": row.name, "updates": curve[-1][0], "before": curve[0][2], "after": curve[-1][2], "error": 0.03},
        **{
            "seconds": curve[-1][1],
            "memory_gb": 4.0,
            "tokens_per_s": 100.0,
            "curve": curve,
            "rewards": [0.4, 0.5, 0.6, 0.5],
        },
        **{"greedy": [0.4, 0.6], "mismatch": {}, "commit": "0000000", "hardware": "2 cores"},
    }


def test_finished_rows_are_not_remade(evidence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, asked = evidence.rows_of("cpu")[:3], list[str]()

    def make(row: Any, updates: int, folder: Path) -> dict[str, Any]:
        asked.append(row.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return made(row, [(0, 0.0, 0.3), (updates, 10.0, 0.5)])

    monkeypatch.setattr(evidence, "make_row", make)
    path = tmp_path / "evidence.json"
    with pytest.raises(KeyboardInterrupt):
        evidence.make_missing(rows, 6, path)
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == [rows[0].name]
    evidence.make_missing(rows, 6, path)
    assert asked == [rows[0].name, rows[1].name, rows[1].name, rows[2].name]
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == [row.name for row in rows]


def test_arms_are_compared_at_an_accuracy_that_both_have_reached(evidence: ModuleType) -> None:
    theirs, ours, alone, *_ = evidence.rows_of("cpu")
    rows = evidence.with_seconds_to(
        [
            made(theirs, [(0, 0.0, 0.3), (10, 20.0, 0.45), (20, 40.0, 0.5)]),
            made(ours, [(0, 0.0, 0.3), (10, 10.0, 0.5), (20, 20.0, 0.6)]),
            made(alone, [(0, 0.0, 0.3), (10, 10.0, 0.4)]),
        ]
    )
    assert [row["seconds_to"] for row in rows] == [
        {"accuracy": 0.5, "seconds": 40.0},
        {"accuracy": 0.5, "seconds": 10.0},
        None,
    ]
    assert any("50.0% in 10 s" in line for line in importlib.import_module("evidence_page").tables(rows))
