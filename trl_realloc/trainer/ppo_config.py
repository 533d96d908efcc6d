"""`PPOConfig`: the fields of TRL 1.12's `PPOConfig` in its order, with its defaults and meanings, and some more.

Checks the settings alone. Data and models are checked in `setup`.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from ..algorithms.ppo import PPOSettings
from ..common.errors import shown
from ..common.settings import read_settings
from ..engines.training.deepspeed_compat import leave_out_shared_memory_op
from ..plan.execution_plan import ExecutionPlan
from ..runtime.launch.hosts import has_rendezvous, meet
from ..runtime.launch.launcher import check_launch, separate_attempts
from ..runtime.launch.network_interfaces import set_gloo_interface
from .trl_compat import ConfigBase


class ConfigError(ValueError):
    """A setting that is not allowed. The message names the setting, its value and what to do."""


@dataclass
class PPOConfig(ConfigBase):
    r"""
    Configuration of [`PPOTrainer`]. Only what is particular to PPO is listed; the rest is
    [`~transformers.TrainingArguments`], with `logging_steps` 10, `gradient_checkpointing` True and `bf16` True (unless
    `fp16`) by default, as in TRL; on a machine without an accelerator `bf16` is False by default.

    Parameters:
        learning_rate (`float`, *optional*, defaults to `3e-6`):
            Initial learning rate of the policy (and of the critic, unless `value_learning_rate`).
        dataset_num_proc (`int`, *optional*):
            Processes that tokenize the dataset.
        num_mini_batches (`int`, *optional*, defaults to `1`):
            Mini-batches, and so optimizer steps, per PPO epoch.
        total_episodes (`int`, *optional*):
            Episodes to train on; by default `num_train_epochs` passes over the dataset. `max_steps`
            overrides it.
        local_rollout_forward_batch_size (`int`, *optional*, defaults to `64`):
            Samples of one forward without gradients on one rank, where the plan gives no token budget.
        num_sample_generations (`int`, *optional*, defaults to `10`):
            How often in the run a few completions are shown; 0 for never. Needs an `eval_dataset`.
        response_length (`int`, *optional*, defaults to `53`):
            Most tokens of a response.
        stop_token (`Literal["eos"]`, *optional*):
            `eos` ends a response at the tokenizer's eos token. Excludes `stop_token_id`.
        stop_token_id (`int`, *optional*):
            The token id that ends a response. With neither, every response has `response_length` tokens.
        temperature (`float`, *optional*, defaults to `0.7`):
            Sampling temperature.
        missing_eos_penalty (`float`, *optional*):
            Subtracted from the score of a response without eos token; positive.
        sft_model_path (`str`, *optional*, defaults to `"EleutherAI/pythia-160m"`):
            For scripts: the policy's starting point.
        world_size (`int`, *optional*):
            Computed: number of processes.
        num_total_batches (`int`, *optional*):
            Computed: updates of the run.
        micro_batch_size (`int`, *optional*):
            Computed: `per_device_train_batch_size` over all processes.
        local_batch_size (`int`, *optional*):
            Computed: `per_device_train_batch_size * gradient_accumulation_steps`.
        batch_size (`int`, *optional*):
            Computed: episodes of one update over all processes.
        local_mini_batch_size (`int`, *optional*):
            Computed: a process's share of a mini-batch.
        mini_batch_size (`int`, *optional*):
            Computed: episodes of one optimizer step over all processes.
        push_to_hub (`bool`, *optional*, defaults to `False`):
            Push the policy to the Hub after training.
        reward_model_path (`str`, *optional*, defaults to `"EleutherAI/pythia-160m"`):
            For scripts: the reward model.
        model_adapter_name (`str`, *optional*):
            The PEFT adapter to train, of a model with several.
        ref_adapter_name (`str`, *optional*):
            The PEFT adapter that is the reference, of a model with several.
        num_ppo_epochs (`int`, *optional*, defaults to `4`):
            Passes over a batch of rollouts.
        whiten_rewards (`bool`, *optional*, defaults to `False`):
            Whiten the rewards over the batch (their mean is kept).
        kl_coef (`float`, *optional*, defaults to `0.05`):
            Weight of the KL penalty.
        kl_estimator (`Literal["k1", "k3"]`, *optional*, defaults to `"k1"`):
            The KL estimator: k1 (straightforward) or k3 (lower variance), see http://joschu.net/blog/kl-
            approx.html.
        cliprange (`float`, *optional*, defaults to `0.2`):
            Clip range of the policy's ratio.
        vf_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the value loss.
        cliprange_value (`float`, *optional*, defaults to `0.2`):
            Clip range of the value function.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount.
        lam (`float`, *optional*, defaults to `0.95`):
            Lambda of GAE.
        ds3_gather_for_generation (`bool`, *optional*, defaults to `True`):
            Of no effect here: a generation engine is filled bucket by bucket, and holds whole parameters.
        plan (`dict | str`, *optional*):
            The execution plan: `auto` (the planner's choice), a preset (`flatten`, `interleave`, `separate`), a
            YAML file or a dict. Default: `auto`.
        generation_engine (`str`, *optional*):
            `vllm` or `transformers`. Default: vllm where it is installed.
        value_learning_rate (`float`, *optional*):
            Learning rate of the critic. Default: the policy's.
        reward_weights (`list[float]`, *optional*):
            A weight for each reward, where there are several. Default: 1 each.
        match_trl (`bool`, *optional*, defaults to `False`):
            Reproduce what in TRL 1.12's arithmetic depends on how a batch is laid out; see
            docs/differences.md.
        vllm_gpu_memory_utilization (`float`, *optional*, defaults to `0.3`):
            Share of a GPU's memory that a vLLM engine takes beside training.
        memory_headroom (`float`, *optional*, defaults to `0.1`):
            Share of a GPU's memory that a plan of `plan: auto` leaves free: for fragments of the allocator, and for
            what the estimate of a plan's memory does not count.
        skip_nonfinite_updates (`bool`, *optional*, defaults to `False`):
            Leave out an update whose samples, losses or gradients are not finite, and count it in
            `skipped_updates/*`. By default it is refused and the run ends, the state before it saved.
        async_save (`bool`, *optional*, defaults to `False`):
            Write the training state of a checkpoint in the background while training goes on. Each process copies its
            part to host memory first. The checkpoint gets its name when all processes have written theirs.
        heartbeat_timeout (`float`, *optional*):
            Seconds after which the job ends on all ranks because a rank is stopped or sends no heartbeat (its host or
            the network is down). A rank sends heartbeats during long computations too. Default: 30.
    """

    # TrlParser reads fields of type dict from YAML only where they are named here
    _VALID_DICT_FIELDS = [*getattr(ConfigBase, "_VALID_DICT_FIELDS", []), "plan"]

    learning_rate: float = field(
        default=3e-6,
        metadata={"help": "Initial learning rate of the policy (and of the critic, unless `value_learning_rate`)."},
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenize the dataset."})
    num_mini_batches: int = field(default=1, metadata={"help": "Mini-batches, and so optimizer steps, per PPO epoch."})
    total_episodes: int | None = field(
        default=None,
        metadata={
            "help": "Episodes to train on; by default `num_train_epochs` passes over the dataset. `max_steps` "
            "overrides it."
        },
    )
    local_rollout_forward_batch_size: int = field(
        default=64,
        metadata={"help": "Samples per rank of a forward without gradients, where the plan gives no token budget."},
    )
    num_sample_generations: int = field(
        default=10,
        metadata={"help": "How often in the run a few completions are shown; 0 for never. Needs an `eval_dataset`."},
    )
    response_length: int = field(default=53, metadata={"help": "Most tokens of a response."})
    stop_token: Literal["eos"] | None = field(
        default=None,
        metadata={"help": "`eos` ends a response at the tokenizer's eos token. Excludes `stop_token_id`."},
    )
    stop_token_id: int | None = field(
        default=None,
        metadata={"help": "The token id that ends a response. With neither, all have `response_length` tokens."},
    )
    temperature: float = field(default=0.7, metadata={"help": "Sampling temperature."})
    missing_eos_penalty: float | None = field(
        default=None,
        metadata={"help": "Subtracted from the score of a response without eos token; positive."},
    )
    sft_model_path: str = field(
        default="EleutherAI/pythia-160m",
        metadata={"help": "For scripts: the policy's starting point."},
    )
    world_size: int | None = field(default=None, metadata={"help": "Computed: number of processes."})
    num_total_batches: int | None = field(default=None, metadata={"help": "Computed: updates of the run."})
    micro_batch_size: int | None = field(
        default=None,
        metadata={"help": "Computed: `per_device_train_batch_size` over all processes."},
    )
    local_batch_size: int | None = field(
        default=None,
        metadata={"help": "Computed: `per_device_train_batch_size * gradient_accumulation_steps`."},
    )
    batch_size: int | None = field(
        default=None,
        metadata={"help": "Computed: episodes of one update over all processes."},
    )
    local_mini_batch_size: int | None = field(
        default=None,
        metadata={"help": "Computed: a process's share of a mini-batch."},
    )
    mini_batch_size: int | None = field(
        default=None,
        metadata={"help": "Computed: episodes of one optimizer step over all processes."},
    )
    push_to_hub: bool = field(default=False, metadata={"help": "Push the policy to the Hub after training."})
    reward_model_path: str = field(
        default="EleutherAI/pythia-160m",
        metadata={"help": "For scripts: the reward model."},
    )
    model_adapter_name: str | None = field(
        default=None,
        metadata={"help": "The PEFT adapter to train, of a model with several."},
    )
    ref_adapter_name: str | None = field(
        default=None,
        metadata={"help": "The PEFT adapter that is the reference, of a model with several."},
    )
    num_ppo_epochs: int = field(default=4, metadata={"help": "Passes over a batch of rollouts."})
    whiten_rewards: bool = field(
        default=False,
        metadata={"help": "Whiten the rewards over the batch (their mean is kept)."},
    )
    kl_coef: float = field(default=0.05, metadata={"help": "Weight of the KL penalty."})
    kl_estimator: Literal["k1", "k3"] = field(
        default="k1",
        metadata={
            "help": "The KL estimator: k1 (straightforward) or k3 (lower variance), see http://joschu.net/blog/kl- "
            "approx.html."
        },
    )
    cliprange: float = field(default=0.2, metadata={"help": "Clip range of the policy's ratio."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    cliprange_value: float = field(default=0.2, metadata={"help": "Clip range of the value function."})
    gamma: float = field(default=1.0, metadata={"help": "Discount."})
    lam: float = field(default=0.95, metadata={"help": "Lambda of GAE."})
    ds3_gather_for_generation: bool = field(
        default=True,
        metadata={"help": "Of no effect here: generation engines are filled bucket by bucket."},
    )
    # Fields that TRL does not have
    plan: dict | str | None = field(
        default=None,
        metadata={
            "help": "The execution plan: `auto` (the planner's choice), a preset (`flatten`, `interleave`, "
            "`separate`), a YAML file or a dict. Default: `auto`."
        },
    )
    generation_engine: str | None = field(
        default=None,
        metadata={"help": "`vllm` or `transformers`. Default: vllm where it is installed."},
    )
    value_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of the critic. Default: the policy's."},
    )
    reward_weights: list[float] | None = field(
        default=None,
        metadata={"help": "A weight for each reward, where there are several. Default: 1 each."},
    )
    match_trl: bool = field(
        default=False,
        metadata={
            "help": "Reproduce what in TRL 1.12's arithmetic depends on how a batch is laid out; see "
            "docs/differences.md."
        },
    )
    vllm_gpu_memory_utilization: float = field(
        default=0.3,
        metadata={"help": "Share of a GPU's memory that a vLLM engine takes beside training."},
    )
    memory_headroom: float = field(
        default=0.1,
        metadata={"help": "Share of a GPU's memory that a plan of `plan: auto` leaves free."},
    )
    skip_nonfinite_updates: bool = field(
        default=False,
        metadata={"help": "Leave out and count updates that are not finite, where otherwise the run ends."},
    )
    async_save: bool = field(
        default=False,
        metadata={"help": "Write a checkpoint's training state in the background while training goes on."},
    )
    heartbeat_timeout: float | None = field(
        default=None,
        metadata={"help": "Seconds after which a stopped or silent rank ends the job on all ranks. Default: 30."},
    )

    if TYPE_CHECKING:  # TrainingArguments' own
        ddp_backend: str | None = None
        metric_for_best_model: str | None = None
        bf16: bool | None = None

    def __post_init__(self) -> None:
        no_accelerator = not torch.accelerator.is_available()
        if no_accelerator and not self.use_cpu and self.bf16 is None:
            self.bf16 = False  # TRL's default, True, is refused by Transformers on such a machine
        if no_accelerator and self.ddp_backend is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self.ddp_backend = "gloo"  # without it Accelerate takes CPU processes for unrelated ones
        self._check()
        check_launch(self)
        set_gloo_interface()
        separate_attempts()
        if not dist.is_initialized() and has_rendezvous():
            meet()  # before the lines below make a process group, which would wait for a host that cannot be reached
        if self.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            leave_out_shared_memory_op()  # which the line below would compile
        with warnings.catch_warnings():
            # the default is TRL's, under the name that TRL has for it
            warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)
            super().__post_init__()
        if str(self.metric_for_best_model).removeprefix("eval_") == "loss":  # which the line above may have set
            raise ConfigError(
                "metric_for_best_model is 'loss' (the default), which no evaluation of PPO has; set one that it has, "
                "e.g. 'eval_objective/scores' (with greater_is_better=True)."
            )

    def _check(self) -> None:
        """Raises `ConfigError` with all settings that are not allowed. Runs before `TrainingArguments` computes values
        from them, whose errors would not name the setting."""
        read, problems = read_settings({field.name: getattr(self, field.name, None) for field in fields(self)})
        for name, value in read.items():
            setattr(self, name, value)  # numbers of NumPy as Python's, 1e4 episodes as 10000
        if self.stop_token is not None and self.stop_token_id is not None:
            problems.append("stop_token and stop_token_id are both set; keep one of them.")
        if not isinstance(self.plan, str | os.PathLike | Mapping | ExecutionPlan | None):
            problems.append(
                f"plan must be auto, a preset, a YAML file's path, a dict or an ExecutionPlan, not {shown(self.plan)}."
            )
        if self.save_only_model and self.load_best_model_at_end:
            problems.append(
                "load_best_model_at_end loads the best checkpoint's float32 weights from its optimizer's state, which "
                "save_only_model leaves out; set one of them to false."
            )
        weights = self.reward_weights
        if weights is not None and not (isinstance(weights, list | tuple) and all(map(_finite, weights))):
            problems.append(f"reward_weights must be a list of finite numbers, or None, not {shown(weights)}.")
        if problems:
            raise ConfigError("\n".join(problems))

    def set_batch_sizes(self, processes: int, dataset_size: int) -> None:
        """Fill in the computed fields, as TRL does.

        Raises:
            ConfigError: a batch that `num_mini_batches` does not divide, or larger than the dataset.
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
        """The settings that PPO's arithmetic needs."""
        names: dict[str, Any] = {name: getattr(self, name) for name in PPOSettings.__dataclass_fields__}
        return PPOSettings(**names)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
