"""`PolicyTraining`: an algorithm for the short runs of a job without a critic. It trains the policy once, by slopes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..algorithms.base import TrainingLoss
from ..algorithms.linear_loss import LINEAR_LOSS, LOGPROB_SLOPES, LinearLoss
from ..algorithms.rollout import Rollouts
from ..plan.dataflow import DataflowGraph


@dataclass(frozen=True)
class PolicyTraining:
    """One optimizer step on all samples, with the same slope for every token. An `algorithms.base.Algorithm`."""

    graph: DataflowGraph

    def prepare(self, samples: Rollouts) -> Rollouts:
        return samples

    def mini_batches(self, samples: Rollouts, step: int) -> Iterator[Rollouts]:
        logprobs = samples.ragged("logprobs")
        slope = -1.0 / max(1, len(logprobs.values))
        yield samples.plus(**{LOGPROB_SLOPES: logprobs.like(torch.full_like(logprobs.values, slope))})

    def loss(self, call: str) -> TrainingLoss:
        return TrainingLoss("policy", LINEAR_LOSS, LinearLoss())

    def sample_metrics(self, samples: Rollouts) -> dict[str, float]:
        return {}

    def update_metrics(self, steps: Sequence[tuple[Rollouts, Mapping[str, Tensor]]]) -> dict[str, float]:
        return {}
