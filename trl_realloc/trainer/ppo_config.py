"""`PPOConfig`: TRL's settings of PPO (`trl_ppo_config`) and those of plans and engines.

Settings are checked in `config_checks`; data and models in `ppo_setup`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..algorithms.ppo_settings import PPOSettings
from .checks.config_checks import ConfigError
from .plan_settings import DICT_FIELDS, FLAG, PlanSettings, before_training_arguments, setting
from .trl_compat import ConfigBase
from .trl_ppo_config import TRLPPOConfig


@dataclass
class PPOConfig(PlanSettings, TRLPPOConfig):
    r"""
    Configuration of [`PPOTrainer`]: the settings of TRL 1.12's `PPOConfig`, which `TRLPPOConfig` lists, those of plans
    and engines, which `PlanSettings` lists, and those below. On a machine without an accelerator `bf16` is False by
    default.

    Parameters:
        generation_engine (`str`, *optional*):
            Engine that generates: `vllm` or `transformers`. Default: vllm if it is installed.
        value_learning_rate (`float`, *optional*):
            Learning rate of the critic. Default: the policy's.
        reward_weights (`list[float]`, *optional*):
            Weight of each reward, if there are several. Default: 1 each.
        match_trl (`bool`, *optional*, defaults to `False`):
            Reproduction of the parts of TRL 1.12's arithmetic that depend on the layout of a batch; see
            docs/differences.md.
        max_staleness (`int`, *optional*, defaults to `0`):
            Maximum age of a token, in updates, relative to the policy that is trained on it; 0 is synchronous. Above 0
            `vllm_importance_sampling_correction` must be set.
        fused_training (`bool`, *optional*):
            Permission for `plan: auto` to train policy and critic at the same time in fused pipelines. Default:
            true on CPUs, false on GPUs, where no measurement shows a gain. See docs/fused_pipelines.md.
        vllm_importance_sampling_correction (`bool`, *optional*):
            Weighting of the loss by the probability ratio of the trained policy to the policy that sampled the tokens,
            as in TRL's GRPO, for rollouts of an older policy and for engines that compute in another precision. The
            plan then has the call `actor.forward`. `False`: PPO's ratio is to the policy that sampled the tokens.
            Default: `False` if `max_staleness` is 0; otherwise the setting is required. See docs/old_rollouts.md.
        vllm_importance_sampling_mode (`str`, *optional*, defaults to `"sequence_mask"`):
            Kind of weights: `token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`. One weight per
            token or per response; weights outside the bounds are set to the bound (`truncate`) or to 0 (`mask`).
        vllm_importance_sampling_clip_max (`float`, *optional*, defaults to `3.0`):
            Upper bound of a weight. `None`: no bound.
        vllm_importance_sampling_clip_min (`float`, *optional*):
            Lower bound of a weight. `None`: no bound.
        vllm_gpu_memory_utilization (`float`, *optional*):
            Share of a GPU's memory for a vLLM engine beside training. Default: the planner's choice on one GPU
            (`memory_share` in a plan), otherwise 0.3.
        vllm_enable_sleep_mode (`bool`, *optional*):
            Sleep mode of vLLM engines: they free their memory while others use their GPUs (`drop` in a plan). `True`
            for all engines without `offload` in the plan, `False` for no engine of a plan that the planner chooses.
            Default: as in the plan; the planner lets them sleep if no plan fits otherwise.
        router_replay (`str`, *optional*):
            Experts of a mixture in the training of the policy. `rollout`: those with which the vLLM engine sampled each
            token. `recompute`: those of the call `actor.forward`, before the first update on a batch. `none`: those
            that the trained model chooses in each forward. Default: `rollout` where engine and model compute in 16
            bits, in which the two choose differently for some tokens. See docs/mismatch.md
    """

    _VALID_DICT_FIELDS = [*getattr(ConfigBase, "_VALID_DICT_FIELDS", []), *DICT_FIELDS]

    generation_engine: str | None = setting(None, "`vllm` or `transformers`. Default: vllm where it is installed.")
    value_learning_rate: float | None = setting(None, "Learning rate of the critic. Default: the policy's.")
    reward_weights: list[float] | None = setting(
        None, "A weight for each reward, where there are several. Default: 1 each."
    )
    match_trl: bool = setting(
        False, "Reproduce what in TRL 1.12's arithmetic depends on how a batch is laid out; see docs/differences.md."
    )
    max_staleness: int = setting(
        0,
        "Maximum age of a token, in updates, relative to the policy that is trained on it; 0 is synchronous. Above 0 "
        "`vllm_importance_sampling_correction` must be set.",
    )
    fused_training: bool | None = setting(
        None, "Whether a plan of `plan: auto` may train policy and critic in fused pipelines. Default: on CPUs.", **FLAG
    )
    vllm_importance_sampling_correction: bool | None = setting(
        None,
        "Weight the loss by the probability ratio of the trained policy to the one that sampled the tokens; see "
        "docs/old_rollouts.md. Default: no if `max_staleness` is 0; otherwise required.",
        **FLAG,
    )
    vllm_importance_sampling_mode: str = setting(
        "sequence_mask",
        "`token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`: a weight for each token "
        "or response; weights outside the bounds are set to the bound or to 0.",
    )
    vllm_importance_sampling_clip_max: float | None = setting(3.0, "Upper bound of a weight. None: no bound.")
    vllm_importance_sampling_clip_min: float | None = setting(None, "Lower bound of a weight. None: no bound.")
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

    if TYPE_CHECKING:  # defined by TrainingArguments
        ddp_backend: str | None = None
        metric_for_best_model: str | None = None
        bf16: bool | None = None

    def __post_init__(self) -> None:
        with before_training_arguments(self):
            super().__post_init__()
        if str(self.metric_for_best_model).removeprefix("eval_") == "loss":  # may be set by the line above
            raise ConfigError(
                "metric_for_best_model is 'loss' (the default), which no evaluation of PPO has; set one that it has, "
                "e.g. 'eval_objective/scores' (with greater_is_better=True)."
            )

    def set_batch_sizes(self, processes: int, dataset_size: int) -> None:
        """Fill in the computed fields, as TRL does.

        Raises:
            ConfigError: the batch is larger than the dataset, or `num_mini_batches` does not divide it.
        """
        self.world_size = processes
        self.local_batch_size = self.per_device_train_batch_size * self.gradient_accumulation_steps
        self.micro_batch_size = self.per_device_train_batch_size * processes
        self.batch_size = self.local_batch_size * processes
        if self.local_batch_size % self.num_mini_batches:
            raise ConfigError(
                f"per_device_train_batch_size {self.per_device_train_batch_size} x gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} = {self.local_batch_size} episodes do not divide into "
                f"num_mini_batches {self.num_mini_batches} equal parts; change one of the three."
            )
        self.mini_batch_size = self.batch_size // self.num_mini_batches
        self.local_mini_batch_size = self.local_batch_size // self.num_mini_batches
        if dataset_size < self.batch_size:
            raise ConfigError(
                f"train_dataset has {dataset_size} rows, fewer than the {self.batch_size} of one batch "
                f"({processes} processes x per_device_train_batch_size {self.per_device_train_batch_size} x "
                f"gradient_accumulation_steps {self.gradient_accumulation_steps}); lower one of them."
            )
        if self.total_episodes is None:
            self.total_episodes = int(self.num_train_epochs * dataset_size)
        self.num_total_batches = -(-self.total_episodes // self.batch_size)
        if self.max_steps > 0:
            self.num_total_batches = self.max_steps
            self.total_episodes = self.max_steps * self.batch_size

    def ppo_settings(self) -> PPOSettings:
        """The settings of PPO's arithmetic."""
        names: dict[str, Any] = {name: getattr(self, name) for name in PPOSettings.__dataclass_fields__}
        return PPOSettings(**names)


def check_config(args: object) -> None:
    """Check the type of the training arguments.

    Raises:
        ConfigError: `args` is not a `PPOConfig` of this package.
    """
    if not isinstance(args, PPOConfig):
        kind = f"{type(args).__module__}.{type(args).__name__}"
        raise ConfigError(f"args must be a trl_realloc.PPOConfig, not a {kind}; import PPOConfig from trl_realloc.")
