"""`GRPOConfig` and `RLOOConfig`: the settings of the installed TRL's classes of the same names, plus those of plans and
engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..plan.staleness import uncorrected
from ..planner.recipe.defaults import dtype_name, init_kwargs
from .checks.config_checks import ConfigError
from .plan_settings import DICT_FIELDS, FLAG, PlanSettings, before_training_arguments, setting
from .trl_compat import TRLGRPOConfig, TRLRLOOConfig


if TYPE_CHECKING:
    from transformers import PretrainedConfig, TrainingArguments


# What `model_init_kwargs` may have. Engines decide placement and decoding; Accelerate trains models with custom code.
_INIT_KWARGS = {
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "device_map",
    "use_cache",
    "low_cpu_mem_usage",
    "trust_remote_code",
    "quantization_config",
}
_WITHOUT_EFFECT = (None, False, "", "main")  # values of the others that request nothing, as passed by TRL's scripts
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class GenerationSettings(PlanSettings):
    """
    TRL's settings with other defaults here, because the plan decides what generates.

    Parameters:
        use_vllm (`bool`, *optional*):
            Generation engine. `True`: vLLM, with GRPO's loss corrected for its log-probabilities
            (`vllm_importance_sampling_correction`). `False`: the trained models, with Transformers. Default: vLLM if it
            is installed and serves the model. The plan sets the devices; no server is started.
        vllm_gpu_memory_utilization (`float`, *optional*):
            Share of a GPU's memory for a vLLM engine beside training. Default: the planner's choice on one GPU
            (`memory_share` in a plan), otherwise 0.3.
        vllm_enable_sleep_mode (`bool`, *optional*):
            Sleep mode of vLLM engines: they free their memory while others use their GPUs. Default: as in the plan; the
            planner lets them sleep if no plan fits otherwise.
        router_replay (`str`, *optional*):
            Experts of a mixture in the training of the policy. `rollout`: those with which the vLLM engine sampled each
            token. `recompute`: those of the trained model's forward before the first update on a batch. `none`: those
            that the trained model chooses in each forward. Default: `rollout` where engine and model compute in 16
            bits, in which the two choose differently for some tokens. See docs/mismatch.md
        max_staleness (`int`, *optional*, defaults to `0`):
            Maximum number of generations that completions may be generated ahead. They are generated on separate
            devices during training, by a policy that lacks the training on up to this many generations. The loss must
            be corrected for it (`vllm_importance_sampling_correction`). See docs/old_rollouts.md
        score_groups_early (`bool`, *optional*, defaults to `False`):
            Async reward functions are called for each group of completions of GRPO when its last one has ended, while
            other completions go on. For functions that score a completion by itself or within its group, and where
            completions call tools.
        full_vocabulary_logprobs (`bool`, *optional*, defaults to `False`):
            Log-probabilities and entropies of policy and reference over the whole vocabulary even if `top_p`, `top_k`
            or `min_p` exclude tokens, as in TRL. By default they are over the tokens that these settings keep, like the
            engine's, so that the importance ratio is right. See docs/differences.md
    """

    full_vocabulary_logprobs: bool = setting(
        False, "Log-probabilities over the whole vocabulary, as TRL's, where top_p, top_k or min_p are set."
    )

    use_vllm: bool | None = setting(
        None, "Generate by vLLM engines, or by the training's models. Default: vLLM, if it can.", **FLAG
    )
    vllm_gpu_memory_utilization: float | None = setting(
        None, "Share of a GPU's memory for a vLLM engine. Default: the planner's on one GPU, else 0.3."
    )
    vllm_enable_sleep_mode: bool | None = setting(
        None, "Whether vLLM engines give their memory back while others use their GPUs.", **FLAG
    )

    router_replay: str | None = setting(
        None,
        "Experts of a mixture in the training: the engine's (`rollout`), a first forward's (`recompute`) or `none`.",
    )

    max_staleness: int = setting(0, "Maximum number of generations that completions may be generated ahead.")

    score_groups_early: bool = setting(False, "Async reward functions are called for each group as it ends.")

    if TYPE_CHECKING:  # defined by TRL
        bf16: bool | None = None

    @property
    def generation_engine(self) -> str | None:
        """The engine that `use_vllm` requests."""
        return None if self.use_vllm is None else "vllm" if self.use_vllm else "transformers"

    def __post_init__(self) -> None:
        _check(self)
        with before_training_arguments(self):
            super().__post_init__()  # type: ignore[misc]  # TRL's


@dataclass
class GRPOConfig(GenerationSettings, TRLGRPOConfig):
    r"""
    Configuration of [`GRPOTrainer`]: the settings of TRL's `GRPOConfig` and those of plans and engines, which
    `PlanSettings` and `GenerationSettings` list. On a machine without an accelerator `bf16` is False by default.

    Parameters:
        tool_workers (`int`, *optional*, defaults to `1`):
            Maximum number of functions in `tools` that each process runs at once. `1`: one after the other in the main
            thread, as in TRL. With more, the functions must allow calls from several threads. Async tools and methods
            of environments, of which each completion has an instance, run at once in any case, unless this is `0`: then
            the methods run in the main thread too. With `max_staleness` all run in threads, and `0` is refused. No
            effect if Accelerate trains.
        tool_timeout (`float`, *optional*):
            Timeout in seconds of a tool call. The model then reads an error, as if the tool had raised it; a function
            that is no coroutine goes on in a thread. Default: no timeout.
    """

    tool_workers: int = setting(1, "Maximum number of tools (functions) that each process runs at once.")
    tool_timeout: float | None = setting(None, "Timeout in seconds of a tool call. Default: none.")

    _VALID_DICT_FIELDS = [*getattr(TRLGRPOConfig, "_VALID_DICT_FIELDS", []), *DICT_FIELDS]


@dataclass
class RLOOConfig(GenerationSettings, TRLRLOOConfig):
    r"""
    Configuration of [`RLOOTrainer`]: the settings of TRL's `RLOOConfig` and those of plans and engines, which
    `PlanSettings` and `GenerationSettings` list. On a machine without an accelerator `bf16` is False by default.

    Parameters:
        vllm_importance_sampling_correction (`bool`, *optional*):
            Denominator of a completion's probability ratio, which the loss clips by `epsilon`. `True`: the policy that
            sampled it, with the vLLM engine's log-probabilities. `False`: the policy before the first training on it,
            as in TRL, whose RLOO does not have this setting. Default: `False`, until the mismatch of engine and trainer
            exceeds `max_mismatch`.
    """

    vllm_importance_sampling_correction: bool | None = setting(
        None, "Whether the loss's ratio of a completion is to the policy that sampled it.", **FLAG
    )

    _VALID_DICT_FIELDS = [*getattr(TRLRLOOConfig, "_VALID_DICT_FIELDS", []), *DICT_FIELDS]


def given_dtype(args: PolicyConfig, config: PretrainedConfig) -> torch.dtype:
    """The parameter dtype of a policy passed by name: float32, or that of `model_init_kwargs`.

    Args:
        config: config of the checkpoint, whose dtype `auto` means.
    """
    name = dtype_name(init_kwargs(args.model_init_kwargs))
    return (config.dtype or torch.float32) if name == "auto" else _DTYPES[name]


def reward_dtype(args: PolicyConfig) -> torch.dtype | None:
    """The parameter dtype of reward models passed by name; `None` for their checkpoints' dtype."""
    name = dtype_name(init_kwargs(args.model_init_kwargs), "auto")
    return None if name == "auto" else _DTYPES[name]


def given_attention(args: PolicyConfig) -> str | None:
    """The attention implementation of a policy and reward models passed by name, in Transformers' terms; `None` for the
    model's default."""
    return init_kwargs(args.model_init_kwargs).get("attn_implementation")


def given_quantization(args: PolicyConfig, model: object, argument: object) -> object:
    """The quantization with which a policy passed by name is loaded; `None` for the checkpoint's, and for a loaded
    policy.

    Args:
        argument: `quantization_config` of the trainer.

    Raises:
        ConfigError: `model_init_kwargs` has one too.
    """
    in_kwargs = init_kwargs(args.model_init_kwargs).get("quantization_config")
    if argument is not None and in_kwargs is not None:
        raise ConfigError(
            "quantization_config is both an argument of the trainer and in model_init_kwargs; leave one of them out."
        )
    return (argument or in_kwargs) if isinstance(model, str) else None


PolicyConfig = GRPOConfig | RLOOConfig


def _check(args: TrainingArguments) -> None:
    """Refuse TRL settings that a plan decides or that no engine supports.

    Raises:
        ConfigError: lists all of them.
    """
    if problems := list(_problems(args)):
        raise ConfigError("\n".join(problems))


def _problems(args: TrainingArguments) -> Iterator[str]:
    if problem := uncorrected(args.max_staleness, args.vllm_importance_sampling_correction):
        yield problem
    if not isinstance(args.use_vllm, bool | None):
        yield f"use_vllm must be true, false or None, not {args.use_vllm!r}."


def check_init_kwargs(args: PolicyConfig) -> None:
    """Check the loading settings of a policy and reward models passed by name.

    Raises:
        ConfigError: the engines that read the model do not know a setting.
    """
    kwargs = init_kwargs(args.model_init_kwargs)
    if further := sorted(
        name for name, value in kwargs.items() if name not in _INIT_KWARGS and value not in _WITHOUT_EFFECT
    ):
        raise ConfigError(
            f"model_init_kwargs has {', '.join(further)}, which engines that read in parts do not know; load the "
            f"model yourself, and pass the loaded model."
        )
    if (name := dtype_name(kwargs)) not in (*_DTYPES, "auto"):
        raise ConfigError(f"model_init_kwargs: dtype is one of {', '.join(_DTYPES)} and auto, not {name!r}.")


__all__ = ["GRPOConfig", "PolicyConfig", "RLOOConfig"]
