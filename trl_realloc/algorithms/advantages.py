"""Rewards per token, generalised advantage estimation, whitening and KL estimators, on ragged samples.

No algorithm's settings are read here. GAE: Schulman et al. 2016, arXiv 1506.02438. The KL estimators:
http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .rollout import Ragged


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k3"]) -> Tensor:
    """Per-token KL(policy || reference), any shape, nats. k1 = log p/q; k3 = q/p - 1 - log q/p, never negative."""
    log_ratio = ref_logprobs - logprobs
    return -log_ratio if estimator == "k1" else torch.expm1(log_ratio) - log_ratio


def row_groups(n: int, group_size: int, device: torch.device) -> tuple[Tensor, int]:
    """(n,) int64 group of each row when consecutive `group_size` rows form a group (0: all in one), and how many."""
    size = group_size or max(n, 1)
    return torch.arange(n, device=device) // size, -(-n // size)


def whiten(values: Ragged, mask: Tensor, *, shift_mean: bool, group_size: int = 0) -> Ragged:
    """Values to variance 1 (and to mean 0 where `shift_mean`), both over the masked tokens of each group of rows.

    Args:
        values: (total,) float32.
        mask: (total,) bool, the tokens that count.
        group_size: rows per group; 0 is the global batch.

    The variance has Bessel's correction, as TRL's `masked_whiten` has it. A group with fewer than two masked tokens
    has no variance: its values are left as they are.
    """
    row_group, groups = row_groups(len(values), group_size, values.values.device)
    group = values.spread(row_group)

    def group_sum(x: Tensor) -> Tensor:
        return torch.zeros(groups, dtype=x.dtype, device=x.device).index_add(0, group, x * mask)

    count = group_sum(torch.ones_like(values.values))
    mean = group_sum(values.values) / count.clamp(min=1)
    centered = values.values - mean[group]
    variance = group_sum(centered**2) / (count - 1).clamp(min=1)
    whitened = centered * torch.rsqrt(variance + 1e-8)[group] + (0 if shift_mean else mean[group])
    return values.like(torch.where((count > 1)[group], whitened, values.values))


def token_rewards(kl: Ragged, scores: Tensor, lengths: Tensor, kl_coef: float) -> Ragged:
    """-kl_coef·KL on every response token, and the score on the last of the `lengths` positions.

    Args:
        kl: (total,) float32 nats over the response tokens.
        scores: (n,) float32.
        lengths: (n,) int64 from `value_lengths`, a response's length or one more.
    """
    ends = torch.cumsum(lengths, 0) - 1
    extra = lengths - kl.lengths
    rewards = torch.zeros(int(lengths.sum()), dtype=torch.float32)
    is_token = torch.ones_like(rewards, dtype=torch.bool)
    is_token[ends[extra > 0]] = False
    rewards[is_token] = -kl_coef * kl.values
    rewards[ends] += scores
    return Ragged(rewards, lengths)


def gae(rewards: Ragged, values: Ragged, gamma: float, lam: float) -> tuple[Ragged, Ragged]:
    """Advantages and returns by generalised advantage estimation (arXiv 1506.02438, eq. 16), undiscounted end value 0.

    A_t = Σ_k (γλ)^k δ_{t+k} with δ_t = r_t + γ V_{t+1} - V_t; returns are A + V. All (total,) float32.
    """
    r, v = rewards.pad(), values.pad()
    advantages = torch.zeros_like(v)
    last = torch.zeros(v.shape[0])
    next_value = torch.zeros(v.shape[0])
    for t in range(v.shape[1] - 1, -1, -1):  # rows shorter than t are zero there, so they pass 0 on
        delta = r[:, t] + gamma * next_value - v[:, t]
        last = delta + gamma * lam * last
        advantages[:, t] = last
        next_value = v[:, t]
    ragged = Ragged.unpad(advantages, rewards.lengths)
    return ragged, ragged.like(ragged.values + values.values)
