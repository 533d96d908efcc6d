"""Rollouts that are trained on: on the host, to be compared with what a device makes of them."""

from __future__ import annotations

import torch
from replay import rollouts

from trl_realloc.algorithms.ppo import prepare
from trl_realloc.algorithms.ppo_settings import PPOSettings
from trl_realloc.algorithms.ppo_weights import sample_weights
from trl_realloc.algorithms.rollout import Ragged, Rollouts


SETTINGS = PPOSettings(12, whiten_rewards=True)


def training_batch() -> Rollouts:
    """Eight rollouts with all columns of PPO."""
    samples = rollouts(8)
    responses = samples.ragged("responses")
    draw = torch.Generator().manual_seed(5)
    samples = samples.plus(
        logprobs=responses.like(-4.0 + 0.1 * torch.randn(len(responses.values), generator=draw)),
        ref_logprobs=responses.like(-4.0 + 0.1 * torch.randn(len(responses.values), generator=draw)),
        values=Ragged(torch.randn(int((responses.lengths + 1).sum()), generator=draw), responses.lengths + 1),
        scores=torch.randn(8, generator=draw),
        has_eos=torch.ones(8, dtype=torch.bool),
    )
    prepared = prepare(samples, SETTINGS)
    return prepared.plus(**sample_weights(prepared, SETTINGS).columns())
