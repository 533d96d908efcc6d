"""`AddingEngine`: a training engine that adds the gradients of some samples at a time, and makes the optimizer step
later.

The engines of whole mini-batches are in `base`. Who adds which samples is decided in `runtime/arriving_samples`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..algorithms.base import TokenLoss
from ..algorithms.rollout import Rollouts
from .base import Rate, TrainingEngine


@runtime_checkable
class AddingEngine(TrainingEngine, Protocol):
    """A `TrainingEngine` whose `train` is `add` and then `step`."""

    def add(self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int) -> Mapping[str, Tensor]:
        """Add the gradients of some samples of a mini-batch to those that are there. Collective over the tensor groups
        and stages of this rank's replica alone: replicas add samples independently of each other. Under DeepSpeed
        (`plan.assignment.runs_in_step`) collective over the mesh.

        Args:
            samples: none on a replica that has no samples where others have some.
            loss, micro_batch_tokens: as of `TrainingEngine.train`.

        Returns:
            Each statistic (n,) float32 on the CPU, in the order of the samples.
        """

    def step(
        self, samples: Rollouts, statistics: Mapping[str, Tensor], learning_rate: Rate, scale: float = 1.0
    ) -> None:
        """Take one optimizer step with the gradients that were added. Collective over the mesh.

        Args:
            samples: that this rank's replica has added; `index` is read.
            statistics: of them, in their order.
            scale: what the sum of all gradients is multiplied by before it is clipped; the same on every rank.

        Raises:
            NonFiniteError: as `TrainingEngine.train`.
        """

    def drop(self) -> None:
        """Forget the gradients that were added."""
