"""Attention within the samples of a packed row by kernels for samples of different lengths: Transformers' own path for
flash attention, and torch's on CUDA.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers.utils import logging

from ..torch_compat import takes_argument
from .packed_row import PackedRow, Segment


logger = logging.get_logger(__name__)

LARGEST_HEAD = 256  # largest head size of flash attention
HEAD_MULTIPLE = 8  # its kernels refuse other head sizes, or pad them
OLDEST_CAPABILITY = (8, 0)  # Ampere; a V100 or a T4 has no kernel


def is_flash(implementation: str | None) -> bool:
    """True if an attention implementation of Transformers takes packed rows by the bounds of their samples:
    `flash_attention_2` and `3`, and those of the kernels hub."""
    return implementation is not None and "flash" in implementation


def flash_arguments(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """The arguments of a forward of a packed row by Transformers' flash attention."""
    bounds, longest = sample_bounds(lengths, device), max(lengths)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def sample_bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    """(samples + 1,) int32: the start of each sample of a packed row, and the end of the last."""
    return _bounds(tuple(lengths), device)


@functools.lru_cache(maxsize=4)  # the same for all layers of a forward
def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    bounds = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)
    return bounds.to(device, non_blocking=True)


def has_varlen(query: Tensor, value: Tensor, arguments: dict[str, Any]) -> bool:
    """True if torch's attention for samples of different lengths supports these arguments: on a GPU that has the
    kernel, in 16 bits (by autocast too), without changes of the scores.

    Args:
        arguments: arguments of Transformers' attention functions, without windows.
    """
    dtype, size = computed_in(query), query.shape[-1]
    is_half = dtype in (torch.float16, torch.bfloat16)
    fits = size == value.shape[-1] <= LARGEST_HEAD and size % HEAD_MULTIPLE == 0
    if not (query.is_cuda and is_half and fits and keeps_scores(arguments)):
        return False
    return has_kernel(query.device, dtype, size)


def keeps_scores(arguments: Mapping[str, Any]) -> bool:
    """True if none of the arguments of Transformers' attention functions changes the scores or drops some."""
    changes = ("softcap", "s_aux", "sinks", "dropout", "position_bias")
    return not any(isinstance(arguments.get(name), Tensor) or arguments.get(name) for name in changes)


def computed_in(query: Tensor) -> torch.dtype:
    """The dtype of the attention: that of autocast, which casts the arguments of torch's own attention functions. The
    query of a float32 model is float32 under autocast, because its rotary embedding is."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


@functools.cache
def has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if a device supports torch's attention for samples of different lengths, and its gradients."""
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return False
    # in a separate thread, where gradient checkpointing does not count the tensors that the trial saves
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_try_kernel, device, dtype, head_dim).result()


def _try_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    query, key, value = (torch.zeros(1, 1, 3, head_dim, device=device, dtype=dtype) for _ in range(3))
    value += torch.tensor([0.0, 2.0, 4.0], device=device)[:, None]
    try:
        # the second sample sees the first token of the first one, with which its one query has to be aligned
        row = PackedRow((2, 2), (0, 1), (Segment(0, 2), Segment(2, 3, ((0, 1),))))
        result = varlen_attention(query.requires_grad_(), key, value, row, None, None)
        torch.autograd.grad(result.sum(), query)
        if not torch.allclose(result[0, :, 0, 0].float(), torch.tensor([0.0, 1.0, 2.0], device=device)):
            raise RuntimeError(f"its result is {result[0, :, 0, 0].tolist()}, where it should be [0, 1, 2]")
    except (RuntimeError, TypeError, ValueError) as error:  # no kernel; a release of torch with other arguments
        logger.warning(
            f"torch's attention for samples of different lengths does not run on {device} with heads of {head_dim} in "
            f"{dtype}, so each sample's attention is computed by a separate call, which is slower: {error}"
        )
        return False
    return True


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, row: PackedRow, window: int | None, scaling: float | None
) -> Tensor:
    """Causal attention within each sample. If samples share their beginnings, each gets a copy of the keys and values
    there. A segment then has fewer queries than keys, and its last query belongs to its last key.

    Args:
        query, key, value: (1, heads, tokens, head_dim); `key` and `value` may have fewer heads.
        row: row of the tokens.
        window: number of tokens that a token sees, itself included; `None` for all before it.

    Returns:
        (1, tokens, heads, head_dim), in the dtype of autocast if it is on.
    """
    dtype = computed_in(query)
    q, k, v = (part.to(dtype).squeeze(0).transpose(0, 1) for part in (query, key, value))
    queries = [length for length in row.own if length]
    seen, _ = row.keys
    bounds = sample_bounds(queries, query.device)
    key_bounds = bounds if seen == queries else sample_bounds(seen, query.device)
    options: dict[str, Any] = {}
    if row.saved:
        k, v = (part.index_select(0, row.on(query.device)) for part in (k, v))
    if (shared_by := q.shape[1] // k.shape[1]) > 1:
        if takes_argument(varlen_attn, "enable_gqa"):
            options["enable_gqa"] = True
        else:  # torch 2.11
            k, v = (part.repeat_interleave(shared_by, dim=1) for part in (k, v))
    result = varlen_attn(
        q,
        k,
        v,
        bounds,
        key_bounds,
        max(queries),
        max(seen),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    assert isinstance(result, Tensor), "no other outputs are asked for"
    return result[None]
