"""Recipes: what a script's parser is given, and what is refused with the file, the key and the value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trl import ModelConfig, ScriptArguments

from trl_realloc import PPOConfig
from trl_realloc.cli.recipe_parser import SENTENCES, RecipeError, parse_recipe, run
from trl_realloc.common.errors import PlanError
from trl_realloc.planner.recipe.recipe import read_recipe_settings


KINDS = (ScriptArguments, PPOConfig, ModelConfig)
RIGHT = "output_dir: runs\nbf16: false\nuse_cpu: true\nreport_to: none\n"


def parsed(path: Path, text: str, *arguments: str) -> Any:
    path.write_text(RIGHT + text)
    return parse_recipe(KINDS, ["--config", str(path), *arguments])[1]


def test_a_recipe_is_read_as_the_command_line_would_be(tmp_path: Path) -> None:
    recipe = tmp_path / "ppo.yaml"
    text = "learning_rate: 3e-6\nresponse_length: '16'\ntotal_episodes: 100\nplan: {name: mine}\nsave_strategy: 'no'\n"
    args = parsed(recipe, text, "--gamma", "0.9")
    assert (args.learning_rate, args.response_length, args.gamma) == (3e-6, 16, 0.9)
    assert (args.total_episodes, args.plan) == (100, {"name": "mine"})
    same = parse_recipe(KINDS, [f"--config={recipe}", "--gamma", "0.9"])[1]
    assert (same.learning_rate, same.plan) == (args.learning_rate, args.plan)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("learning_rat: 1.0e-5", "no setting 'learning_rat'; did you mean 'learning_rate'?"),
        ("gamma: 2", "gamma must be a finite number from 0 to 1, not 2"),
        ("num_ppo_epochs: [4]", r"num_ppo_epochs must be a whole number from 1, not \[4\]"),
        ("num_ppo_epochs:", "num_ppo_epochs must be a whole number from 1, not None"),
        ("response_length: many", "response_length must be a whole number from 1, not 'many'"),
        ("sft_model_path: 5", "sft_model_path must be text, not 5"),
        ("run_name: 2024-01-01", r"run_name must be text, not datetime\.date"),
        ("save_strategy: no", "save_strategy must be .* not False. YAML reads yes, no, on and off as true"),
        ("save_strategy: sometimes", "sometimes is not a valid SaveStrategy"),
        ("lr_scheduler_type: [cosine]", r"lr_scheduler_type must be .* not \['cosine'\]"),
        ("whiten_rewards: [1]", "whiten_rewards must be true or false"),
        ("env: [A]", r"env must be a mapping, not \['A'\]"),
        ("gamma: 1\ngamma: 0.9", "'gamma' is written twice"),
        ("gamma: &a [*a]", "itself"),
        ("run_name: 2020-13-45", "the recipe is not YAML: month must be in 1..12"),
        ("5: x", "no setting 5; none of the"),
    ],
)
def test_a_recipes_wrong_key_or_value_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told) as refused:
        parsed(tmp_path / "ppo.yaml", text)
    assert str(refused.value).startswith(str(tmp_path / "ppo.yaml"))


def test_a_misspelt_key_is_refused_in_either_way_of_naming_the_file(tmp_path: Path) -> None:
    recipe = tmp_path / "ppo.yaml"
    recipe.write_text("gama: 0.9\n")
    for arguments in (["--config", str(recipe)], [f"--config={recipe}"]):
        with pytest.raises(RecipeError, match="no setting 'gama'; did you mean 'gamma'"):
            parse_recipe(KINDS, arguments)
    with pytest.raises(RecipeError, match="--config needs the path of a recipe after it"):
        parse_recipe(KINDS, ["--config"])
    with pytest.raises(RecipeError, match="none.yaml: the recipe cannot be read"):
        parse_recipe(KINDS, ["--config", str(tmp_path / "none.yaml")])


def test_the_planners_key_says_nothing_to_a_run_of_that_algorithm(tmp_path: Path) -> None:
    assert parsed(tmp_path / "ppo.yaml", "algorithm: ppo\ngamma: 0.9\n").gamma == 0.9
    with pytest.raises(RecipeError, match="algorithm is 'rloo', which this script does not train by; leave it out"):
        parsed(tmp_path / "rloo.yaml", "algorithm: rloo\n")


class Colour(Enum):
    RED = "red"


@dataclass
class Own:
    """A script's own settings, of types that only it knows."""

    colour: Colour = Colour.RED
    sizes: list[int] | None = None


def test_a_scripts_own_settings_are_read_too(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("colour: red\nsizes: [1, 2]\n")
    (own,) = parse_recipe([Own], ["--config", str(recipe)])
    assert own == Own("red", [1, 2])  # type: ignore[arg-type]
    recipe.write_text("sizes: {a: 1}\n")
    with pytest.raises(RecipeError, match="sizes must be a list, not"):
        parse_recipe([Own], ["--config", str(recipe)])
    recipe.write_text("colour: blue\n")
    with pytest.raises(RecipeError, match="argument --colour: invalid choice: 'blue'"):
        parse_recipe([Own], ["--config", str(recipe), "--colour", "blue"])


keys = st.sampled_from(["gamma", "plan", "env", "seed", "output_dir", "save_strategy", "reward_weights", "report_to"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(keys | st.text(max_size=6), values, max_size=3))
def test_settings_are_taken_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", {"PATH": "/usr/bin"})
    path = tmp_path / "ppo.yaml"
    path.write_text(yaml.safe_dump(recipe))
    try:
        parse_recipe(KINDS, ["--config", str(path), "--bf16", "false", "--use_cpu", "true"])
    except SENTENCES as error:
        assert len(str(error)) < 3000


@pytest.mark.parametrize("name", ["gradient_checkpointing", "vllm_enable_sleep_mode", "full_determinism"])
@pytest.mark.parametrize("text", ["'no'", "'False'", "'0'", "'yes'", "'TRUE'", "'1'", "false", "true"])
def test_the_planner_reads_a_boolean_as_the_run_does(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "ppo.yaml"
    run = parsed(path, f"{name}: {text}\n")
    assert read_recipe_settings(path)[name] is getattr(run, name)


@pytest.mark.parametrize(("number", "expected"), [(0, False), (1, True)])
def test_a_boolean_may_be_written_as_0_or_1(tmp_path: Path, number: int, expected: bool) -> None:
    path = tmp_path / "ppo.yaml"
    assert parsed(path, f"full_determinism: {number}\n").full_determinism == expected
    assert read_recipe_settings(path)["full_determinism"] is expected


@pytest.mark.parametrize(("bf16", "fp16"), [("true", "true"), ("yes", "1")])
def test_both_mixed_precisions_are_refused_by_the_run_and_the_planner(tmp_path: Path, bf16: str, fp16: str) -> None:
    path = tmp_path / "ppo.yaml"
    with pytest.raises(RecipeError, match="fp16 and bf16"):
        parsed(path, f"fp16: {fp16}\n", "--bf16", bf16)
    path.write_text(f"bf16: '{bf16}'\nfp16: {fp16}\n")
    with pytest.raises(PlanError, match=r"ppo\.yaml: bf16 and fp16 are both true; keep one of them\."):
        read_recipe_settings(path)


def test_a_word_that_the_run_reads_as_no_boolean_is_refused_by_the_planner_too(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yaml"
    with pytest.raises(RecipeError):
        parsed(path, "gradient_checkpointing: 'off'\n")
    with pytest.raises(PlanError, match="gradient_checkpointing must be true or false, not 'off'"):
        read_recipe_settings(path)


def test_a_script_that_has_ended_has_no_process_group() -> None:
    """NCCL warns at the exit of a process that has one."""
    run(lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1))
    assert not dist.is_initialized()
