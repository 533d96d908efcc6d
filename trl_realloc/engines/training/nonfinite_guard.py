"""Refuses an optimizer step whose losses or gradients are not finite, on all ranks of a mesh together.

A loss that is not finite gets NaN gradients (`guarded`). Gradients are summed over the mesh, so every rank sees this in
the global norm, without another message. Checks of samples and weights are in `algorithms/nonfinite`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...algorithms.nonfinite import NonFiniteError
from ...algorithms.rollout import Rollouts
from ..mesh_group import MeshGroup


def guarded(loss: Tensor) -> Tensor:
    """The loss (0-dimensional), with NaN gradients if it is not finite. Otherwise they may be finite: the square of a
    large error overflows, its derivative does not. Does not wait for the device."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


def refusal(group: MeshGroup, samples: Rollouts, statistics: Mapping[str, Tensor]) -> NonFiniteError:
    """The error for a step whose gradients are not finite, with the sample that caused it. Collective over the mesh;
    the same on all ranks.

    Args:
        samples: this rank's share of the mini-batch.
        statistics: (n,) tensors by name on the CPU, from `run_training`. Names that end in `_loss` are losses.
    """
    sample = -1
    for name, column in statistics.items():
        rows = (~column.isfinite()).nonzero()
        if name.endswith("_loss") and len(rows):
            sample = int(samples.tensor("index")[int(rows[0])])
    sample = group.max(sample)
    if sample < 0:
        return NonFiniteError("the gradients are not finite, though every sample's loss is")
    return NonFiniteError(f"the loss of sample {sample} of the batch is not finite", sample)
