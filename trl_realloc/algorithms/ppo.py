"""PPO: advantages and losses on ragged samples, and the class `PPO` for the executor.

Formulas: PPO (Schulman et al. 2017, arXiv 1707.06347), with the details of TRL 1.12 ("The N Implementation Details of
RLHF with PPO", Huang et al. 2023). Rollouts from another policy get the weights of `corrections`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.algorithm_graphs import PROXIMAL_LOGPROBS
from ..plan.dataflow import DataflowGraph, Role
from .advantages import gae, kl_estimate, row_groups, token_rewards, whiten
from .algorithm import TrainingLoss
from .corrections import WEIGHTS, correction_metrics, importance_weights, mult_prob_errors
from .ppo_metrics import mismatch_metrics, objective_metrics, update_metrics
from .ppo_settings import PPOSettings
from .ppo_weights import SampleWeights, mini_batches, response_widths, sample_weights
from .rollout import Ragged, Rollouts


# --- advantages ------------------------------------------------------------------------------------------------------


def value_lengths(samples: Rollouts, settings: PPOSettings) -> Tensor:
    """(n,) int64: the number of positions at which the value function of each sample is trained.

    A response of L tokens has L positions at which a token is chosen. A response that ended before the limit has one
    more position, after its final token, at which the score is received (TRL's `padding_mask_p1`). A response at the
    limit does not have it; its score is received at the last token.
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
    KL penalty is then computed with the proximal policy, because that of an older or the engine's policy would reward
    behaviour that the policy no longer has. Values and advantages are not weighted.

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
    """(penalized scores, kl, values, advantages before whitening, returns), with the columns and shapes of `prepare`.
    Without `whiten_rewards` each sample's results depend on this sample alone."""
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
    """The column of the policy in the denominator of PPO's ratio: the proximal policy if rollouts are corrected,
    otherwise the behaviour policy."""
    return "logprobs" if settings.correction is None else PROXIMAL_LOGPROBS


# --- losses ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyLoss:
    """PPO's clipped surrogate objective (arXiv 1707.06347, eq. 7), negated.

    max(-A·r, -A·clip(r, 1-ε, 1+ε)) with r = exp(logp' - logp). Reads the columns `logprobs`, `advantages` and
    `policy_weight`, and the outputs `logprobs` and `entropy`.

    With a correction r = π / π_p and the loss of a token is multiplied by w = π_p / μ, as in decoupled PPO (Hilton et
    al. 2022, arXiv 2110.00641), with the weights of `corrections`. At r = 1 the gradient is then that of r·w = π / μ,
    while the clip range lies around π_p. The loss is divided by the number of sampled tokens, including masked ones
    (`sample_weights`), as without a correction: an importance-weighted mean over n samples has the divisor n. Division
    by Σw or by the number of unmasked tokens would make the step larger the fewer samples are useful, and would bias
    it.

    Without a correction the statistics also have each sample's part of `ppo_metrics.mismatch_metrics`: until the first
    optimizer step, logp' is computed with the engine's parameters.

    Args:
        old: name of the column of logp.
        weights: name of the column of w; `None` for no weights.
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
            if self.weights is None:
                statistics |= {
                    "logp_difference": new.like(difference.abs()).sum(),
                    "mult_prob_error": new.like(mult_prob_errors(difference)).sum(),
                    "least_log_ratio": new.like(difference).extreme("amin"),
                    "greatest_log_ratio": new.like(difference).extreme("amax"),
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


# --- the Algorithm ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PPO:
    """PPO as an `algorithms.algorithm.Algorithm`.

    Args:
        seed: seed of the mini-batches' permutations.
        eos_token_id: token that `val/num_eos_tokens` counts.
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

    def sample_metrics(self, samples: Rollouts) -> dict[str, float]:
        metrics = objective_metrics(samples, self.settings, self.eos_token_id)
        correction = self.settings.correction
        return metrics if correction is None else metrics | correction_metrics(samples, correction)

    def update_metrics(self, steps: Sequence[tuple[Rollouts, Mapping[str, Tensor]]]) -> dict[str, float]:
        metrics = update_metrics([(SampleWeights.of(batch), statistics) for batch, statistics in steps])
        return metrics | (mismatch_metrics(*steps[0]) if steps else {})
