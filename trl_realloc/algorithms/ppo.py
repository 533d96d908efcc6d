"""PPO: advantages, mini-batches, losses and statistics as functions on ragged samples, and the class `PPO` that offers
them to the executor. GAE and whitening are in `advantages`, the trainer in `trainer.ppo_trainer`.

A loss is a weighted sum over the tokens of one global mini-batch. The weights are computed before the mini-batch is
divided into micro-batches, so the loss does not depend on the plan. Formulas: PPO (Schulman et al. 2017, arXiv
1707.06347), with the details of TRL 1.12 ("The N Implementation Details of RLHF with PPO", Huang et al. 2023). The
weights of rollouts that another policy has drawn are in `corrections`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..plan.algorithm_graphs import PROXIMAL_LOGPROBS, ppo_first_epoch, ppo_graph, ppo_not_on_arrival
from ..plan.dataflow import DataflowGraph, Role
from .advantages import gae, kl_estimate, row_groups, token_rewards, whiten
from .base import TrainingLoss
from .corrections import WEIGHTS, Correction, Mode, correction_metrics, importance_weights
from .rollout import Ragged, Rollouts


@dataclass(frozen=True)
class PPOSettings:
    """The fields of `PPOConfig` that the arithmetic needs, under the same names.

    Args:
        response_length: maximum tokens of a response.
        local_batch_size, per_device_train_batch_size: read only with `match_trl`.
        match_trl: reproduce the parts of TRL 1.12's arithmetic that depend on the layout of the batch: whitening per
            rank, a loss that is the mean over micro-batches of their token means, statistics over padded positions, and
            the longest response of the rank's batch in place of `response_length`.
        vllm_importance_sampling_correction: correct for rollouts that the policy before the updates has not drawn.
            `None` is False.
    """

    response_length: int
    num_ppo_epochs: int = 4
    num_mini_batches: int = 1
    kl_coef: float = 0.05
    kl_estimator: Literal["k1", "k3"] = "k1"
    whiten_rewards: bool = False
    missing_eos_penalty: float | None = None
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    local_batch_size: int = 0
    per_device_train_batch_size: int = 0
    match_trl: bool = False
    vllm_importance_sampling_correction: bool | None = None
    vllm_importance_sampling_mode: Mode = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None

    @property
    def correction(self) -> Correction | None:
        """The correction of rollouts; `None` if they are trained on as they are."""
        if not self.vllm_importance_sampling_correction:
            return None
        return Correction(
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_max,
            self.vllm_importance_sampling_clip_min,
        )

    @property
    def graph(self) -> DataflowGraph:
        """PPO's calls, with `actor.forward` if there is a correction."""
        return ppo_graph(proximal=self.correction is not None)

    @property
    def first_epoch(self) -> tuple[str, ...]:
        """The calls whose first epoch can be trained on samples as they arrive."""
        return ppo_first_epoch(self.num_mini_batches, self.whiten_rewards, self.match_trl)


# --- advantages ------------------------------------------------------------------------------------------------------


def value_lengths(samples: Rollouts, settings: PPOSettings) -> Tensor:
    """(n,) int64: the number of positions at which the value function of each sample is trained.

    A response of L tokens has L positions at which a token is chosen. A response that ended before the limit has one
    more position, after its final token, at which the score is received (TRL's `padding_mask_p1`). A response at the
    limit does not have it, and its score is received at the last token.
    """
    lengths = samples.ragged("responses").lengths
    if not settings.match_trl:
        return lengths + (lengths < settings.response_length).long()
    row_group, groups = row_groups(len(samples), settings.local_batch_size, lengths.device)
    longest = torch.zeros(groups, dtype=torch.long, device=lengths.device)
    longest = longest.scatter_reduce(0, row_group, lengths, "amax", include_self=False)
    return lengths + (lengths < longest[row_group]).long()


def prepare(samples: Rollouts, settings: PPOSettings) -> Rollouts:
    """Add the columns that the losses read.

    Reads `responses`, `logprobs`, `ref_logprobs`, `values` (a response's length + 1 each), `scores` (n,) and `has_eos`
    (n,) bool. Adds `penalized_scores` (n,), `kl` and `advantages` (per response token), `old_values` and `returns` (per
    position of `value_lengths`).

    With a correction it also reads `proximal_logprobs`, and adds `importance_sampling_ratio` (per response token). The
    KL penalty is then that of the proximal policy: the penalty of the engine's or an older policy would reward the
    policy for what it no longer does. Values and advantages are not weighted.

    Args:
        samples: the whole global batch, because whitening is over all of it.
    """
    scores, kl, values, advantages, returns = _estimates(samples, settings)
    all_tokens = torch.ones_like(advantages.values, dtype=torch.bool)
    group_size = settings.local_batch_size if settings.match_trl else 0
    advantages = whiten(advantages, all_tokens, shift_mean=True, group_size=group_size)
    samples = samples.plus(penalized_scores=scores, kl=kl, advantages=advantages, old_values=values, returns=returns)
    if settings.correction is None:
        return samples
    return samples.plus(**{WEIGHTS: importance_weights(samples, settings.correction)})


def _estimates(samples: Rollouts, settings: PPOSettings) -> tuple[Tensor, Ragged, Ragged, Ragged, Ragged]:
    """(penalized scores, kl, values, advantages before they are whitened, returns), with the columns and shapes of
    `prepare`. Without `whiten_rewards` those of a sample depend on this sample alone."""
    logprobs, lengths = samples.ragged(old_logprobs(settings)), value_lengths(samples, settings)
    scores = samples.tensor("scores").clone()
    if settings.missing_eos_penalty is not None:
        scores -= settings.missing_eos_penalty * (~samples.tensor("has_eos")).float()
    kl = logprobs.like(kl_estimate(logprobs.values, samples.ragged("ref_logprobs").values, settings.kl_estimator))
    values = samples.ragged("values").crop(lengths)
    rewards = token_rewards(kl, scores, lengths, settings.kl_coef)
    if settings.whiten_rewards:
        all_tokens = torch.ones_like(rewards.values, dtype=torch.bool)
        group_size = settings.local_batch_size if settings.match_trl else 0
        rewards = whiten(rewards, all_tokens, shift_mean=False, group_size=group_size)
    advantages, returns = gae(rewards, values, settings.gamma, settings.lam)
    return scores, kl, values, advantages.crop(logprobs.lengths), returns


def old_logprobs(settings: PPOSettings) -> str:
    """The column of the policy that PPO's ratio is taken to: the proximal policy if rollouts are corrected, and
    otherwise the behaviour policy."""
    return "logprobs" if settings.correction is None else PROXIMAL_LOGPROBS


# --- mini-batches and weights ----------------------------------------------------------------------------------------


def mini_batches(n: int, settings: PPOSettings, seed: int, step: int) -> list[list[int]]:
    """The sample positions of every mini-batch of one iteration, epoch after epoch.

    Each epoch is a permutation drawn from (seed, step, epoch). Sizes of mini-batches differ by one at most. With
    `match_trl` the samples of each rank are permuted separately, so that every mini-batch has equally many of each
    rank.
    """
    local = settings.local_batch_size if settings.match_trl else n
    mini_batch_positions: list[list[int]] = []
    for epoch in range(settings.num_ppo_epochs):
        rank_parts = [
            np.array_split(
                start + np.random.default_rng((seed, step, epoch, start)).permutation(min(local, n - start)),
                settings.num_mini_batches,
            )
            for start in range(0, n, local)
        ]
        mini_batch_positions += [np.concatenate(parts).tolist() for parts in zip(*rank_parts, strict=True)]
    return mini_batch_positions


@dataclass(frozen=True)
class SampleWeights:
    """The weight of each sample's sums over tokens in one mini-batch, (n,) float32 in the order of the mini-batch.

    Args:
        policy: of sums over response tokens. The policy loss is their weighted sum.
        value: of sums over value positions.
        statistic: of the statistics that TRL averages over padded positions too; otherwise equal to `policy`.
        group: (n,) int64, the TRL micro-batch in whose mean the sample counts; 0 without `match_trl`.
    """

    policy: Tensor
    value: Tensor
    statistic: Tensor
    group: Tensor

    def columns(self) -> dict[str, Tensor]:
        """The weights as columns of the mini-batch, so that they stay with their samples in micro-batches."""
        return {f"{name}_weight": weight for name, weight in vars(self).items()}

    @staticmethod
    def of(samples: Rollouts) -> SampleWeights:
        """The inverse of `columns`."""
        return SampleWeights(*(samples.tensor(f"{name}_weight") for name in ("policy", "value", "statistic", "group")))


def sample_weights(samples: Rollouts, settings: PPOSettings) -> SampleWeights:
    """The weights of one mini-batch: 1 / its number of tokens. With `match_trl`: 1 / (the number of TRL's micro-batches
    times the tokens of the sample's micro-batch)."""
    tokens = samples.ragged("responses").lengths.float()
    positions = samples.ragged("returns").lengths.float()
    if not settings.match_trl:
        ones = torch.ones_like(tokens)
        policy = ones / tokens.sum()
        return SampleWeights(policy, ones / positions.sum(), policy, torch.zeros_like(tokens, dtype=torch.long))
    group = _trl_micro_batches(samples, settings)
    groups = int(group.max()) + 1
    count = torch.bincount(group, minlength=groups).float()

    def mean_of(x: Tensor) -> Tensor:
        return 1 / (groups * torch.zeros(groups).index_add(0, group, x)[group])

    width = samples.tensor("width").float()  # TRL pads every response to the longest of its rank's batch
    return SampleWeights(mean_of(tokens), mean_of(positions), 1 / (groups * count[group] * width), group)


def _trl_micro_batches(samples: Rollouts, settings: PPOSettings) -> Tensor:
    """(n,) int64: the micro-batch of TRL that each sample of this mini-batch would be in."""
    local = settings.local_batch_size // settings.num_mini_batches
    size = min(settings.per_device_train_batch_size or local, local)
    per_rank = -(-local // size)
    position = torch.arange(len(samples))
    return (position // local) * per_rank + (position % local) // size


def response_widths(samples: Rollouts, settings: PPOSettings) -> Tensor:
    """(n,) int64: the length to which TRL would pad each sample's response."""
    lengths = samples.ragged("responses").lengths
    row_group, groups = row_groups(len(samples), settings.local_batch_size, lengths.device)
    return torch.zeros(groups, dtype=torch.long).scatter_reduce(0, row_group, lengths, "amax")[row_group]


# --- losses ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyLoss:
    """PPO's clipped surrogate objective (arXiv 1707.06347, eq. 7), negated.

    max(-A·r, -A·clip(r, 1-ε, 1+ε)) with r = exp(logp' - logp). Reads the columns `logprobs`, `advantages` and
    `policy_weight`, and the outputs `logprobs` and `entropy`.

    With a correction r = π / π_p and the loss of a token is multiplied by w = π_p / μ, as in decoupled PPO (Hilton et
    al. 2022, arXiv 2110.00641), with the weights of `corrections`. At r = 1 the gradient is then that of r·w = π / μ,
    while the clip range lies around π_p. The loss is divided by the number of tokens that were drawn, masked ones
    included (`sample_weights`), as without a correction: an importance-weighted mean over n draws has the divisor n.
    Division by Σw or by the number of unmasked tokens would make the step larger the fewer samples are of use, and
    would bias it.

    Args:
        old: the column of logp.
        weights: the column of w; `None` for no weights.
    """

    cliprange: float
    old: str = "logprobs"
    weights: str | None = None

    def __call__(self, outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        new = outputs["logprobs"]
        difference = new.values - samples.ragged(self.old).values
        ratio = torch.exp(difference)
        advantages = samples.ragged("advantages").values
        unclipped = -advantages * ratio
        clipped = -advantages * torch.clamp(ratio, 1.0 - self.cliprange, 1.0 + self.cliprange)
        per_token = torch.max(unclipped, clipped)
        if self.weights is not None:
            per_token = per_token * samples.ragged(self.weights).values
        per_sample = new.like(per_token).sum()
        with torch.no_grad():
            statistics = {
                "policy_loss": per_sample.detach(),
                "clipped": new.like((clipped > unclipped).float()).sum(),
                "approxkl": new.like(0.5 * difference**2).sum(),
                "excess_ratio": new.like(ratio - 1).sum(),
                "entropy": outputs["entropy"].sum(),
            }
        return (per_sample * samples.tensor("policy_weight")).sum(), statistics


@dataclass(frozen=True)
class ValueLoss:
    """The clipped value loss, ½·max((V' - R)², (clip(V', V-ε, V+ε) - R)²), times `vf_coef`.

    Reads the columns `old_values`, `returns` and `value_weight`, and the output `values` (a response's length + 1
    each).
    """

    cliprange_value: float
    vf_coef: float

    def __call__(self, outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        old, returns = samples.ragged("old_values"), samples.ragged("returns").values
        new = outputs["values"].crop(old.lengths)
        clipped = torch.clamp(new.values, old.values - self.cliprange_value, old.values + self.cliprange_value)
        error, clipped_error = (new.values - returns) ** 2, (clipped - returns) ** 2
        per_sample = new.like(0.5 * torch.max(error, clipped_error)).sum()
        with torch.no_grad():
            statistics = {
                "value_loss": per_sample.detach(),
                "value_clipped": new.like((clipped_error > error).float()).sum(),
            }
        return self.vf_coef * (per_sample * samples.tensor("value_weight")).sum(), statistics


# --- statistics, under TRL's names -----------------------------------------------------------------------------------


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
        steps: of each mini-batch the weights, and the sums per sample, (n,) each, of both losses or of one of them.
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
            # out
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


# --- the Algorithm ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PPO:
    """PPO as an `algorithms.base.Algorithm`.

    Args:
        seed: the seed of the mini-batches' permutations.
        eos_token_id: the token that `val/num_eos_tokens` counts.
    """

    settings: PPOSettings
    seed: int = 0
    eos_token_id: int | None = None

    @property
    def graph(self) -> DataflowGraph:
        return self.settings.graph

    def prepare(self, samples: Rollouts) -> Rollouts:
        if self.settings.match_trl:
            samples = samples.plus(width=response_widths(samples, self.settings))
        return prepare(samples, self.settings)

    def mini_batches(self, samples: Rollouts, step: int) -> Iterator[Rollouts]:
        for positions in mini_batches(len(samples), self.settings, self.seed, step):
            batch = samples.select(positions)
            yield batch.plus(**sample_weights(batch, self.settings).columns())

    def loss(self, call: str) -> TrainingLoss:
        if self.graph.call(call).role is Role.ACTOR:
            weights = None if self.settings.correction is None else WEIGHTS
            of_tokens = PolicyLoss(self.settings.cliprange, old_logprobs(self.settings), weights)
            return TrainingLoss("policy", "policy_loss", of_tokens)
        return TrainingLoss("value", "value_loss", ValueLoss(self.settings.cliprange_value, self.settings.vf_coef))

    def why_not_on_arrival(self, call: str) -> str:
        """See `base.ArrivalAlgorithm`. Of the actor's advantages none is known before the last score, because they are
        whitened over the batch."""
        settings = self.settings
        role, mini_batches = self.graph.call(call).role, settings.num_mini_batches
        return ppo_not_on_arrival(role, mini_batches, settings.whiten_rewards, settings.match_trl)

    def on_arrival(self, call: str, samples: Rollouts, n: int) -> Rollouts:
        """See `base.ArrivalAlgorithm`. A position has about the weight that it would have if all responses had the
        maximum length, because the number of positions of the batch is not known yet."""
        _, _, values, _, returns = _estimates(samples, self.settings)
        weight = torch.full((len(samples),), self._first_weight(n))
        return samples.plus(old_values=values, returns=returns, value_weight=weight)

    def arrival_scale(self, call: str, mini_batch: Rollouts) -> float:
        """See `base.ArrivalAlgorithm`."""
        return float(SampleWeights.of(mini_batch).value[0]) / self._first_weight(len(mini_batch))

    def _first_weight(self, n: int) -> float:
        return 2.0 ** -math.ceil(math.log2(n * self.settings.response_length))  # to multiply by it rounds nothing

    def sample_metrics(self, samples: Rollouts) -> dict[str, float]:
        metrics = objective_metrics(samples, self.settings, self.eos_token_id)
        correction = self.settings.correction
        return metrics if correction is None else metrics | correction_metrics(samples, correction)

    def update_metrics(self, steps: Sequence[tuple[Rollouts, Mapping[str, Tensor]]]) -> dict[str, float]:
        return update_metrics([(SampleWeights.of(batch), statistics) for batch, statistics in steps])
