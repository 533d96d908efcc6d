"""Attention that separates the samples of a packed row: one call per sample, torch's kernel for samples of different
lengths on CUDA, or Transformers' flash attention. `probe_model` has the check whether a model can use it, `heads` the
forward of packed samples.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from ..torch_compat import takes_argument
from .packed_row import PackedRow, Segment
from .prefix_attention import PrefixAttention


logger = logging.get_logger(__name__)

PACKED = "trl_realloc_packed"  # name in Transformers of sdpa within each sample of a packed row
_packing: contextvars.ContextVar[bool] = contextvars.ContextVar("packing", default=False)
probed: contextvars.ContextVar[LocalAttention | None] = contextvars.ContextVar("probed", default=None)
LARGEST_HEAD = 256  # largest head size of flash attention
HEAD_MULTIPLE = 8  # its kernels refuse other head sizes, or pad them
OLDEST_CAPABILITY = (8, 0)  # Ampere; a V100 or a T4 has no kernel


@dataclass
class LocalAttention:
    """The local attention (windows, chunks) of a model in a probe. Packed attention ignores the masks and applies only
    the windows that the attention layers pass as an argument. A window of thousands of tokens does not change the
    outputs of a probe of five tokens, so both are recorded and compared.

    Attributes:
        masks: sizes in the masks that the model requests; a word for a mask that the model or a layer makes itself.
        windows: sizes that its attention layers pass.
    """

    masks: set[int | str] = field(default_factory=set)
    windows: set[int | str] = field(default_factory=set)

    @property
    def is_known_to_layers(self) -> bool:
        """True if the layers pass every window of the masks."""
        return self.masks <= self.windows


def _packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention within each sample of a packed row; Transformers' sdpa without the keyword argument `packed_row`.

    One sdpa call per sample costs the sum of the squared lengths. A block mask over the row would cost the square of
    their sum: 32 times as much for 32 samples of equal length. `query`, `key` and `value` are (1, heads, tokens,
    head_dim).
    """
    row: PackedRow | None = kwargs.pop("packed_row", None)
    if row is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    window = kwargs.pop("sliding_window", None)
    if (local_attention := probed.get()) is not None:
        if window is not None:
            local_attention.windows.add(window)
        if attention_mask is not None and attention_mask.dim() == 4:  # not from `_packed_mask`, which makes none
            local_attention.masks.add("mask or bias of an attention layer")
    if window is not None and window >= max(row.lengths):
        window = None
    if has_varlen(query, value, kwargs):
        return varlen_attention(query, key, value, row, window, kwargs.get("scaling")), None
    if row.saved and window is None and _in_blocks(query, value, kwargs):
        q, k, v = (part.to(computed_in(query)) for part in (query, key, value))
        result: Tensor = PrefixAttention.apply(q, k, v, row, kwargs.get("scaling"))
        return result.transpose(1, 2), None
    queries = [tokens for tokens in row.own if tokens]
    seen = asking = queries
    if row.saved:
        seen, _ = row.keys
        key, value = (part.index_select(2, row.on(part.device)) for part in (key, value))
        if window is None:
            # Computes the queries of the shared beginning again: without a mask a sample's memory grows with its
            # length, with a mask of queries by keys with its square.
            query, asking = query.index_select(2, row.on(query.device)), seen
    parts = []
    for q, k, v, count in zip(query.split(asking, 2), key.split(seen, 2), value.split(seen, 2), queries, strict=True):
        if window is not None:
            unseen = max(0, k.shape[2] - q.shape[2] - window + 1)
            k, v = k[:, :, unseen:], v[:, :, unseen:]
        mask = _mask(q.shape[2], k.shape[2], window, q.device)
        parts.append(sdpa_attention_forward(module, q, k, v, mask, is_causal=mask is None, **kwargs)[0][:, -count:])
    return torch.cat(parts, dim=1), None


def _in_blocks(query: Tensor, value: Tensor, arguments: dict[str, Any]) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1] and keeps_scores(arguments)


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """(1, 1, queries, keys) bool: which keys the last tokens of a sample see; `None` for causal attention over all of
    its tokens."""
    if queries == keys and (window is None or keys <= window):
        return None
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return ((distance >= 0) & (distance < (window or keys)))[None, None]


def _packed_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask for packed rows; Transformers' sdpa mask otherwise."""
    if not _packing.get():
        return sdpa_mask(*args, **kwargs)
    if (local_attention := probed.get()) is not None:
        if kwargs.get("local_size"):  # a sliding window or chunks; Qwen2-MoE makes a mask of 0 that no layer uses
            local_attention.masks.add(kwargs["local_size"])
        if kwargs.get("use_vmap"):  # Transformers sets it for a mask function that the model defines
            local_attention.masks.add("mask function of the model")
    return None


AttentionInterface.register(PACKED, _packed_attention)
AttentionMaskInterface.register(PACKED, _packed_mask)


def shares_rows(model: PreTrainedModel) -> bool:
    """True if the model, which must pass `packs`, can compute tokens that samples share at their beginnings once for
    all of them, and the rest of each sample as if it were alone."""
    return bool(getattr(model, "shares_rows", False)) and not is_flash(attention_of(model))


def may_pack(implementation: str | None) -> bool:
    """True if an attention implementation of Transformers can keep the samples of a packed row apart."""
    return implementation in ("sdpa", PACKED) or is_flash(implementation)


def packed_arguments(model: PreTrainedModel, row: PackedRow, ids: Tensor) -> dict[str, Any]:
    """The arguments of a forward of a packed row beside its ids and positions.

    Args:
        model: a model that passes `packs`, and `shares_rows` if the row's samples share their beginnings.
        ids: (tokens,) token ids of the row.
    """
    if is_flash(attention_of(model)):
        return flash_arguments(row.lengths, ids.device)
    # without a mask Transformers looks for samples in the positions, for which the host waits for the device
    return {"attention_mask": torch.ones_like(ids)[None], "packed_row": row}


def attention_of(model: PreTrainedModel) -> str | None:
    return getattr(backbone_of(model).config, "_attn_implementation", None)


@contextlib.contextmanager
def packed_rows() -> Iterator[None]:
    """Makes forwards of a model with `PACKED` attention take packed rows, without masks, inside the context."""
    token = _packing.set(True)
    try:
        yield
    finally:
        _packing.reset(token)


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its task's head. Layers of adapters stay in it."""
    base = base_of(model)
    return getattr(base, base.base_model_prefix, base)


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The Transformers model inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


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
