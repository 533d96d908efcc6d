"""What a recipe asks of the planner: models by their configs on disk, and the size of an iteration. Without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from ..cluster import Cluster
from ..dataflow import Role, ppo_graph
from ..errors import PlanError, Problems, nearest
from ..modelspec import ModelSpec
from .workload import Workload


# A recipe's settings that the planner reads, with `PPOConfig`'s defaults.
DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_mini_batches": 1,
    "num_ppo_epochs": 4,
    "response_length": 53,
    "local_rollout_forward_batch_size": 64,
    "gradient_checkpointing": True,
    "generation_engine": "vllm",
    "vllm_gpu_memory_utilization": 0.3,
}
POLICY = ("sft_model_path", "model_name_or_path")
LIKE = 0.8  # as alike is a misspelt key
PROMPT_TOKENS = 64.0  # where nothing says how long prompts are


@dataclass(frozen=True)
class Task:
    """A recipe as the planner sees it.

    Args:
        folders: where each role's config.json is.
        settings: the recipe's, with defaults.
    """

    recipe: Path
    folders: Mapping[Role, Path]
    settings: Mapping[str, Any]
    prompt_tokens: float

    @property
    def engine(self) -> str:
        return str(self.settings["generation_engine"] or "vllm")

    def specs(self, bytes_per_element: int = 4) -> dict[str, Sequence[ModelSpec]]:
        """By call. Raises `PlanError` for a family that no table describes."""
        found: dict[str, Sequence[ModelSpec]] = {}
        for call in ppo_graph().calls:
            config = json.loads((self.folders[call.role] / "config.json").read_text(encoding="utf-8"))
            is_policy = call.role in (Role.ACTOR, Role.REFERENCE)
            head = "lm" if is_policy else "score"
            found[call.name] = (ModelSpec.from_config(config, head, bytes_per_element=bytes_per_element),)  # type: ignore[arg-type]
        return found

    def workload(self, cluster: Cluster) -> Workload:
        """One iteration on that many devices, every response as long as it may be."""
        settings = self.settings
        longest = round(self.prompt_tokens + settings["response_length"])
        share = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
        return Workload(
            episodes=share * cluster.size,
            prompt_tokens=self.prompt_tokens,
            response_tokens=(settings["response_length"],),
            mini_batches=settings["num_mini_batches"],
            epochs=settings["num_ppo_epochs"],
            recompute=bool(settings["gradient_checkpointing"]),
            forward_tokens=settings["local_rollout_forward_batch_size"] * longest,
            train_tokens=settings["per_device_train_batch_size"] * longest,
        )


def read_task(recipe: str | Path, prompt_tokens: float | None = None) -> Task:
    """A recipe's models and settings.

    A model whose folder is not there yet is looked for beside the recipe, by the last part of its name.

    Raises:
        PlanError: no such recipe, a misspelt key in it, one that names no models, or a model without a config.
    """
    path = Path(recipe)
    settings = read_settings(path)
    check_keys(path)
    policy = next((settings[key] for key in POLICY if key in settings), None)
    reward = settings.get("reward_model_path")
    critic = settings.get("value_model_path", reward)
    if policy is None or critic is None:
        raise PlanError(f"{path} names no models; it needs sft_model_path and reward_model_path.")
    actor, scores = _folder(policy, path), _folder(reward or critic, path)
    folders = {Role.ACTOR: actor, Role.REFERENCE: actor, Role.REWARD: scores, Role.CRITIC: _folder(critic, path)}
    known = {key: settings.get(key, default) for key, default in DEFAULTS.items()}
    return Task(path, folders, known, prompt_tokens or PROMPT_TOKENS)


def read_settings(path: Path) -> dict[str, Any]:
    """A recipe's settings as they are written. Raises `PlanError` where there is no such file, or no mapping in it."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"the recipe {path} cannot be read ({error.strerror}).") from None
    except yaml.YAMLError as error:
        raise PlanError(f"{path}: the recipe is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(settings, dict):
        raise PlanError(f"{path}: a recipe is a mapping of settings like `learning_rate: 3.0e-6`.")
    return settings


def check_keys(recipe: str | Path) -> None:
    """Refuse a recipe with a key that is no setting but nearly one. A key unlike any may be a script's own, and is left
    to it; a run reads every key.

    Raises:
        PlanError: each such key with the nearest setting.
    """
    known = files(__package__).joinpath("settings.txt").read_text(encoding="utf-8").split()
    problems = Problems()
    for key in read_settings(Path(recipe)):
        near = None if key in known else nearest(key, known, at_least=LIKE)
        if near:
            problems.append(f"{recipe}: no setting {str(key)!r}; did you mean {near!r}?")
    problems.refuse()


def is_recipe(path: str | Path) -> bool:
    """Whether a file looks like a recipe and not like a plan."""
    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return False
    return isinstance(settings, dict) and "calls" not in settings


def _folder(model: str, recipe: Path) -> Path:
    for folder in (Path(model), recipe.parent / model, recipe.parent / Path(model).name):
        if (folder / "config.json").is_file():
            return folder
    raise PlanError(
        f"{recipe}: there is no config.json in {model!r}, nor in {recipe.parent / Path(model).name}; give a model's "
        f"folder on disk."
    )
