"""PPO's statistics, under TRL's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .corrections import AGES, LARGEST_LOG_RATIO, MISMATCH
from .ppo_settings import PPOSettings
from .ppo_weights import SampleWeights
from .rollout import Rollouts


COUNTS = ("val/num_eos_tokens",)  # metrics that are sums over a batch; the other metrics of samples are means


def objective_metrics(samples: Rollouts, settings: PPOSettings, eos_token_id: int | None) -> dict[str, float]:
    """`objective/*` and `val/num_eos_tokens` of one global batch after `prepare`: as in TRL, sums over each response,
    then the mean over samples."""
    kl, logprobs, scores = samples.ragged("kl"), samples.ragged("logprobs"), samples.tensor("penalized_scores")
    mean_kl = float(kl.sum().mean())
    non_score = -settings.kl_coef * mean_kl
    eos = 0 if eos_token_id is None else int((samples.ragged("responses").values == eos_token_id).sum())
    return {
        "objective/kl": mean_kl,
        "objective/entropy": float((-logprobs.values).sum() / max(len(samples), 1)),
        "objective/non_score_reward": non_score,
        "objective/rlhf_reward": non_score + float(scores.mean()),
        "objective/scores": float(scores.mean()),
        "val/num_eos_tokens": eos,
    }


def update_metrics(steps: Sequence[tuple[SampleWeights, Mapping[str, Tensor]]]) -> dict[str, float]:
    """`policy/*`, `loss/*` and `val/*` over the optimizer steps of one iteration.

    Args:
        steps: weights of each mini-batch, and the sums per sample, (n,) each, of both losses or of one of them.
    """
    metrics: dict[str, list[float]] = {}
    ratios: list[float] = []

    def add(name: str, weight: Tensor, sums: Tensor) -> None:
        metrics.setdefault(name, []).append(float((weight * sums).sum()))

    for weights, sums in steps:
        if "policy_loss" in sums:
            add("loss/policy_avg", weights.policy, sums["policy_loss"])
            add("policy/clipfrac_avg", weights.policy, sums["clipped"])
            add("policy/approxkl_avg", weights.statistic, sums["approxkl"])
            # TRL's mean entropy includes the distributions after padding tokens. They have no meaning, so they are left
            # out.
            add("policy/entropy_avg", weights.policy, sums["entropy"])
            groups = int(weights.group.max()) + 1
            excess = torch.zeros(groups).index_add(0, weights.group, weights.statistic * sums["excess_ratio"])
            ratios += (1 + groups * excess).tolist()
        if "value_loss" in sums:
            add("loss/value_avg", weights.value, sums["value_loss"])
            add("val/clipfrac_avg", weights.value, sums["value_clipped"])
    means = {name: float(np.mean(values)) for name, values in metrics.items()}
    if ratios:
        means["val/ratio"] = float(np.mean(ratios))
        means["val/ratio_var"] = float(np.var(ratios, ddof=1)) if len(ratios) > 1 else 0.0
    return means


def mismatch_metrics(samples: Rollouts, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """`sampling/*` of the first optimizer step of an iteration without a correction: the difference between the
    trainer, before that step, and the engine, under the names of `corrections.correction_metrics`. Ratios are per
    token, without bounds.

    Args:
        samples: mini-batch of the step. Under a plan with a staleness, only samples whose tokens were all sampled by
            the current policy count; empty metrics if there are none.
        sums: statistics of `ppo.PolicyLoss` of each sample, (n,) each; empty metrics without these.
    """
    if "mult_prob_error" not in sums:
        return {}
    lengths = samples.ragged("responses").lengths
    counted = lengths > 0
    if AGES in samples:
        counted &= samples.ragged(AGES).extreme("amax") == 0
    tokens = float(lengths[counted].sum())
    if not tokens:
        return {}
    least, greatest = float(sums["least_log_ratio"][counted].min()), float(sums["greatest_log_ratio"][counted].max())
    return {
        "sampling/sampling_logp_difference/mean": float(sums["logp_difference"][counted].sum()) / tokens,
        "sampling/sampling_logp_difference/max": max(-least, greatest),
        "sampling/importance_sampling_ratio/min": math.exp(max(least, -LARGEST_LOG_RATIO)),
        "sampling/importance_sampling_ratio/mean": 1 + float(sums["excess_ratio"][counted].sum()) / tokens,
        "sampling/importance_sampling_ratio/max": math.exp(min(greatest, LARGEST_LOG_RATIO)),
        MISMATCH: float(sums["mult_prob_error"][counted].sum()) / tokens,
    }
