"""`PolicyTraining`: an algorithm for the short runs of a job without a critic, which trains the policy once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..algorithms.linear_loss import LOGPROB_GRADS
from ..algorithms.rollout import Rollouts
from ..algorithms.trainer_loss import TrainerLoss


@dataclass(frozen=True)
class PolicyTraining(TrainerLoss):
    """One optimizer step on all samples, with the same gradient dL/dlogp for every token."""

    def mini_batches(self, samples: Rollouts, step: int) -> Iterator[Rollouts]:
        """A single mini-batch of all samples, with the gradients of their log-probabilities."""
        logprobs = samples.ragged("logprobs")
        gradient = -1.0 / max(1, len(logprobs.values))
        yield samples.plus(**{LOGPROB_GRADS: logprobs.like(torch.full_like(logprobs.values, gradient))})
