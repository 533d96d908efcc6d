"""`PolicyTraining`: an algorithm for the short runs of a job without a critic. It trains the policy once, by slopes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..algorithms.host_loss import HostLoss
from ..algorithms.linear_loss import LOGPROB_SLOPES
from ..algorithms.rollout import Rollouts


@dataclass(frozen=True)
class PolicyTraining(HostLoss):
    """One optimizer step on all samples, with the same slope for every token."""

    def mini_batches(self, samples: Rollouts, step: int) -> Iterator[Rollouts]:
        """All samples, with their slopes."""
        logprobs = samples.ragged("logprobs")
        slope = -1.0 / max(1, len(logprobs.values))
        yield samples.plus(**{LOGPROB_SLOPES: logprobs.like(torch.full_like(logprobs.values, slope))})
