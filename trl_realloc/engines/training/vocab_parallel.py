"""Log-probabilities where a tensor-parallel group shares the vocabulary: no rank ever has all logits of a token."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh_group import MeshGroup
from .packed_forward import TokenLogprobs


class SplitLogprobs(torch.autograd.Function):
    """`TokenLogprobs` on a rank's stretch of the vocabulary (Shoeybi et al. 2019, arXiv 1909.08053, section 3): the
    maximum, the sum of exponentials, the target's logit and the entropy's sum are reduced over the group, two
    collectives of a few numbers per token in all; the gradient of a rank's logits needs none.

    Args (of `apply`):
        logits: (tokens, stretch), the ids from `first` on; the stretch of a rank may be empty.
        targets: (tokens,) int64, of the whole vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, first: int, group: MeshGroup
    ) -> tuple[Tensor, Tensor]:
        tokens, stretch = logits.shape
        highest = logits.new_full((tokens,), float("-inf"), dtype=torch.float32)
        slices = list(TokenLogprobs._slices(logits)) if stretch else []
        for rows in slices:
            highest[rows] = logits[rows].float().amax(-1) / temperature
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group.group)
        here = targets - first
        ours = (here >= 0) & (here < stretch)
        sums = torch.zeros(
            3, tokens, dtype=torch.float32, device=logits.device
        )  # exponentials, weighted logits, target
        for rows in slices:
            x = logits[rows].float() / temperature
            p = torch.exp(x - highest[rows, None])
            sums[0, rows] = p.sum(-1)
            sums[1, rows] = (p * x).nan_to_num_(nan=0.0).sum(-1)  # a logit of -inf adds nothing: 0·-inf
            picked = x.gather(-1, here[rows].clamp(0, stretch - 1)[:, None]).squeeze(-1)
            sums[2, rows] = torch.where(ours[rows], picked, 0.0)
        dist.all_reduce(sums, group=group.group)
        normalizer = highest + torch.log(sums[0])
        entropy = normalizer - sums[1] / sums[0]
        ctx.save_for_backward(logits, here, ours, normalizer)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return sums[2] - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, here, ours, normalizer = ctx.saved_tensors
        scale = gradients[0] / ctx.temperature
        for rows in TokenLogprobs._slices(logits) if logits.shape[1] else ():
            p = torch.exp(logits[rows].float() / ctx.temperature - normalizer[rows, None]).neg_()
            at = here[rows].clamp(0, logits.shape[1] - 1)[:, None]
            p.scatter_add_(-1, at, ours[rows, None].to(p.dtype)).mul_(scale[rows, None])
            logits[rows] = p.to(logits.dtype)
        return logits, None, None, None, None
