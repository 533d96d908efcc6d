"""The recipes of GRPO and RLOO: their questions, reward and calculator, and that they train without a script."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
from datasets import Dataset, DatasetDict
from trl import ModelConfig

from trl_realloc import GRPOConfig
from trl_realloc.cli.recipe_parser import RecipeError, parse_recipe
from trl_realloc.cli.train import RunArguments, imported, main
from trl_realloc.common.errors import PlanError
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
    config = ["--config", str(RECIPES / "grpo-tools.yaml"), "--use_cpu", "true", "--bf16", "false"]
    own, args = parse_recipe((RunArguments, GRPOConfig, ModelConfig), config)[:2]
    assert args.max_tool_calling_iterations == 3 and args.chat_template_kwargs == {"enable_thinking": False}
    assert [imported("tools", name) for name in own.tools] == [arithmetic.calculate]


@pytest.mark.parametrize("recipe", ["grpo/grpo-reward", "grpo/rloo", "llama-8b/rloo-lora"])
def test_a_recipe_alone_trains_a_model(tmp_path: Path, recipe: str) -> None:
    tiny.policy(max_position_embeddings=512).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    changes = {"model_name_or_path": tmp_path / "model", "output_dir": tmp_path / "run", "plan": "flatten"}
    changes |= {"use_vllm": "false", "bf16": "false", "use_cpu": "true"}
    changes |= {"max_completion_length": 8, "max_steps": 2, "save_steps": 2}
    words = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    algorithm = "rloo" if "rloo" in recipe else "grpo"
    tiny.forget_accelerate()
    main([algorithm, "--config", str(RECIPES.parent / f"{recipe}.yaml"), *words])
    tiny.forget_accelerate()
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    saved = "adapter_model.safetensors" if recipe.endswith("lora") else "model.safetensors"
    assert state["global_step"] == 2 and (tmp_path / "run" / saved).exists()


@pytest.mark.parametrize(
    "adapters", ["", ", load_in_4bit: true, use_peft: true, lora_target_modules: [q_proj, v_proj]"]
)
def test_a_recipe_of_ppo_alone_trains_a_model(tmp_path: Path, adapters: str) -> None:
    """By a data set on disk, a reward model, a reward function and a critic of its own."""
    tiny.policy(max_position_embeddings=512, hidden_size=64).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    tiny.classifier(max_position_embeddings=512).save_pretrained(tmp_path / "reward")
    DatasetDict(train=Dataset.from_dict({"prompt": ["w5 w6"] * 8})).save_to_disk(str(tmp_path / "data"))
    (tmp_path / "short.py").write_text("def reward(completions, **rest): return [-len(text) for text in completions]\n")
    recipe = tmp_path / "ppo.yaml"
    recipe.write_text(
        f"""{{sft_model_path: {tmp_path}/model, reward_model_path: {tmp_path}/reward, reward_funcs: [short.reward],
        value_model_path: {tmp_path}/reward, dataset_name: {tmp_path}/data, plan: flatten, response_length: 4,
        generation_engine: transformers, per_device_train_batch_size: 2, gradient_accumulation_steps: 1, max_steps: 1,
        num_mini_batches: 1, num_sample_generations: 0, output_dir: {tmp_path}/run, use_cpu: true, bf16: false
        {adapters}}}"""
    )
    tiny.forget_accelerate()
    main(["ppo", "--config", str(recipe)])
    tiny.forget_accelerate()
    (saved,) = (tmp_path / "run").glob("*model.safetensors")
    assert saved.name == ("adapter_model.safetensors" if adapters else "model.safetensors")


@pytest.mark.parametrize("setting", ["load_in_4bit", "load_in_8bit"])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo"])
def test_a_run_of_quantized_weights_without_adapters_is_refused(tmp_path: Path, algorithm: str, setting: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{{output_dir: {tmp_path}/run, use_cpu: true, bf16: false, {setting}: true}}")
    with pytest.raises(PlanError, match=f"^{setting}: quantized weights are not trained.*; set use_peft: true"):
        main([algorithm, "--config", str(recipe)])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "names no data set: set dataset_name, or dataset_function"),
        ("--dataset_function arithmetic.question", "dataset_function: there is no 'arithmetic.question'"),
        ("--dataset_function arithmetik.questions", "dataset_function: there is no module 'arithmetik'"),
        ("--dataset_function arithmetic.questions", "names no reward: set reward_funcs"),
        ("--dataset_function arithmetic.questions --reward_funcs right_answer", "no 'trl.rewards.right_answer'"),
    ],
)
def test_what_a_recipe_does_not_name_is_said(tmp_path: Path, words: str, told: str, arithmetic: ModuleType) -> None:
    recipe = tmp_path / "grpo.yaml"
    recipe.write_text(f"model_name_or_path: none\noutput_dir: {tmp_path}/run\nuse_cpu: true\nbf16: false\n")
    with pytest.raises(RecipeError, match=told):
        main(["grpo", "--config", str(recipe), *words.split()])


def test_rloo_is_told_from_grpo_by_its_recipe() -> None:
    for path in RECIPES.glob("*.yaml"):
        expected = path.stem.partition("-")[0]
        assert algorithm_of(read_recipe_settings(path), path) == expected
