"""Refuses an optimizer step whose losses or gradients are not finite, on all ranks of a mesh at the same place.

A loss that is not finite makes its gradients NaN (`guarded`), and gradients are summed over the mesh: one look at their
global norm, which every rank has, decides for all of them without another message.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...algorithms.nonfinite import NonFiniteError
from ...algorithms.rollout import Rollouts
from ..mesh_group import MeshGroup


def guarded(loss: Tensor) -> Tensor:
    """The loss (0-dimensional), with NaN for gradients where it is not finite: the square of a large error overflows,
    and its derivative does not. Stays on the device."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


def refusal(group: MeshGroup, samples: Rollouts, statistics: Mapping[str, Tensor]) -> NonFiniteError:
    """Why a step whose gradients are not finite was refused. Collective over the mesh; the same on all its ranks.

    Args:
        samples: this rank's of the mini-batch.
        statistics: (n,) of each, on the CPU, as `run_training` returns them; those named `*_loss` are the losses.
    """
    blamed = -1
    for name, column in statistics.items():
        places = (~column.isfinite()).nonzero()
        if name.endswith("_loss") and len(places):
            blamed = int(samples.tensor("index")[int(places[0])])
    blamed = group.max(blamed)
    if blamed < 0:
        return NonFiniteError("the gradients are not finite, though every sample's loss is")
    return NonFiniteError(f"the loss of sample {blamed} of the batch is not finite", blamed)
