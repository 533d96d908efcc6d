"""The command that starts a recipe's training: one process, or several with Accelerate's launcher.

`train` is the script of its processes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..common.errors import PlanError, shown
from ..common.files import or_packaged, read_yaml_mapping
from ..planner.recipe.defaults import LAUNCH
from .inputs import accelerate_config, check_torch


def training_command(algorithm: str, words: Sequence[str]) -> list[str]:
    """The command, in the form of `subprocess`, for `trl-realloc ALGORITHM WORDS`. The words take precedence over the
    recipe.

    Raises:
        PlanError: torch is missing, no recipe is named, it cannot be read, or one of the settings `LAUNCH` is invalid.
    """
    check_torch("training")
    launch_settings, rest = _launch_words(words)
    if "--config" not in rest[:-1]:
        raise PlanError(f"name a recipe: trl-realloc {algorithm} --config recipe.yaml.")
    position = rest.index("--config") + 1
    recipe = or_packaged(rest[position])
    rest[position] = str(recipe)
    contents = read_yaml_mapping(recipe, "the recipe", "learning_rate: 3.0e-6")
    launch = {key: str(contents[key]) for key in LAUNCH if contents.get(key) is not None} | launch_settings
    train = ["-m", "trl_realloc.cli.train", algorithm, *rest]
    if launch in ({}, {"num_processes": "1"}):
        return [sys.executable, *train]
    return [sys.executable, "-m", "accelerate.commands.launch", *_launcher_options(launch, recipe), *train]


def _launch_words(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(launch settings, other words); `--key=value` counts as two words."""
    apart: list[str] = []
    for word in words:
        apart += word.split("=", 1) if word.startswith("--") and "=" in word else [word]
    launch_settings: dict[str, str] = {}
    rest: list[str] = []
    while apart:
        word = apart.pop(0)
        key = word.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or key not in LAUNCH:
            rest.append(word)
        elif not apart:
            raise PlanError(f"{word} needs a value after it.")
        else:
            launch_settings[key] = apart.pop(0)
    return launch_settings, rest


def _launcher_options(launch: Mapping[str, str], recipe: Path) -> list[str]:
    options: list[str] = []
    config = launch.get("accelerate_config")
    if config is not None:
        options += ["--config_file", str(accelerate_config(recipe, config))]
    else:  # Accelerate assumes GPUs for several processes; without GPUs they are CPU processes with gloo
        options += ["--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no"]
        launch = {"num_machines": "1", **launch}
    for key, value in launch.items():
        if LAUNCH[key] is int and not value.isdecimal():
            raise PlanError(f"{recipe}: {key} must be a whole number, not {shown(value)}.")
        if key != "accelerate_config":
            options += [f"--{key}", value]
    return options
