"""`trl-realloc ppo | grpo | rloo`: the processes that a recipe and the command line start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from trl_realloc.cli.main import main
from trl_realloc.cli.training_job import training_command


CONFIG = "num_processes: 2\n"
SEVERAL = ["--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no"]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    path = tmp_path / "grpo.yaml"
    path.write_text("output_dir: out\n")
    return path


def launched(words: str) -> tuple[list[str], list[str]]:
    """(options of Accelerate's launcher, the words of each process) of `trl-realloc grpo WORDS`."""
    first, *command = training_command("grpo", words.split())
    assert first == sys.executable
    at = command.index("trl_realloc.cli.train")
    assert command[at - 1 : at + 2] == ["-m", "trl_realloc.cli.train", "grpo"]
    launcher = command[: at - 1]
    assert launcher[:2] == ["-m", "accelerate.commands.launch"] or not launcher
    return launcher[2:], command[at + 2 :]


@pytest.mark.parametrize(
    ("written", "words", "launcher"),
    [
        ("", "", []),
        ("num_processes: 1\n", "", []),
        ("", "--num_processes 2", [*SEVERAL, "--num_machines", "1", "--num_processes", "2"]),
        ("num_processes: 4\n", "--num-processes=2", [*SEVERAL, "--num_machines", "1", "--num_processes", "2"]),
        ("accelerate_config: mine.yaml\n", "", ["--config_file", "mine.yaml"]),
        ("accelerate_config: mine.yaml\n", "--machine_rank 1", ["--config_file", "mine.yaml", "--machine_rank", "1"]),
    ],
)
def test_recipe_or_command_line_sets_the_processes(recipe: Path, written: str, words: str, launcher: list[str]) -> None:
    recipe.write_text(f"output_dir: out\n{written}")
    options, rest = launched(f"--learning_rate 1e-6 --config grpo.yaml {words}")
    assert options == launcher
    assert rest == ["--learning_rate", "1e-6", "--config", "grpo.yaml"], "what is Accelerate's is not the trainer's"


def test_a_recipe_of_the_package_is_run_by_its_name(recipe: Path) -> None:
    _, (_, path) = launched("--config llama-8b/grpo.yaml")
    assert Path(path).is_file() and path.endswith("recipes/llama-8b/grpo.yaml")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "name a recipe: trl-realloc grpo --config recipe.yaml"),
        ("--config", "name a recipe"),
        ("--config none.yaml", "none.yaml: the recipe cannot be read"),
        ("--config grpo.yaml --num_processes", "--num_processes needs a value after it"),
        ("--config grpo.yaml --num_processes two", "num_processes must be a whole number, not 'two'"),
        ("--config grpo.yaml --accelerate_config no.yaml", "there is no accelerate_config 'no.yaml'"),
    ],
)
def test_a_mistake_is_refused_before_a_process_starts(
    recipe: Path, words: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execv", lambda *command: pytest.fail(f"started {command}"))
    assert main(["grpo", *words.split()]) == 2
    assert told in capsys.readouterr().err
