"""PPO's mini-batches, and the weight of each sample in them.

A loss is a weighted sum over the tokens of one global mini-batch. The weights are computed before the mini-batch is
divided into micro-batches, so the loss does not depend on the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .advantages import row_groups
from .ppo_settings import PPOSettings
from .rollout import Rollouts


def mini_batches(n: int, settings: PPOSettings, seed: int, step: int) -> list[list[int]]:
    """The sample positions of every mini-batch of one iteration, epoch after epoch.

    Each epoch is a random permutation from (seed, step, epoch). Sizes of mini-batches differ by at most one. With
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
        policy: weights of sums over response tokens. The policy loss is their weighted sum.
        value: weights of sums over value positions.
        statistic: weights of the statistics that TRL averages over padded positions too; otherwise equal to `policy`.
        group: (n,) int64, the TRL micro-batch whose mean the sample is part of; 0 without `match_trl`.
    """

    policy: Tensor
    value: Tensor
    statistic: Tensor
    group: Tensor

    def columns(self) -> dict[str, Tensor]:
        """The weights as columns of the mini-batch, so that micro-batches keep them with their samples."""
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
    """(n,) int64: the TRL micro-batch of each sample of this mini-batch."""
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
