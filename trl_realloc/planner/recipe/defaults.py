"""The settings of recipes by algorithm: their defaults, which of them are booleans, which algorithm a recipe is for,
and the batches of GRPO and RLOO."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.errors import PlanError, shown, suggest
from ...common.settings import DTYPES
from ...plan.cluster import Cluster
from ..cost.device_memory import HEADROOM
from ..cost.workload import Workload
from ..search.space import UNKNOWN_OPTIMIZER, TrainingSplits


_SHARED: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": True,
    "activation_checkpointing": None,
    "vllm_gpu_memory_utilization": None,
    "vllm_enable_sleep_mode": None,
    "memory_headroom": HEADROOM,
    "bf16": True,
    "fp16": False,
    "full_determinism": False,
    "optim": "adamw_torch_fused",
}

# A recipe's settings that the planner reads, with the defaults of `PPOConfig`, `GRPOConfig` and `RLOOConfig`.
DEFAULTS: Mapping[str, Any] = {
    **_SHARED,
    "generation_engine": "vllm",
    "num_mini_batches": 1,
    "num_ppo_epochs": 4,
    "response_length": 53,
    "local_rollout_forward_batch_size": 64,
    "whiten_rewards": False,
    "match_trl": False,
    "fused_training": None,
    "max_staleness": 0,
    "vllm_importance_sampling_correction": None,
}
_GROUPS: Mapping[str, Any] = {
    **_SHARED,
    "max_completion_length": 512,
    "num_iterations": 1,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "use_vllm": None,
    "vllm_max_model_length": None,
    "max_staleness": 0,
    "model_init_kwargs": None,
}
DEFAULTS_OF: Mapping[str, Mapping[str, Any]] = {
    "ppo": DEFAULTS,
    "grpo": {**_GROUPS, "num_generations": 8, "beta": 0.0, "vllm_importance_sampling_correction": True},
    "rloo": {**_GROUPS, "num_generations": 2, "beta": 0.05, "vllm_importance_sampling_correction": None},
}

# that of TRL's `ModelConfig`, for scripts that load models
LOADING: Mapping[str, Any] = {"dtype": "float32"}

# Booleans of these, and the texts that a run's parser reads as booleans, in small letters.
BOOLEANS = (
    "gradient_checkpointing",
    "activation_checkpointing",
    "vllm_enable_sleep_mode",
    "bf16",
    "fp16",
    "full_determinism",
    "use_vllm",
    "whiten_rewards",
    "match_trl",
    "fused_training",
    "vllm_importance_sampling_correction",
    "use_peft",
)
# algorithms that have no trainer here, and what there is in their place
_ELSEWHERE = {
    "remax": "the executor runs it (docs/algorithms.md)",
    "reinforce++": "GRPO with scale_rewards: batch divides by the deviation of the whole batch as it does",
    "dpo": "it generates nothing; TRL's DPOTrainer trains by it",
}
# Of every `optim` that a run knows (`trainer.run.optimizer_sharding`, which needs torch)
_KNOWN_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop"), TrainingSplits()),
    "adagrad": TrainingSplits(by_deepspeed=False),
    "adafactor": TrainingSplits(elements=False),
}
_TRUE = ("yes", "true", "t", "y", "1")
_FALSE = ("no", "false", "f", "n", "0")

# the planner's own key in a recipe, and how many processes `trl-realloc grpo` starts; a run's parser leaves them out
ALGORITHM = "algorithm"
LAUNCH: Mapping[str, type] = {
    "accelerate_config": str,
    "num_processes": int,
    "num_machines": int,
    "machine_rank": int,
    "main_process_ip": str,
    "main_process_port": int,
}
# settings that one algorithm alone has, by which a recipe without `algorithm` is known
_PPO = ("sft_model_path", "reward_model_path", "value_model_path", "num_ppo_epochs", "num_mini_batches", "kl_coef")
_RLOO = ("normalize_advantages", "reward_clip_range")
_GRPO = ("num_generations", "max_completion_length", "num_iterations", "steps_per_generation", "generation_batch_size")
_GRPO_ALONE = ("loss_type", "scale_rewards", "importance_sampling_level")


def training_splits(optim: str) -> TrainingSplits:
    """Splits of a training call that an optimizer allows, by the optimizer's name."""
    return _KNOWN_OPTIMIZERS.get(optim, UNKNOWN_OPTIMIZER)


def read_booleans(settings: Mapping[str, Any]) -> tuple[dict[str, bool | None], list[str]]:
    """(read, problems): the booleans that a recipe writes as text, read as a run's parser reads them, and a sentence
    for each value that is no boolean. `None` stays, because some of these settings may be unset."""
    read: dict[str, bool | None] = {}
    problems: list[str] = []
    for name in BOOLEANS:
        value = settings.get(name)
        word = value.lower() if isinstance(value, str) else None
        if word in (*_TRUE, *_FALSE):
            read[name] = word in _TRUE
        elif value in (0, 1):
            read[name] = bool(value)
        elif value is not None and not isinstance(value, bool):
            problems.append(f"{name} must be true or false, not {shown(value)}.")
    if read.get("bf16") and read.get("fp16"):
        problems.append("bf16 and fp16 are both true; keep one of them.")
    return read, problems


def recomputes(settings: Mapping[str, Any]) -> bool:
    """True if training computes every forward again in its backward: `activation_checkpointing` or, if it is not set,
    its older name `gradient_checkpointing`, as in Transformers."""
    given = settings["activation_checkpointing"]
    return bool(settings["gradient_checkpointing"] if given is None else given)


def trained_dtype(settings: Mapping[str, Any]) -> str | None:
    """The dtype in which a recipe loads the models that it trains, by torch's name: that of `model_init_kwargs`, or
    `dtype`. `None` for that of their checkpoint.

    Raises:
        PlanError: `model_init_kwargs` is no mapping, or has a dtype that there is not.
    """
    settings = {**LOADING, **settings}
    name = dtype_name(init_kwargs(settings.get("model_init_kwargs")), settings["dtype"])
    if name not in DTYPES:
        raise PlanError(f"model_init_kwargs: there is no dtype {shown(name)}; {suggest(name, DTYPES)}")
    return None if name == "auto" else name


def init_kwargs(given: object) -> Mapping[str, Any]:
    """A `model_init_kwargs` that may be unset, or the text of a JSON object.

    Raises:
        PlanError: it is neither.
    """
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            given = json.loads(given)
    if not isinstance(given, Mapping | None):
        raise PlanError(f"model_init_kwargs is a mapping such as {{dtype: bfloat16}}, not {shown(given)}.")
    return given or {}


def dtype_name(given: Mapping[str, Any], default: object = "float32") -> str:
    """The dtype of a `model_init_kwargs`, by torch's name or `auto`. Whether there is such a dtype is not checked.

    Args:
        default: where it has none.
    """
    return str(given.get("dtype", given.get("torch_dtype", default)) or "auto").removeprefix("torch.")


def algorithm_of(settings: Mapping[str, Any], path: Path) -> str:
    """The algorithm that a recipe is for: its `algorithm`, or the one whose settings it has. PPO where it has none of
    any.

    Raises:
        PlanError: there is no such algorithm.
    """
    named = settings.get(ALGORITHM)
    if named is not None:
        if isinstance(named, str) and named in _ELSEWHERE:
            raise PlanError(
                f"{path}: {named} has no trainer here: {_ELSEWHERE[named]}. Choose from {', '.join(DEFAULTS_OF)}."
            )
        if not isinstance(named, str) or named not in DEFAULTS_OF:
            raise PlanError(f"{path}: there is no algorithm {shown(named)}; {suggest(named, DEFAULTS_OF)}")
        return named
    if any(key in settings for key in (*_PPO, "response_length")):
        return "ppo"
    if any(key in settings for key in _RLOO):
        return "rloo"
    return "grpo" if any(key in settings for key in (*_GRPO, *_GRPO_ALONE)) else "ppo"


def group_workload(
    settings: Mapping[str, Any], prompt_tokens: float, cluster: Cluster, episodes: int | None = None
) -> Workload:
    """One generation of GRPO or RLOO, in which every response has `max_completion_length` tokens.

    Args:
        episodes: responses of a generation on any cluster, of as many micro-batches as the settings say; by default as
            many as the settings say for this cluster.

    Raises:
        PlanError: the batch is not of whole groups, or as `_micro_batches`.
    """
    share, group = settings["per_device_train_batch_size"], settings["num_generations"]
    each = share * cluster.size
    steps = _micro_batches(settings, each, cluster, is_exact=episodes is None)
    if episodes is not None and episodes % group:
        raise PlanError(f"{episodes} episodes are not groups of num_generations {group}.")
    if episodes is None and each * steps % group:
        raise PlanError(
            f"the {each * steps} responses of a generation (per_device_train_batch_size {share} on {cluster.size} "
            f"devices, {steps} steps_per_generation) are not groups of num_generations {group}; change one of them."
        )
    longest = round(prompt_tokens + settings["max_completion_length"])
    episodes = episodes or each * steps
    return Workload.of_groups(
        steps_per_generation=steps,
        gradient_accumulation_steps=settings["gradient_accumulation_steps"],
        num_iterations=settings["num_iterations"],
        episodes=episodes,
        prompt_tokens=prompt_tokens,
        response_tokens=(settings["max_completion_length"],),
        recompute=recomputes(settings),
        forward_tokens=share * longest,
        generation_batch=-(-episodes // cluster.size),
        train_tokens=share * longest,
        completions=group,
    )


def _micro_batches(settings: Mapping[str, Any], each: int, cluster: Cluster, *, is_exact: bool) -> int:
    """The micro-batches of a generation.

    TRL generates `generation_batch_size` responses at a time: `steps_per_generation` micro-batches of
    `per_device_train_batch_size` responses on each device. An optimizer step trains on `gradient_accumulation_steps` of
    the micro-batches.

    Args:
        each: responses of a micro-batch on all devices.
        is_exact: refuse a generation that is not of whole micro-batches.

    Raises:
        PlanError: both sizes are given, or the batch is not of whole micro-batches.
    """
    steps, batch = settings["steps_per_generation"], settings["generation_batch_size"]
    if steps and batch:
        raise PlanError("generation_batch_size and steps_per_generation are both set; keep one of them.")
    if not batch:
        return int(steps or settings["gradient_accumulation_steps"])
    if is_exact and batch % each:
        raise PlanError(
            f"generation_batch_size {batch} does not divide into micro-batches of {each} responses "
            f"(per_device_train_batch_size {each // cluster.size} on {cluster.size} devices); change one of them."
        )
    return max(1, int(batch) // each)
