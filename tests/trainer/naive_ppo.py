"""PPO on padded batches, from the formulas alone: generalised advantages (arXiv 1506.02438), the clipped surrogate
(arXiv 1707.06347), AdamW (arXiv 1711.05101). Slow and plain; what the trainer makes of the same rollouts is held
against it. Nothing of `trl_realloc` is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Settings:
    epochs: int = 2
    mini_batches: int = 1
    limit: int = 12  # tokens of a response
    temperature: float = 1.0
    kl_coef: float = 0.05
    k3: bool = False
    penalty: float = 0.0
    gamma: float = 1.0
    lam: float = 0.95
    whiten_rewards: bool = False
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    rates: tuple[float, ...] = (1e-2,)  # of each update
    critic_rate: float = 1.0  # times the policy's
    max_norm: float = 1.0
    decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-4
    seed: int = 42
    correction: str = ""  # how importance weights are bounded, by TRL's names
    clip_max: float = 3.0
    clip_min: float = 0.0


@dataclass
class Batch:
    """The rollouts of one update: token ids, their log-probabilities, and the score of each response."""

    prompts: Sequence[Tensor]
    responses: Sequence[Tensor]
    logprobs: Sequence[Tensor]
    scores: Tensor
    eos: int = 1


def ppo(policy: Any, reference: Any, critic: Any, batches: Sequence[Batch], s: Settings) -> list[dict[str, float]]:
    """Train policy and critic in place. Returns each update's statistics under TRL's names."""
    states: list[dict[Any, tuple[Tensor, Tensor]]] = [{}, {}]
    rows, step = [], 0
    for update, batch in enumerate(batches):
        n, lengths = len(batch.prompts), torch.tensor([len(r) for r in batch.responses])
        places = torch.arange(s.limit + 1)
        is_token = places < lengths[:, None]  # (n, limit + 1)
        ended = lengths + (lengths < s.limit).long()  # a response that ended early has a state after its last token
        is_state = places < ended[:, None]
        old = torch.zeros(n, s.limit + 1)
        old[is_token] = torch.cat(list(batch.logprobs))
        with torch.no_grad():
            ref, _ = logprobs_of(reference, batch, range(n), s)
            drawn, weights = old, torch.ones_like(old)
            if s.correction:
                old, _ = logprobs_of(policy, batch, range(n), s)
                weights = importance(drawn, old, is_token, s)
            old_values = values_of(critic, batch, range(n), s) * is_state
        log_ratio = (ref - old) * is_token
        kl = torch.exp(log_ratio) - 1 - log_ratio if s.k3 else -log_ratio
        has_eos = torch.tensor([batch.eos in r.tolist() for r in batch.responses])
        scores = batch.scores - s.penalty * (~has_eos).float()
        rewards = -s.kl_coef * kl
        rewards[torch.arange(n), ended - 1] += scores
        if s.whiten_rewards:
            rewards = whitened(rewards, is_state, keep_mean=True)
        rewards = rewards * is_state
        advantages, after = torch.zeros(n, s.limit + 2), torch.cat([old_values, torch.zeros(n, 1)], 1)
        for t in reversed(range(s.limit + 1)):
            delta = rewards[:, t] + s.gamma * after[:, t + 1] - old_values[:, t]
            advantages[:, t] = delta + s.gamma * s.lam * advantages[:, t + 1]
        returns = advantages[:, :-1] + old_values
        advantages = whitened(advantages[:, :-1], is_token, keep_mean=False)
        told: dict[str, list[float]] = {}
        for epoch in range(s.epochs):
            order = np.random.default_rng((s.seed, update, epoch, 0)).permutation(n)
            for rows_of in np.array_split(order, s.mini_batches):
                at, step = rows_of.tolist(), step + 1
                mask, states_mask = is_token[at], is_state[at]
                new, entropy = logprobs_of(policy, batch, at, s)
                difference = (new - old[at]) * mask
                ratio = torch.exp(difference)
                plain = -advantages[at] * ratio
                clipped = -advantages[at] * ratio.clamp(1 - s.cliprange, 1 + s.cliprange)
                loss = mean(torch.max(plain, clipped) * weights[at], mask)
                loss.backward()
                values, before = values_of(critic, batch, at, s), old_values[at]
                near = torch.clamp(values, before - s.cliprange_value, before + s.cliprange_value)
                error, near_error = (values - returns[at]) ** 2, (near - returns[at]) ** 2
                value_loss = 0.5 * mean(torch.max(error, near_error), states_mask)
                (s.vf_coef * value_loss).backward()
                rate = s.rates[update]
                adamw(policy, states[0], rate, step, s)
                adamw(critic, states[1], rate * s.critic_rate, step, s)
                for name, value in {
                    "loss/policy_avg": loss,
                    "loss/value_avg": value_loss,
                    "policy/approxkl_avg": 0.5 * mean(difference**2, mask),
                    "policy/clipfrac_avg": mean((clipped > plain).float(), mask),
                    "policy/entropy_avg": mean(entropy, mask),
                    "val/clipfrac_avg": mean((near_error > error).float(), states_mask),
                    "val/ratio": mean(ratio, mask),
                }.items():
                    told.setdefault(name, []).append(float(value.detach()))
        mean_kl = float(kl.sum(1).mean())
        rows.append(
            {
                **{name: float(np.mean(values)) for name, values in told.items()},
                "val/ratio_var": float(np.var(told["val/ratio"], ddof=1)) if len(told["val/ratio"]) > 1 else 0.0,
                "objective/kl": mean_kl,
                "objective/entropy": float((-drawn * is_token).sum(1).mean()),
                "objective/non_score_reward": -s.kl_coef * mean_kl,
                "objective/rlhf_reward": -s.kl_coef * mean_kl + float(scores.mean()),
                "objective/scores": float(scores.mean()),
            }
        )
    return rows


def importance(drawn: Tensor, proximal: Tensor, mask: Tensor, s: Settings) -> Tensor:
    """π_proximal / π_behaviour of each token, or of its whole response; bounded. (n, limit + 1)."""
    ratios = torch.where(mask, torch.exp(proximal - drawn), 1.0)
    if s.correction.startswith("sequence"):
        ratios = ratios.prod(1, keepdim=True).expand_as(ratios)
    if s.correction.endswith("truncate"):
        return ratios.clamp(s.clip_min, s.clip_max)
    return ratios * ((ratios >= s.clip_min) & (ratios <= s.clip_max))


def mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def whitened(values: Tensor, mask: Tensor, keep_mean: bool) -> Tensor:
    middle = mean(values, mask)
    variance = mean((values - middle) ** 2, mask) * mask.sum() / (mask.sum() - 1)
    return (values - middle) / torch.sqrt(variance + 1e-8) + (middle if keep_mean else 0.0)


def padded(batch: Batch, at: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Prompts and responses, right-padded: (n, width) ids and mask."""
    rows = [torch.cat([batch.prompts[i], batch.responses[i]]) for i in at]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids, mask


def logprobs_of(model: Any, batch: Batch, at: Sequence[int], s: Settings) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token and entropy of its distribution, (n, limit + 1)."""
    ids, mask = padded(batch, at)
    every = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits / s.temperature, -1)
    logprobs, entropy = torch.zeros(len(at), s.limit + 1), torch.zeros(len(at), s.limit + 1)
    for row, i in enumerate(at):
        first, k = len(batch.prompts[i]), len(batch.responses[i])
        here = every[row, first - 1 : first - 1 + k]
        logprobs[row, :k] = here.gather(-1, batch.responses[i][:, None]).squeeze(-1)
        entropy[row, :k] = -(here.exp() * here).sum(-1).detach()
    return logprobs, entropy


def values_of(model: Any, batch: Batch, at: Sequence[int], s: Settings) -> Tensor:
    """The value before each response token and after the last, (n, limit + 1)."""
    ids, mask = padded(batch, at)
    every = model.score(model.model(input_ids=ids, attention_mask=mask).last_hidden_state).squeeze(-1)
    values = torch.zeros(len(at), s.limit + 1)
    for row, i in enumerate(at):
        first, k = len(batch.prompts[i]), len(batch.responses[i])
        values[row, : k + 1] = every[row, first - 1 : first + k]
    return values


def adamw(model: Any, state: dict[Any, tuple[Tensor, Tensor]], rate: float, step: int, s: Settings) -> None:
    """One step with decoupled weight decay on matrices, the gradient clipped to a global norm; empties gradients."""
    named = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    norm = torch.sqrt(sum((p.grad**2).sum() for _, p in named))
    factor = min(1.0, s.max_norm / (float(norm) + 1e-6)) if s.max_norm > 0 else 1.0
    with torch.no_grad():
        for name, p in named:
            gradient, (m, v) = p.grad * factor, state.get(name, (torch.zeros_like(p), torch.zeros_like(p)))
            m = s.betas[0] * m + (1 - s.betas[0]) * gradient
            v = s.betas[1] * v + (1 - s.betas[1]) * gradient**2
            state[name] = (m, v)
            if p.dim() > 1:
                p -= rate * s.decay * p
            p -= rate * m / (1 - s.betas[0] ** step) / (torch.sqrt(v / (1 - s.betas[1] ** step)) + s.eps)
            p.grad = None
