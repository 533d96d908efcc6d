"""Losses that are not linear in log-probabilities and entropies, samples for them, and their token gradients by
autograd."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trl_realloc.algorithms.algorithm import TokenLoss
from trl_realloc.algorithms.ppo import PolicyLoss
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.base import ScoringEngine


clipped = PolicyLoss(0.2)


def sequence_level(outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 5): one clipped ratio per response, the geometric mean of its
    tokens' ratios."""
    new = outputs["logprobs"]
    mean = new.like(new.values - samples.ragged("logprobs").values).sum() / new.lengths.clamp(min=1)
    ratio, advantages = torch.exp(mean), samples.tensor("sequence_advantages")
    per_sample = -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
    return (per_sample * samples.tensor("sequence_weight")).sum(), {"policy_loss": per_sample.detach()}


def bonus(outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped loss with an entropy bonus, less for tokens that are uncertain already."""
    value, statistics = clipped(outputs, samples)
    entropy = outputs["entropy"]
    of_entropy = entropy.like(0.3 * torch.log1p(entropy.values)).sum()
    return value - (of_entropy * samples.tensor("policy_weight")).sum(), statistics


def samples_of(engine: ScoringEngine, count: int = 8, vocabulary: int = 50) -> Rollouts:
    """Samples of unequal lengths whose policy is not quite the engine's, so that some tokens are clipped."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 10, (2, count), generator=draw)
    prompts, responses = (
        Ragged(torch.randint(2, vocabulary, (int(of.sum()),), generator=draw), of) for of in (sizes[0], sizes[1])
    )
    samples = Rollouts(index=torch.arange(count), prompts=prompts, responses=responses)
    logprobs = engine.forward(samples, 1000)["logprobs"]
    noise = 0.2 * torch.randn(len(logprobs.values), generator=draw).to(logprobs.values.dtype)
    advantages = torch.randn(count, generator=draw).to(noise.dtype)
    return samples.plus(
        logprobs=logprobs.like(logprobs.values + noise),
        advantages=responses.like(responses.spread(advantages)),
        sequence_advantages=advantages,
        policy_weight=torch.full((count,), 1 / len(noise), dtype=noise.dtype),
        sequence_weight=torch.full((count,), 1 / count, dtype=noise.dtype),
    )


def with_grads(samples: Rollouts, loss: TokenLoss, engine: ScoringEngine) -> Rollouts:
    """The samples with the token gradients of a loss at the engine's weights; of the entropies if the loss depends on
    them."""
    leaves = {n: c.like(c.values.clone().requires_grad_()) for n, c in engine.forward(samples, 30).items()}
    if not leaves:
        return samples
    loss(leaves, samples)[0].backward()
    names = {"logprobs": "logprob_grads", "entropy": "entropy_grads"}
    grads = {names[n]: c.like(c.values.grad) for n, c in leaves.items() if c.values.grad is not None}
    return samples.plus(**grads)
