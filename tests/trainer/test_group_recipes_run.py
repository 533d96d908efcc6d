"""The recipes of GRPO and RLOO: their questions, reward and calculator, and that their scripts train."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny

from trl_realloc import GRPOConfig
from trl_realloc.cli.recipe_parser import parse_recipe
from trl_realloc.planner.recipe.defaults import algorithm_of
from trl_realloc.planner.recipe.recipe import read_recipe_settings


ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "grpo"


@pytest.fixture(scope="module")
def arithmetic() -> Any:
    sys.path.insert(0, str(RECIPES))
    yield importlib.import_module("arithmetic")
    sys.path.remove(str(RECIPES))


def test_the_calculator_answers_every_question(arithmetic: ModuleType) -> None:
    for row in arithmetic.questions(50):
        question = row["prompt"][0]["content"]
        value = arithmetic.calculate(question.removeprefix("What is ").partition("?")[0])
        said = [[{"role": "assistant", "content": f"It is {value:,}."}], [{"role": "assistant", "content": ""}]]
        assert arithmetic.right_answer(said, [row["answer"]] * 2) == [1.0, 0.0]
    assert arithmetic.calculate("-(3 - 4) / 2") == 0.5


@pytest.mark.parametrize("text", ["__import__('os')", "2 ** 9", "x", "'a' + 'b'"])
def test_the_calculator_runs_nothing_but_arithmetic(arithmetic: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="only numbers"):
        arithmetic.calculate(text)


def test_the_recipe_with_tools_is_read(arithmetic: ModuleType) -> None:
    script = importlib.import_module("train_grpo")
    config = ["--config", str(RECIPES / "grpo-tools.yaml"), "--use_cpu", "true", "--bf16", "false"]
    own, args = parse_recipe((script.Arguments, GRPOConfig), config)
    assert own.tools and args.max_tool_calling_iterations == 3
    assert args.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("script", "recipe"),
    [("train_grpo", "grpo/grpo-reward"), ("train_rloo", "grpo/rloo"), ("train_rloo", "llama-8b/rloo-lora")],
)
def test_a_recipes_script_trains_a_model(
    tmp_path: Path, script: str, recipe: str, arithmetic: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process's main module, in this process, which has imported what the script imports."""
    tiny.policy(max_position_embeddings=512).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    changes = {
        "model_name_or_path": tmp_path / "model",
        "output_dir": tmp_path / "run",
        "plan": "flatten",
        "use_vllm": "false",
        "max_completion_length": 8,
        "max_steps": 2,
        "save_steps": 2,
        "bf16": "false",
        "use_cpu": "true",
    }
    command = [str(RECIPES / f"{script}.py"), "--config", str(RECIPES.parent / f"{recipe}.yaml")]
    command += [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", command)
    tiny.forget_accelerate()
    runpy.run_path(command[0], run_name="__main__")
    tiny.forget_accelerate()
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    saved = "adapter_model.safetensors" if recipe.endswith("lora") else "model.safetensors"
    assert state["global_step"] == 2 and (tmp_path / "run" / saved).exists()


def test_rloo_is_told_from_grpo_by_its_recipe() -> None:
    for path in RECIPES.glob("*.yaml"):
        expected = path.stem.partition("-")[0]
        assert algorithm_of(read_recipe_settings(path), path) == expected
