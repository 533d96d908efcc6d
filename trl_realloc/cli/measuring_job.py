"""Starts the job that measures a recipe's models on this machine, and reads its profile.

`measure` is the script of its processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..common.errors import PlanError, shown
from ..common.files import exists, read_yaml_mapping
from ..planner.cost.profile import Profile
from ..planner.recipe.recipe import Recipe
from .inputs import accelerate_config, check_torch


def check_processes(devices: int | None) -> None:
    """Refuse more processes than this machine can run. Raises `PlanError`."""
    if devices is not None and not 1 <= devices <= _most_processes():
        amount = "many" if devices > 0 else "few"
        raise PlanError(
            f"--devices {devices}: too {amount} processes for this machine ({os.cpu_count()} processors); give a "
            f"number from 1 to {_most_processes()}."
        )


def _most_processes() -> int:
    """The maximum number of processes on this machine: 8 per processor, so that small machines can run tests."""
    return 8 * (os.cpu_count() or 1)


def measured_profile(recipe: Recipe, devices: int, *options: str) -> Profile:
    """The profile of a recipe's models, from a job on this machine that measures them.

    Args:
        devices: number of processes of the job.
        options: arguments of `measure`: `thorough`, to measure generation under tensor degrees too.

    Raises:
        PlanError: torch is missing, or the job failed (with the job's message).
    """
    check_torch("measuring this machine")
    with tempfile.TemporaryDirectory(prefix="trl_realloc_") as folder:
        return _measured(recipe, devices, Path(folder) / "profile.json", options)


def _measured(recipe: Recipe, devices: int, output: Path, options: Sequence[str]) -> Profile:
    job = ["-m", "trl_realloc.cli.measure", str(recipe.path), str(output), str(recipe.prompt_tokens), *options]
    launch = [sys.executable]
    if devices > 1:
        launch += ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes"]
        launch += [str(devices), "--mixed_precision", "no", "--dynamo_backend", "no"]
    done = subprocess.run([*launch, *job], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode or not output.is_file():
        lines = done.stderr.strip().splitlines()
        refused = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        reason = "\n".join(list(dict.fromkeys(refused)) or lines[-12:])
        processes = "1 process" if devices == 1 else f"{devices} processes"
        raise PlanError(f"measuring {recipe.path} on {processes} failed: {reason}")
    return Profile.load(output)


def processes_of(recipe: Path) -> int:
    """The number of processes in a run of the recipe: from the recipe, from the accelerate config that it names, or
    from the one in its folder; otherwise 1.

    Raises:
        PlanError: it is not a possible number of processes on this machine, or the config does not exist.
    """
    config, contents = recipe, read_yaml_mapping(recipe, "the recipe", "num_processes: 2")
    if contents.get("num_processes") is None:
        config = recipe.parent / "accelerate.yaml"
        if (named := contents.get("accelerate_config")) is not None:
            config = accelerate_config(recipe, str(named))
        elif not exists(config):
            return 1
        contents = read_yaml_mapping(config, "the accelerate config", "num_processes: 2")
    processes = contents.get("num_processes", 1)
    if isinstance(processes, bool) or not isinstance(processes, int) or not 1 <= processes <= _most_processes():
        raise PlanError(
            f"{config}: num_processes is a whole number from 1 to {_most_processes()} here, not {shown(processes)}; "
            f"or set --devices N."
        )
    return processes
