"""`TRLPPOConfig`: the fields of TRL 1.12's `PPOConfig`, with its order, defaults and meanings.

Users create `ppo_config.PPOConfig`, which adds fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .plan_settings import setting
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
            Token that ends a response: `eos` for the tokenizer's eos token. Excludes `stop_token_id`.
        stop_token_id (`int`, *optional*):
            Token id that ends a response. Without it and `stop_token`, every response has `response_length` tokens.
        temperature (`float`, *optional*, defaults to `0.7`):
            Sampling temperature.
        missing_eos_penalty (`float`, *optional*):
            Penalty (positive) subtracted from the score of a response without eos token.
        sft_model_path (`str`, *optional*, defaults to `"EleutherAI/pythia-160m"`):
            Policy's starting point, for scripts.
        world_size (`int`, *optional*):
            Number of processes; computed.
        num_total_batches (`int`, *optional*):
            Updates of the run; computed.
        micro_batch_size (`int`, *optional*):
            Product of `per_device_train_batch_size` and the number of processes; computed.
        local_batch_size (`int`, *optional*):
            Product of `per_device_train_batch_size` and `gradient_accumulation_steps`; computed.
        batch_size (`int`, *optional*):
            Episodes of one update over all processes; computed.
        local_mini_batch_size (`int`, *optional*):
            Episodes of a mini-batch per process; computed.
        mini_batch_size (`int`, *optional*):
            Episodes of one optimizer step over all processes; computed.
        push_to_hub (`bool`, *optional*, defaults to `False`):
            Upload of the policy to the Hub after training.
        reward_model_path (`str`, *optional*, defaults to `"EleutherAI/pythia-160m"`):
            Reward model, for scripts.
        model_adapter_name (`str`, *optional*):
            The PEFT adapter to train, if the model has several.
        ref_adapter_name (`str`, *optional*):
            The PEFT adapter that is the reference, if the model has several.
        num_ppo_epochs (`int`, *optional*, defaults to `4`):
            Passes over a batch of rollouts.
        whiten_rewards (`bool`, *optional*, defaults to `False`):
            Whitening of the rewards over the batch (their mean is kept).
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

    learning_rate: float = setting(
        3e-6, "Initial learning rate of the policy (and of the critic, unless `value_learning_rate`)."
    )
    dataset_num_proc: int | None = setting(None, "Processes that tokenize the dataset.")
    num_mini_batches: int = setting(1, "Mini-batches, and so optimizer steps, per PPO epoch.")
    total_episodes: int | None = setting(
        None, "Episodes to train on; by default `num_train_epochs` passes over the dataset. `max_steps` overrides it."
    )
    local_rollout_forward_batch_size: int = setting(
        64, "Samples per rank of a forward without gradients, where the plan gives no token budget."
    )
    num_sample_generations: int = setting(
        10, "How often in the run a few completions are shown; 0 for never. Needs an `eval_dataset`."
    )
    response_length: int = setting(53, "Maximum tokens of a response.")
    stop_token: Literal["eos"] | None = setting(
        None, "`eos` ends a response at the tokenizer's eos token. Excludes `stop_token_id`."
    )
    stop_token_id: int | None = setting(
        None, "The token id that ends a response. With neither, all have `response_length` tokens."
    )
    temperature: float = setting(0.7, "Sampling temperature.")
    missing_eos_penalty: float | None = setting(
        None, "Subtracted from the score of a response without eos token; positive."
    )
    sft_model_path: str = setting("EleutherAI/pythia-160m", "For scripts: the policy's starting point.")
    world_size: int | None = setting(None, "Computed: number of processes.")
    num_total_batches: int | None = setting(None, "Computed: updates of the run.")
    micro_batch_size: int | None = setting(None, "Computed: `per_device_train_batch_size` over all processes.")
    local_batch_size: int | None = setting(
        None, "Computed: `per_device_train_batch_size * gradient_accumulation_steps`."
    )
    batch_size: int | None = setting(None, "Computed: episodes of one update over all processes.")
    local_mini_batch_size: int | None = setting(None, "Computed: a process's share of a mini-batch.")
    mini_batch_size: int | None = setting(None, "Computed: episodes of one optimizer step over all processes.")
    push_to_hub: bool = setting(False, "Push the policy to the Hub after training.")
    reward_model_path: str = setting("EleutherAI/pythia-160m", "For scripts: the reward model.")
    model_adapter_name: str | None = setting(None, "The PEFT adapter to train, of a model with several.")
    ref_adapter_name: str | None = setting(None, "The PEFT adapter that is the reference, of a model with several.")
    num_ppo_epochs: int = setting(4, "Passes over a batch of rollouts.")
    whiten_rewards: bool = setting(False, "Whiten the rewards over the batch (their mean is kept).")
    kl_coef: float = setting(0.05, "Weight of the KL penalty.")
    kl_estimator: Literal["k1", "k3"] = setting(
        "k1",
        "The KL estimator: k1 (straightforward) or k3 (lower variance), see http://joschu.net/blog/kl- approx.html.",
    )
    cliprange: float = setting(0.2, "Clip range of the policy's ratio.")
    vf_coef: float = setting(0.1, "Weight of the value loss.")
    cliprange_value: float = setting(0.2, "Clip range of the value function.")
    gamma: float = setting(1.0, "Discount.")
    lam: float = setting(0.95, "Lambda of GAE.")
    ds3_gather_for_generation: bool = setting(
        True, "Of no effect here: generation engines are filled bucket by bucket."
    )
