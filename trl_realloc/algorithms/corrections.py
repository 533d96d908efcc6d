"""Importance weights for rollouts that were not sampled from the trained policy, and their metrics.

Three policies are distinguished (decoupled PPO, Hilton et al. 2022, arXiv 2110.00641; for language models AReaL,
arXiv 2505.24298):

- behaviour μ: sampled the tokens. The column `logprobs` has the generation engine's log-probabilities.
- proximal π_p: the trainer's policy before this iteration's updates. `actor.forward` computes its log-probabilities,
  the column `proximal_logprobs`.
- current π: the policy that is being updated.

μ and π_p differ if the rollouts are older than π_p, or if the engine computes in another precision. The weight of a
token is w = π_p / μ. PPO's ratio r = π / π_p is clipped around π_p, and the clipped loss is multiplied by w
(`ppo.PolicyLoss`). Names and defaults are those of TRL's GRPO (`GRPOConfig`, TRL 1.12 to 1.16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..plan.algorithm_graphs import PROXIMAL_LOGPROBS
from .rollout import Ragged, Rollouts


Mode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
MODES: Sequence[str] = get_args(Mode)
WEIGHTS = "importance_sampling_ratio"  # the column of w, one value per response token
LARGEST_LOG_RATIO = 20.0  # e^20 = 4.9e8: a weight stays finite in float32, also after a product with a loss
AGES = "ages"  # column: updates since the policy that sampled each token; only under a plan with a staleness
POLICY_VERSIONS = "policy_versions"  # column: number of updates of the policy that sampled each response token
IN_FLIGHT_S = "in_flight_s"  # column: seconds of a sample's generation
GENERATED_AT = "generated_at"  # column: end of a sample's generation, seconds since the epoch
OF_GENERATION = (POLICY_VERSIONS, IN_FLIGHT_S, GENERATED_AT)  # columns under a staleness; no call reads them
MISMATCH = "sampling/token_mult_prob_error"  # metric: the mean of exp |log π_p - log μ| over tokens


@dataclass(frozen=True)
class Correction:
    """Formula and bounds of the importance weights.

    Args:
        mode: `token_*` gives each token the weight of its own probability, `sequence_*` gives all tokens of a response
            the product over the response. `*_truncate` clamps weights to the bounds, `*_mask` sets weights outside
            them to 0.
        clip_max, clip_min: bounds of a weight; `None` for no bound.
    """

    mode: Mode = "sequence_mask"
    clip_max: float | None = 3.0
    clip_min: float | None = None

    @property
    def is_of_sequences(self) -> bool:
        return self.mode.startswith("sequence")

    def log_ratios(self, behaviour: Ragged, proximal: Ragged) -> Tensor:
        """log(π_p / μ), clamped to ±`LARGEST_LOG_RATIO`: (total,) float32 of tokens, or (n,) of sequences.

        For a sequence it is the sum over the whole response, log ∏_t π_p(y_t | y_<t) / μ(y_t | y_<t). The sum is
        clamped, its terms are not.
        """
        per_token = behaviour.like(proximal.values - behaviour.values)
        ratios = per_token.sum() if self.is_of_sequences else per_token.values
        return ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)

    def bounded(self, ratios: Tensor) -> Tensor:
        """Weights of ratios π_p / μ, of the same shape. A truncating mode returns min(max(ratio, clip_min), clip_max),
        a masking mode the ratio within the bounds (inclusive) and otherwise 0."""
        if self.mode.endswith("mask"):
            return ratios.masked_fill(self.is_outside(ratios), 0.0)
        if self.clip_min is None and self.clip_max is None:
            return ratios
        return ratios.clamp(self.clip_min, self.clip_max)

    def is_outside(self, ratios: Tensor) -> Tensor:
        """Marks the ratios that `bounded` changes: bool of the same shape."""
        outside = torch.zeros_like(ratios, dtype=torch.bool)
        if self.clip_min is not None:
            outside |= ratios < self.clip_min
        if self.clip_max is not None:
            outside |= ratios > self.clip_max
        return outside


def importance_weights(samples: Rollouts, correction: Correction) -> Ragged:
    """The weight w of every response token, (total,) float32 without gradients.

    The weights are those of TRL's GRPO (`vllm_importance_sampling_ratio` in `grpo_trainer.py`). The truncated weight of
    a token is that of Ionides 2008 ("Truncated importance sampling") and of IMPALA's ρ (arXiv 1802.01561). Only the
    product over a sequence without bounds is unbiased, because a token's state was also sampled by μ. A bound trades
    variance for bias.

    Args:
        samples: whole responses, with the columns `logprobs` and `proximal_logprobs`. Weights are computed before a
            batch is divided into micro-batches, so they do not depend on the plan.
    """
    behaviour = samples.ragged("logprobs")
    weights = correction.bounded(correction.log_ratios(behaviour, samples.ragged(PROXIMAL_LOGPROBS)).exp())
    return behaviour.like(behaviour.spread(weights) if correction.is_of_sequences else weights)


def correction_metrics(samples: Rollouts, correction: Correction) -> dict[str, float]:
    """`sampling/*` of one global batch: how far the proximal policy is from the behaviour policy.

    Under the names of TRL's GRPO: `sampling_logp_difference/mean` and `/max` of |log π_p - log μ| over tokens, and
    `importance_sampling_ratio/min`, `/mean`, `/max` over weights (of tokens or sequences, by the mode) after the
    bounds. Others: `importance_sampling_ratio/clipfrac`, the share of weights that were truncated or masked;
    `effective_sample_size`, (Σw)² / (n Σw²), 1 if all weights are equal, 0 if all are masked (Kish 1965); `kl_k1` and
    `kl_k3`, estimates of KL(μ || π_p) per token in nats, whose log ratios are clamped to ±`LARGEST_LOG_RATIO`; and
    `token_mult_prob_error` over tokens that π_p itself sampled in the engine, whose `AGES` are 0.
    """
    behaviour, proximal = samples.ragged("logprobs"), samples.ragged(PROXIMAL_LOGPROBS)
    if not len(behaviour.values):
        return {}
    difference = proximal.values.double() - behaviour.values.double()
    near = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratios = correction.log_ratios(behaviour, proximal).exp()
    weights = correction.bounded(ratios).double()
    squares = float((weights**2).sum())
    metrics: dict[str, float | Tensor] = {
        "sampling_logp_difference/mean": difference.abs().mean(),
        "sampling_logp_difference/max": difference.abs().max(),
        "importance_sampling_ratio/min": weights.min(),
        "importance_sampling_ratio/mean": weights.mean(),
        "importance_sampling_ratio/max": weights.max(),
        "importance_sampling_ratio/clipfrac": correction.is_outside(ratios).float().mean(),
        "effective_sample_size": float(weights.sum()) ** 2 / (len(weights) * squares) if squares else 0.0,
        "kl_k1": -near.mean(),
        "kl_k3": (torch.expm1(near) - near).mean(),
    }
    if AGES in samples:
        difference = difference[samples.ragged(AGES).values == 0]
    errors = {MISMATCH: float(mult_prob_errors(difference).mean())} if len(difference) else {}
    return {f"sampling/{name}": float(value) for name, value in metrics.items()} | errors


def mult_prob_errors(difference: Tensor) -> Tensor:
    """exp |log π_p - log μ| of each token, the factor by which the probabilities of engine and trainer differ, at most
    e^`LARGEST_LOG_RATIO`.

    Args:
        difference: log π_p - log μ of tokens that both compute with the same parameters, of any shape.
    """
    return difference.abs().clamp(max=LARGEST_LOG_RATIO).exp()
