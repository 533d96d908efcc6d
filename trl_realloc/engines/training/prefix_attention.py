"""Attention on a CPU over a packed row in which samples share their beginnings, in blocks of queries and keys, so that
no key or value is copied. `packed_attention` says when.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_compat import cpu_attention, cpu_attention_backward
from .packed_row import PackedRow


class Block(NamedTuple):
    """Columns of queries and of the keys that they see: all of the keys, or, if `is_causal`, where both are the same
    columns, the keys up to the query."""

    queries: slice
    keys: slice
    is_causal: bool


def blocks_of(row: PackedRow) -> list[Block]:
    """The blocks of a row: one for each segment's own tokens, and one for each run of columns before consecutive
    segments."""
    blocks = [Block(slice(s.begin, s.end), slice(s.begin, s.end), True) for s in row.segments if s.end > s.begin]
    shared, open_at = list[Block](), dict[tuple[int, int], int]()
    for segment in row.segments:
        for run in segment.before if segment.end > segment.begin else ():
            index = open_at.get(run)
            if index is not None and shared[index].queries.stop == segment.begin:
                shared[index] = shared[index]._replace(queries=slice(shared[index].queries.start, segment.end))
            else:
                open_at[run] = len(shared)
                shared.append(Block(slice(segment.begin, segment.end), slice(*run), False))
    return blocks + shared


class PrefixAttention(torch.autograd.Function):
    """Causal attention within each sample of a packed row, (1, heads, tokens, head_dim).

    The results of a token's blocks are added with weights from their normalizers (log-sum-exp of the scores). With the
    normalizers over all keys, a block's backward is that of attention to its keys alone.

    Args (of `apply`):
        query, key, value: (1, heads, tokens, head_dim) on a CPU; keys and values may have fewer heads.
        row: row of the tokens.
        scaling: factor of the scores; `None` for head_dim ** -0.5.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, row: PackedRow, scaling: float | None) -> Tensor:
        blocks = blocks_of(row)
        heads, tokens = query.shape[1:3]
        result = query.new_empty((1, tokens, heads, value.shape[-1])).transpose(1, 2)
        normalizer = torch.empty((1, heads, tokens), dtype=torch.promote_types(query.dtype, torch.float32))
        for q, k, is_causal in blocks:
            part, sums = cpu_attention(query[:, :, q], key[:, :, k], value[:, :, k], is_causal, scaling)
            if not is_causal:
                before = normalizer[:, :, q]
                both = torch.logaddexp(before, sums)
                earlier = result[:, :, q] * torch.exp(before - both)[..., None]
                part, sums = earlier.add_(part * torch.exp(sums - both)[..., None]), both
            result[:, :, q], normalizer[:, :, q] = part, sums
        ctx.save_for_backward(query, key, value, result, normalizer)
        ctx.blocks, ctx.scaling = blocks, scaling
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, normalizer = ctx.saved_tensors
        inputs = (query, key, value)
        learned = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in inputs]
        for q, k, is_causal in ctx.blocks:
            parts = cpu_attention_backward(
                gradients[0][:, :, q],
                query[:, :, q],
                key[:, :, k],
                value[:, :, k],
                result[:, :, q],
                normalizer[:, :, q],
                is_causal,
                ctx.scaling,
            )
            for total, columns, part in zip(learned, (q, k, k), parts, strict=True):
                if is_causal:  # the first block of these columns
                    total[:, :, columns] = part
                else:
                    total[:, :, columns] += part
        return *learned, None, None
