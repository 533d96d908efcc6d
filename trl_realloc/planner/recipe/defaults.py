"""The settings of recipes by algorithm: defaults, booleans, the algorithm of a recipe, and the batches of GRPO and
RLOO."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.errors import PlanError, shown, suggest
from ...common.settings import DTYPES
from ...plan.cluster import Cluster
from ...plan.quantization import Quantization
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

# defaults of TRL's `ModelConfig`, for scripts that load models
LOADING: Mapping[str, Any] = {
    "dtype": "float32",
    "load_in_4bit": False,
    "load_in_8bit": False,
    "use_bnb_nested_quant": False,
}

# settings that are booleans
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
    "load_in_4bit",
    "load_in_8bit",
    "use_bnb_nested_quant",
)
# algorithms that have no trainer here, with the alternative
_ELSEWHERE = {
    "remax": "the executor runs it (docs/algorithms.md)",
    "reinforce++": "GRPO with scale_rewards: batch divides by the deviation of the whole batch as it does",
    "dpo": "it generates nothing; TRL's DPOTrainer trains by it",
}
# splits that each supported `optim` allows; the same as `trainer.run.optimizer_sharding`, which needs torch
_KNOWN_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop"), TrainingSplits()),
    "adagrad": TrainingSplits(by_deepspeed=False),
    "adafactor": TrainingSplits(elements=False),
}
# texts in lower case that a run's parser reads as booleans
_TRUE = ("yes", "true", "t", "y", "1")
_FALSE = ("no", "false", "f", "n", "0")

# keys that a run's parser ignores: the algorithm for the planner, and the settings of `trl-realloc grpo` for launching
ALGORITHM = "algorithm"
LAUNCH: Mapping[str, type] = {
    "accelerate_config": str,
    "num_processes": int,
    "num_machines": int,
    "machine_rank": int,
    "main_process_ip": str,
    "main_process_port": int,
}
# settings that only one algorithm has, which identify a recipe without `algorithm`
_PPO = ("sft_model_path", "reward_model_path", "value_model_path", "num_ppo_epochs", "num_mini_batches", "kl_coef")
_RLOO = ("normalize_advantages", "reward_clip_range")
_GRPO = ("num_generations", "max_completion_length", "num_iterations", "steps_per_generation", "generation_batch_size")
_GRPO_ALONE = ("loss_type", "scale_rewards", "importance_sampling_level")


def training_splits(optim: str) -> TrainingSplits:
    """Splits of a training call that an optimizer (a value of `optim`) allows."""
    return _KNOWN_OPTIMIZERS.get(optim, UNKNOWN_OPTIMIZER)


def read_booleans(settings: Mapping[str, Any]) -> tuple[dict[str, bool | None], list[str]]:
    """(read, problems): the booleans that a recipe has as text or number, as a run's parser reads them, and a sentence
    for each value that is no boolean. `None` is not read, because some settings may be unset."""
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
    """True if training uses activation checkpointing: `activation_checkpointing` or, if it is not set, its older name
    `gradient_checkpointing`, as in Transformers."""
    setting = settings.get("activation_checkpointing")  # older releases of Transformers have no such argument
    return bool(settings["gradient_checkpointing"] if setting is None else setting)


def trained_dtype(settings: Mapping[str, Any]) -> str | None:
    """Name of the torch dtype in which a recipe loads the models that it trains: that of `model_init_kwargs`, or
    `dtype`. `None` for the checkpoint's dtype.

    Raises:
        PlanError: `model_init_kwargs` is no mapping, or has an unknown dtype.
    """
    settings = {**LOADING, **settings}
    name = dtype_name(init_kwargs(settings.get("model_init_kwargs")), settings["dtype"])
    if name not in DTYPES:
        raise PlanError(f"model_init_kwargs: there is no dtype {shown(name)}; {suggest(name, DTYPES)}")
    return None if name == "auto" else name


def quantization_of(settings: Mapping[str, Any]) -> Quantization | None:
    """The format in which a recipe quantizes its policy: by TRL's settings, or by `model_init_kwargs`.

    Raises:
        PlanError: the settings exclude each other, or the recipe trains no adapters.
    """
    settings = {**LOADING, **settings}
    chosen = [name for name in ("load_in_4bit", "load_in_8bit") if settings[name]]
    given = init_kwargs(settings.get("model_init_kwargs")).get("quantization_config")
    if len(chosen) + (given is not None) > 1:
        others = ["quantization_config"] if given is not None else []
        raise PlanError(f"{' and '.join([*chosen, *others])} are both set; keep one of them.")
    nested = {"bnb_4bit_use_double_quant": settings["use_bnb_nested_quant"]}
    found = Quantization.of(given if given is not None else {**nested, **dict.fromkeys(chosen, True)})
    if found is not None and not settings.get("use_peft"):
        name = "quantization_config" if given is not None else chosen[0]
        raise PlanError(f"{name}: quantized weights are not trained, only adapters over them; set use_peft: true.")
    return found


def init_kwargs(setting: object) -> Mapping[str, Any]:
    """The mapping of a `model_init_kwargs`, which may be `None`, a mapping or the text of a JSON object.

    Raises:
        PlanError: it is something else.
    """
    if isinstance(setting, str):
        with contextlib.suppress(ValueError):
            setting = json.loads(setting)
    if not isinstance(setting, Mapping | None):
        raise PlanError(f"model_init_kwargs is a mapping such as {{dtype: bfloat16}}, not {shown(setting)}.")
    return setting or {}


def dtype_name(kwargs: Mapping[str, Any], default: object = "float32") -> str:
    """The dtype of a `model_init_kwargs`, by torch's name or `auto`; it may be unknown.

    Args:
        default: dtype if `kwargs` has none.
    """
    return str(kwargs.get("dtype", kwargs.get("torch_dtype", default)) or "auto").removeprefix("torch.")


def algorithm_of(settings: Mapping[str, Any], path: Path) -> str:
    """The algorithm of a recipe: its `algorithm`, or the one whose settings it has, or else PPO.

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
        episodes: number of responses of a generation, with the settings' number of micro-batches; *optional*, defaults
            to the settings' number for this cluster.

    Raises:
        PlanError: the batch does not divide into prompt groups or micro-batches, or both of its sizes are set.
    """
    share, group = settings["per_device_train_batch_size"], settings["num_generations"]
    micro_batch = share * cluster.size
    steps = _micro_batches(settings, micro_batch, cluster, is_exact=episodes is None)
    if episodes is not None and episodes % group:
        raise PlanError(f"{episodes} episodes are not groups of num_generations {group}.")
    if episodes is None and micro_batch * steps % group:
        raise PlanError(
            f"the {micro_batch * steps} responses of a generation (per_device_train_batch_size {share} on "
            f"{cluster.size} devices, {steps} steps_per_generation) are not groups of num_generations {group}; "
            f"change one of them."
        )
    longest = round(prompt_tokens + settings["max_completion_length"])
    episodes = episodes or micro_batch * steps
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


def _micro_batches(settings: Mapping[str, Any], size: int, cluster: Cluster, *, is_exact: bool) -> int:
    """The number of micro-batches of a generation, of `size` responses on all devices.

    TRL generates `generation_batch_size` responses at a time: `steps_per_generation` micro-batches of
    `per_device_train_batch_size` responses on each device. An optimizer step trains on `gradient_accumulation_steps` of
    the micro-batches. `is_exact` refuses a generation that does not divide into micro-batches.
    """
    steps, batch = settings["steps_per_generation"], settings["generation_batch_size"]
    if steps and batch:
        raise PlanError("generation_batch_size and steps_per_generation are both set; keep one of them.")
    if not batch:
        return int(steps or settings["gradient_accumulation_steps"])
    if is_exact and batch % size:
        raise PlanError(
            f"generation_batch_size {batch} does not divide into micro-batches of {size} responses "
            f"(per_device_train_batch_size {size // cluster.size} on {cluster.size} devices); change one of them."
        )
    return max(1, int(batch) // size)
