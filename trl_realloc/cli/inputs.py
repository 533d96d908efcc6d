"""The input and output files of a command (a plan, a recipe, a file to write), and the environment that it needs.

Mistakes are refused before anything is measured or searched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from ..common.errors import PlanError, Problems, nearest, shown, suggest
from ..common.files import exists, or_packaged, packaged_recipes, read_yaml_mapping, shortened
from ..common.settings import SETTINGS
from ..plan.algorithm_graphs import grpo_graph
from ..plan.dataflow import Role
from ..plan.execution_plan import ExecutionPlan
from ..plan.presets import PRESETS, load_plan
from ..planner.recipe.recipe import POLICY, Recipe, read_recipe_settings
from ..trainer.checks.unfollowed_settings import Then, unfollowed_by_recipe


def plan_file(path: str) -> ExecutionPlan:
    """The plan in a file: for GRPO and RLOO if it only has their calls, otherwise for PPO.

    Raises:
        PlanError: the file is a recipe, or not a plan.
    """
    file = or_packaged(path)
    if not exists(file):
        return load_plan(path)
    contents = read_yaml_mapping(file, "the plan", "calls: {...}")
    calls = contents.get("calls")
    if "calls" not in contents and {*SETTINGS, *POLICY}.intersection(contents):
        raise PlanError(f"{path} is a recipe, and not a plan; trl-realloc plan {path} chooses a plan for it.")
    if not isinstance(calls, Mapping) or not set(grpo_graph().order).issuperset(calls):
        return load_plan(path)
    reference, rewards = (f"{role}.forward" in calls for role in (Role.REFERENCE, Role.REWARD))
    return load_plan(path, grpo_graph(reference=reference, reward_models=rewards))


def no_such_input(what: str) -> str:
    """The message for an input of `plan` that is neither a preset nor a file."""
    path = Path(what)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        beside = [str(candidate) for candidate in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        packaged = [name for name, file in packaged_recipes().items() if "\noutput_dir:" in file.read_text("utf-8")]
        near = nearest(what, [*beside, *packaged])
        hint = f"did you mean {near!r}?" if near else f"those of the package are {', '.join(packaged)}."
        return f"there is no recipe {shown(what)}; {hint}"
    return f"{shown(what)} is neither a recipe nor a preset; {suggest(what, PRESETS)}"


def accelerate_config(recipe: Path, named: str) -> Path:
    """The accelerate config that a recipe names. Raises `PlanError` if it does not exist."""
    path = or_packaged(named)
    if not exists(path):
        raise PlanError(f"{recipe}: there is no accelerate_config {shown(named)}; give the path of a YAML file.")
    return path


def accelerate_trains(recipe: Recipe) -> str | None:
    """A sentence about a recipe that Accelerate trains; `None` for others.

    Raises:
        PlanError: a run of the recipe would refuse a setting.
    """
    settings = read_recipe_settings(recipe.path)
    sharded, is_ppo = bool(settings.get("fsdp")), recipe.algorithm == "ppo"  # no row of `unfollowed_settings`
    refused = ["PPO is not trained under fsdp; leave it out."] if sharded and is_ppo else []
    reasons = [*unfollowed_by_recipe(settings, recipe.algorithm, Then.ACCELERATE)]
    reasons += ["fsdp is set"] if sharded else []
    if not reasons:
        refused += unfollowed_by_recipe(settings, recipe.algorithm, Then.REFUSE)
    Problems(f"{recipe.path}: {sentence}" for sentence in refused).refuse()
    if not reasons:
        return None
    return (
        f"In a run of {recipe.path} Accelerate trains, not the plan's engines: {'; '.join(reasons)}. It uses no plan."
    )


def check_torch(work: str) -> None:
    """Refuse work that needs torch in an environment without it. Raises `PlanError`."""
    if find_spec("torch") is None:
        raise PlanError(
            f"{work} needs torch, which is not installed here: install trl_realloc with its dependencies. Without "
            f"torch work plan with --cluster or --clusters, show, report and compare."
        )


def check_output(output: Path, what: str) -> None:
    """Create the folder of an output file, and refuse a file that cannot be written, before anything is measured."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"{what} cannot be written to {shortened(output)} ({error.strerror}).") from None
    if not os.access(output if exists(output) else output.parent, os.W_OK):
        raise PlanError(f"{what} cannot be written to {output} (no permission to write there).")
