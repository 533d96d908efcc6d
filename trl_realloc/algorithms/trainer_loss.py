"""The algorithm of a run whose samples, rewards and losses another library computes, such as TRL's GRPO. That library
gives the derivatives of its loss (`linear_loss`). One training call is one optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..plan.dataflow import DataflowGraph
from .algorithm import TrainingLoss
from .linear_loss import LINEAR_LOSS, LinearLoss, without_zero_grads
from .rollout import Rollouts


@dataclass(frozen=True)
class TrainerLoss:
    """An `Algorithm` without computations between the calls.

    Args:
        graph: dataflow graph of the run.
    """

    graph: DataflowGraph

    def prepare(self, samples: Rollouts) -> Rollouts:
        """The unchanged samples."""
        return samples

    def mini_batches(self, samples: Rollouts, step: int) -> Iterator[Rollouts]:
        """One mini-batch: the samples that have a gradient."""
        yield without_zero_grads(samples)

    def loss(self, call: str) -> TrainingLoss:
        """The linear loss."""
        return TrainingLoss("policy", LINEAR_LOSS, LinearLoss())

    def sample_metrics(self, samples: Rollouts) -> dict[str, float]:
        """Empty: the metrics are the other library's."""
        return {}

    def update_metrics(self, steps: Sequence[tuple[Rollouts, Mapping[str, Tensor]]]) -> dict[str, float]:
        """Empty: the metrics are the other library's."""
        return {}
