"""Log-probabilities of tokens whose logits are split over a tensor-parallel group, without gathering the logits.
`tensor_parallel` splits the language head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh_group import MeshGroup
from ..requests import SamplingMask
from .sampling_mask import keep_above, keep_mask
from .token_logprobs import TokenLogprobs, logits_gradient, precise, scaled


class SplitLogprobs(torch.autograd.Function):
    """`TokenLogprobs` from a rank's part of the vocabulary (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Two
    collectives per forward reduce four numbers per token over the group: the maximum, the sum of exponentials, the
    target's logit and the weighted sum for the entropy. The backward needs no collective.

    Args (of `apply`):
        logits: (tokens, ids) of the rank's part of the vocabulary, which may be empty.
        targets: (tokens,) int64, ids of the full vocabulary.
        temperature: divisor of the logits.
        first: first id of the rank's part.
        group: tensor-parallel group.
        sampling_mask: tokens of the distribution, see `TokenLogprobs`. Top-p adds some 30 collectives per slice of one
            number per token, and top-k one of k numbers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        first: int,
        group: MeshGroup,
        sampling_mask: SamplingMask | None = None,
    ) -> tuple[Tensor, Tensor]:
        tokens, ids = logits.shape
        dtype = precise(logits.dtype)
        highest = logits.new_full((tokens,), float("-inf"), dtype=dtype)
        slices = [rows for rows, _ in TokenLogprobs.slices(logits, dtype, 0)] if ids else []
        least = None if sampling_mask is None else torch.empty_like(highest)
        for rows in slices:
            highest[rows] = logits[rows].to(dtype).amax(-1) / temperature
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group.group)
        local_targets = targets - first
        is_here = (local_targets >= 0) & (local_targets < ids)
        sums = torch.zeros(3, tokens, dtype=dtype, device=logits.device)  # exponentials, weighted logits, target
        if sampling_mask is not None and least is not None:
            for rows in TokenLogprobs.rows(logits, group.max(ids)):
                x = logits[rows].to(dtype) / temperature - highest[rows, None]
                columns = local_targets[rows].clamp(0, ids - 1)
                least[rows] = highest[rows] + keep_mask(x, columns, sampling_mask, is_here[rows], group)
        for rows in slices:
            x = logits[rows].to(dtype) / temperature
            if least is not None:
                keep_above(x, least[rows], local_targets[rows].clamp(0, ids - 1), is_here[rows])
            p = torch.exp(x - highest[rows, None])
            sums[0, rows] = p.sum(-1)
            sums[1, rows] = (p * x).nan_to_num_(nan=0.0).sum(-1)  # for a logit of -inf, 0 * -inf counts as 0
            picked = x.gather(-1, local_targets[rows].clamp(0, ids - 1)[:, None]).squeeze(-1)
            sums[2, rows] = torch.where(is_here[rows], picked, 0.0)
        dist.all_reduce(sums, group=group.group)
        normalizer = highest + torch.log(sums[0])
        entropy = normalizer - sums[1] / sums[0]
        ctx.save_for_backward(logits, local_targets, is_here, normalizer, entropy)
        ctx.temperature, ctx.least = temperature, None if least is None else least - normalizer
        ctx.set_materialize_grads(False)  # the gradient of an output that the loss does not use is `None`
        return sums[2] - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None, None, None]:
        logits, local_targets, is_here, normalizer, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = scaled(gradients, normalizer, ctx.temperature)
        for rows, (log_p,) in TokenLogprobs.slices(logits, normalizer.dtype, 1) if logits.shape[1] else ():
            log_p.copy_(logits[rows]).div_(ctx.temperature).sub_(normalizer[rows, None])
            columns = local_targets[rows].clamp(0, logits.shape[1] - 1)
            if ctx.least is not None:
                keep_above(log_p, ctx.least[rows], columns, is_here[rows])
            of_rows = None if of_entropy is None else (of_entropy[rows], entropy[rows])
            of_logits = logits_gradient(log_p, columns, of_logprobs[rows], of_rows, is_here[rows])
            logits[rows] = of_logits.to(logits.dtype)
        return logits, None, None, None, None, None
