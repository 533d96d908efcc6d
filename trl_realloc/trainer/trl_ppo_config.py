"""`TRLPPOConfig`: the fields of TRL 1.12's `PPOConfig`, with its order, defaults and meanings.

Users create `ppo_config.PPOConfig`, which adds fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .trl_compat import ConfigBase


@dataclass
class TRLPPOConfig(ConfigBase):
    r"""
    TRL's configuration of PPO. Only the fields specific to PPO are listed; the others are those of
    [`~transformers.TrainingArguments`], with `logging_steps` 10, `gradient_checkpointing` True and `bf16` True (unless
    `fp16`) by default, as in TRL.

    Parameters:
        learning_rate (`float`, *optional*, defaults to `3e-6`):
            Initial learning rate of the policy (and of the critic, unless `value_learning_rate`).
        dataset_num_proc (`int`, *optional*):
            Number of processes that tokenize the dataset.
        num_mini_batches (`int`, *optional*, defaults to `1`):
            Mini-batches, and so optimizer steps, per PPO epoch.
        total_episodes (`int`, *optional*):
            Number of training episodes; by default `num_train_epochs` passes over the dataset. `max_steps` overrides
            it.
        local_rollout_forward_batch_size (`int`, *optional*, defaults to `64`):
            Samples per forward without gradients on one rank, if the plan sets no token budget.
        num_sample_generations (`int`, *optional*, defaults to `10`):
            Number of times in the run that a few completions are shown; 0 for never. Needs an `eval_dataset`.
        response_length (`int`, *optional*, defaults to `53`):
            Maximum tokens of a response.
        stop_token (`Literal["eos"]`, *optional*):
            `eos`: the tokenizer's eos token ends a response. Excludes `stop_token_id`.
        stop_token_id (`int`, *optional*):
            The token id that ends a response. Without it and `stop_token`, every response has `response_length` tokens.
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
            The PEFT adapter to train, if the model has several.
        ref_adapter_name (`str`, *optional*):
            The PEFT adapter that is the reference, if the model has several.
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
            No effect here: a generation engine is filled bucket by bucket, and holds whole parameters.
    """

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
