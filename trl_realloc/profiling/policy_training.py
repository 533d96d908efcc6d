"""`PolicyTraining`: an algorithm for the short runs of a job without a critic, which trains the policy once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..algorithms.host_loss import HostLoss
from ..algorithms.linear_loss import LOGPROB_SLOPES
from ..algorithms.rollout import Rollouts


@dataclass(frozen=True)
class PolicyTraining(HostLoss):
    """One optimizer step on all samples, with the same gradient dL/dlogp for every token."""

    def mini_batches(self, samples: Rollouts, step: int) -> Iterator[Rollouts]:
        """A single mini-batch of all samples, with the gradients of their log-probabilities."""
        logprobs = samples.ragged("logprobs")
        slope = -1.0 / max(1, len(logprobs.values))
        yield samples.plus(**{LOGPROB_SLOPES: logprobs.like(torch.full_like(logprobs.values, slope))})
