"""Restricts logits to the sampling mask (top-k, top-p and min-p), so that log-probabilities match the sampling
distribution.

Every rule keeps the tokens whose logits reach a threshold, so a row's mask is one number. The sampling itself is in
`engines/generation/token_draw`.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh_group import MeshGroup
from ..requests import SamplingMask


# halvings of the interval of a nucleus's threshold, some 20 nats at first: beyond float32's spacing there
HALVINGS = 28


def keep_mask(
    x: Tensor,
    targets: Tensor,
    mask: SamplingMask,
    is_here: Tensor | None = None,
    group: MeshGroup | None = None,
) -> Tensor:
    """Set the logits of tokens outside the mask to -inf in place, but never the target's: it was sampled, so the
    engine kept it, although rounding may put it on the other side of the threshold here.

    Args:
        x: (rows, ids), logits after temperature, minus the row's greatest; of a rank's part of the vocabulary, which
            may be empty.
        targets: (rows,) int64, index into the ids; any index where `is_here` is False.
        is_here: (rows,) bool, whether the target is in the rank's part; `None` for everywhere.
        group: group over which the vocabulary is split; `None` for a whole one. Its ranks call this together.

    Returns:
        (rows,): a threshold between the logit of the last token that the rules keep and the next one, with which
        `keep_above` finds the same tokens.
    """
    least = x.new_full((len(x), 1), -torch.inf)
    if mask.min_p > 0:
        least = least.clamp(min=math.log(mask.min_p))
    if mask.top_k:
        least = torch.maximum(least, _kth_largest(x, mask.top_k, group))
    if mask.top_p < 1:
        least = _nucleus(x, least, mask.top_p, group)
    # between two tokens, so that the rounding of a recomputed logit changes nothing
    below = highest_of(x.masked_fill(x >= least, -torch.inf), group)
    least = torch.where(below.isinf(), below, (least + below) / 2)[:, 0]
    keep_above(x, least, targets, is_here)
    return least


def keep_above(x: Tensor, least: Tensor, targets: Tensor, is_here: Tensor | None = None) -> Tensor:
    """Set the logits below a threshold to -inf in place, except the target's. Returns `x`.

    Args:
        x: (rows, ids), logits with any offset. `targets` and `is_here` as in `keep_mask`.
        least: (rows,), thresholds with the same offset.
    """
    if not x.shape[1]:
        return x
    outside = x < least[:, None]
    is_elsewhere = torch.zeros_like(targets, dtype=torch.bool) if is_here is None else ~is_here
    columns = targets[:, None]
    outside.scatter_(1, columns, outside.gather(1, columns) & is_elsewhere[:, None])
    return x.masked_fill_(outside, -torch.inf)


def _kth_largest(x: Tensor, k: int, group: MeshGroup | None) -> Tensor:
    """(rows, 1): the k-th largest logit of the whole row; -inf if the vocabulary has fewer."""
    largest = x.topk(min(k, x.shape[1]), -1).values
    if group is not None:  # parts of the vocabulary may have fewer ids, or different numbers of them
        padded = x.new_full((len(x), k), -torch.inf)
        padded[:, : largest.shape[1]] = largest
        parts = [torch.empty_like(padded) for _ in range(group.size)]
        dist.all_gather(parts, padded, group=group.group)
        largest = torch.cat(parts, -1).topk(k, -1).values
    return largest[:, -1:]


def _nucleus(x: Tensor, least: Tensor, p: float, group: MeshGroup | None) -> Tensor:
    """(rows, 1): the threshold of the most probable tokens that together have the probability `p`, among those whose
    logits reach `least`. Halves an interval, because sorting a row takes longer on a GPU, and cannot be divided over a
    group. The tokens at and above `low` always have the probability, those at and above `high` never.
    """
    probs = x.exp().masked_fill_(x < least, 0.0)
    total = _sum(probs, group)
    ids = torch.full((1, 1), float(x.shape[1]), dtype=x.dtype, device=x.device)
    ids = _reduced(ids, dist.ReduceOp.SUM, group)
    # all tokens below it together have less than 1 - p
    low = torch.maximum(least, torch.log((1 - p) * total / ids))
    high = torch.full_like(low, 1e-3)  # above the greatest logit, which is 0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        has_enough = _sum(probs.where(x >= middle, 0.0), group) >= p * total
        low, high = torch.where(has_enough, middle, low), torch.where(has_enough, high, middle)
    return low


def _sum(x: Tensor, group: MeshGroup | None) -> Tensor:
    return _reduced(x.sum(-1, keepdim=True), dist.ReduceOp.SUM, group)


def highest_of(x: Tensor, group: MeshGroup | None = None) -> Tensor:
    """(rows, 1): the greatest value of each row, over all ranks of a group that splits rows; -inf for empty rows."""
    highest = x.amax(-1, keepdim=True) if x.shape[1] else x.new_full((len(x), 1), -torch.inf)
    return _reduced(highest, dist.ReduceOp.MAX, group)


def _reduced(x: Tensor, by: dist.ReduceOp.RedOpType, group: MeshGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, by, group=group.group)
    return x
