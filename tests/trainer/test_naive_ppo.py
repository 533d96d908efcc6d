"""The trainer against a padded PPO written from the formulas: the same recorded rollouts, statistics and parameters."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from naive_ppo import Batch, Settings, ppo

from trl_realloc.algorithms.rollout import Ragged, Rollouts


UPDATES, LIMIT = 3, 12
LINEAR = tuple(1e-2 * (UPDATES - update) / UPDATES for update in range(UPDATES))  # the trainer's default schedule

# name: (arguments of the trainer, the same said to the naive one)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it comes": ({}, {}),
    "a cosine": (
        {"lr_scheduler_type": "cosine"},
        {"rates": tuple(5e-3 * (1 + math.cos(math.pi * update / UPDATES)) for update in range(UPDATES))},
    ),
    "a warmup of one update, then constant, and the critic at a rate of its own": (
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1, "value_learning_rate": 3e-2},
        {"rates": (0.0, 1e-2, 1e-2), "critic_rate": 3.0},
    ),
    "gradients clipped hard": ({"max_grad_norm": 0.01}, {"max_norm": 0.01}),
    "no clipping, other betas": (
        {"max_grad_norm": 0.0, "adam_beta1": 0.8, "adam_beta2": 0.9},
        {"max_norm": 0.0, "betas": (0.8, 0.9)},
    ),
    "weight decay": ({"weight_decay": 0.5}, {"decay": 0.5}),
    "accumulation": ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, {}),
    "mini-batches that are not even, three epochs": ({"num_ppo_epochs": 3}, {"mini_batches": 3, "epochs": 3}),
    "one epoch": ({"num_ppo_epochs": 1}, {"epochs": 1}),
    "a penalty without eos, whitened rewards": (
        {"missing_eos_penalty": 1.5, "whiten_rewards": True},
        {"penalty": 1.5, "whiten_rewards": True},
    ),
    "discounted, k3, a large kl": (
        {"gamma": 0.9, "lam": 0.5, "kl_estimator": "k3", "kl_coef": 0.5},
        {"gamma": 0.9, "lam": 0.5, "k3": True, "kl_coef": 0.5},
    ),
    "narrow clips, hot, another seed": (
        {"cliprange": 0.02, "cliprange_value": 0.01, "vf_coef": 1.0, "temperature": 0.6, "seed": 7},
        {"cliprange": 0.02, "cliprange_value": 0.01, "vf_coef": 1.0, "temperature": 0.6 + 1e-7, "seed": 7},
    ),
    "rollouts of another policy, weighted by sequences": (
        {"vllm_importance_sampling_correction": True, "kl_coef": 0.5},
        {"correction": "sequence_mask", "kl_coef": 0.5},
    ),
    "rollouts of another policy, weighted by tokens, mini-batches": (
        {
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 1.1,
            "vllm_importance_sampling_clip_min": 0.9,
            "kl_estimator": "k3",
        },
        {"correction": "token_truncate", "clip_max": 1.1, "clip_min": 0.9, "k3": True, "mini_batches": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_trainer_does_what_the_formulas_say(tmp_path: Path, case: str) -> None:
    changes, said = CASES[case]
    settings = replace(Settings(limit=LIMIT, rates=LINEAR), **said)
    policy, critic, reference = tiny.policy(), tiny.classifier(), tiny.policy(seed=5)
    naive = [copy.deepcopy(model) for model in (policy, reference, critic)]
    made = tiny.trainer(
        tmp_path,
        given={"model": policy, "value_model": critic, "ref_model": reference},
        **{"max_steps": UPDATES, "response_length": LIMIT, "adam_epsilon": settings.eps, **changes},
    )
    # past the config, which wants a batch to divide into mini-batches
    tiny.change_ppo(made, num_mini_batches=settings.mini_batches)
    batches: list[Batch] = []
    run = made.executor.run

    def replayed(batch: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        batches.append(recorded(batch.prompts.ragged("prompts").rows(), step))
        return run(batch, step, *args, **kwargs, known={"actor.generate": columns(batches[-1])})

    made.executor.run = replayed
    made.train()
    expected = ppo(*naive, batches, settings)
    assert len(batches) == UPDATES == len(tiny.updates(made))
    for ours, row in zip(tiny.updates(made), expected, strict=True):
        # Rounding grows over three epochs: on another CPU than usual to 2e-4 of val/ratio_var, and to 3e-5 of a weight,
        # where the learning rate, and so a step of Adam, is 1e-2.
        assert {name: ours[name] for name in row} == pytest.approx(row, rel=1e-3, abs=1e-5)
    weights = tiny.weights(made)
    for role, model in (("policy", naive[0]), ("critic", naive[2])):
        for name, parameter in model.named_parameters():
            assert (weights[f"{role}.{name}"] - parameter).abs().max() < 1e-4, name


def recorded(prompts: list[torch.Tensor], step: int) -> Batch:
    """Responses of 1 token up to the limit, some ended by eos, with log-probabilities near those of the policy."""
    draw = torch.Generator().manual_seed(step)
    n = len(prompts)
    lengths = [1, LIMIT, *torch.randint(1, LIMIT + 1, (n - 2,), generator=draw).tolist()]
    responses = [torch.randint(2, tiny.VOCABULARY, (k,), generator=draw) for k in lengths]
    for response in responses[::2]:
        response[-1] = tiny.EOS
    words = torch.tensor([int((response != tiny.EOS).sum()) for response in responses])
    return Batch(
        prompts=prompts,
        responses=responses,
        logprobs=[-4.6 + 0.2 * torch.randn(k, generator=draw) for k in lengths],
        scores=-(words - 3).abs() / 3,  # tiny.short
        eos=tiny.EOS,
    )


def columns(batch: Batch) -> Rollouts:
    return Rollouts(
        index=torch.arange(len(batch.responses)),
        responses=Ragged.of(batch.responses, torch.long),
        logprobs=Ragged.of(batch.logprobs, torch.float32),
        has_eos=torch.tensor([batch.eos in response.tolist() for response in batch.responses]),
    )
