"""Attention that separates the samples of a packed row, and the check whether a model can use it. The forward of packed
samples is in `heads`.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ...common.notices import notice
from ..model_changes import described, forward_changes
from .packed_row import PackedRow, Segment
from .prefix_attention import PrefixAttention
from .probe_model import probe_model
from .varlen_attention import (
    computed_in,
    flash_arguments,
    has_varlen,
    is_flash,
    keeps_scores,
    varlen_attention,
)


@dataclass
class _LocalAttention:
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


FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# errors of a model that is run in an unusual way
CANNOT_RUN = (TypeError, ValueError, KeyError, RuntimeError, AttributeError)
PACKED = "trl_realloc_packed"  # name in Transformers of sdpa within each sample of a packed row
_packing: contextvars.ContextVar[bool] = contextvars.ContextVar("packing", default=False)
_probed: contextvars.ContextVar[_LocalAttention | None] = contextvars.ContextVar("probed", default=None)


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
    if (local_attention := _probed.get()) is not None:
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
    if (local_attention := _probed.get()) is not None:
        if kwargs.get("local_size") is not None:  # a sliding window or chunks
            local_attention.masks.add(kwargs["local_size"])
        if kwargs.get("use_vmap"):  # Transformers sets it for a mask function that the model defines
            local_attention.masks.add("mask function of the model")
    return None


AttentionInterface.register(PACKED, _packed_attention)
AttentionMaskInterface.register(PACKED, _packed_mask)


def packs(model: PreTrainedModel) -> bool:
    """True if the model computes each sample of a packed row as if it were alone. If so, sets its attention to
    `PACKED`, which is plain sdpa for every other caller.

    Transformers has no flag for this. A recurrent layer, a custom attention or learned absolute positions would mix or
    misplace samples, so a `probe_model` of the model is run on five tokens. Windows and chunks that its attention
    layers do not pass would be lost, so the requested masks are compared with the layers' windows. A model with a
    user's changes (`model_changes`), which may do anything with a row, gets padded samples.

    The answer is stored in `model.packs_rows`. A model whose weights are filled later copies it from the model that it
    gets the weights of. A model with flash attention keeps that attention, and gets the bounds of the samples.
    """
    answer: bool | None = getattr(model, "packs_rows", None)
    if answer is None:
        changes = forward_changes(model)
        answer, model.shares_rows = (False, False) if changes else _packs(model)
        model.packs_rows = answer
        base, attention = type(base_of(model)).__name__, getattr(model.config, "_attn_implementation", None)
        if not answer:
            reason = f"it has {described(changes)}" if changes else "the model mixes samples that share a row"
            notice(f"{base} (attention {attention}): samples are padded, because {reason}.")
        elif not model.shares_rows:
            notice(
                f"{base} (attention {attention}): a prompt is computed once for each of its samples; with attention "
                f"sdpa, once for all."
            )
    elif answer and not is_flash(_attention_of(model)):
        backbone_of(model).set_attn_implementation(PACKED)
    return answer


def shares_rows(model: PreTrainedModel) -> bool:
    """True if the model, which must pass `packs`, can compute tokens that samples share at their beginnings once for
    all of them, and the rest of each sample as if it were alone."""
    return bool(getattr(model, "shares_rows", False)) and not is_flash(_attention_of(model))


def may_pack(implementation: str | None) -> bool:
    """True if an attention implementation of Transformers can keep the samples of a packed row apart."""
    return implementation in ("sdpa", PACKED) or is_flash(implementation)


def packed_arguments(model: PreTrainedModel, row: PackedRow, ids: Tensor) -> dict[str, Any]:
    """The arguments of a forward of a packed row beside its ids and positions.

    Args:
        model: a model that passes `packs`, and `shares_rows` if the row's samples share their beginnings.
        ids: (tokens,) token ids of the row.
    """
    if is_flash(_attention_of(model)):
        return flash_arguments(row.lengths, ids.device)
    # without a mask Transformers looks for samples in the positions, for which the host waits for the device
    return {"attention_mask": torch.ones_like(ids)[None], "packed_row": row}


def _attention_of(model: PreTrainedModel) -> str | None:
    return getattr(backbone_of(model).config, "_attn_implementation", None)


def _packs(model: PreTrainedModel) -> tuple[bool, bool]:
    """The results of `packs` and `shares_rows`."""
    backbone = backbone_of(model)
    implementation = getattr(backbone.config, "_attn_implementation", None)
    # flash attention runs only on a GPU; another attention also shows whether the model mixes samples
    if not may_pack(implementation) or getattr(backbone.config, "is_encoder_decoder", False):
        return False, False
    answers = map(_keeps_apart, _models_to_run(backbone))
    kept_apart, shares = next((answer for answer in answers if answer is not None), (False, False))
    final = PACKED if kept_apart and not is_flash(implementation) else implementation
    if backbone.config._attn_implementation != final:
        backbone.set_attn_implementation(final)
    return kept_apart, shares and not is_flash(implementation)


def _models_to_run(backbone: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Candidates to run; the first that can be run decides for the backbone.

    A `probe_model` shows what a new model hides, whose parameters may begin at zero. Also, GPU kernels depend on the
    number of tokens, and in 16 bits their results differ by more than a weak mixing of samples. A quantized model has
    layers that cannot compute with other weights. A model whose weights are not read yet cannot be run itself.
    """
    if any(p.is_meta for p in backbone.parameters()):
        yield probe_model(backbone)
        return
    if all(p.dtype in FLOATS for p in backbone.parameters()):
        with contextlib.suppress(*CANNOT_RUN):
            yield probe_model(backbone)
    yield backbone


# the samples 1 2 3, 1 2, and 1 2 3 4 5; the last one begins with the first
PROBED = PackedRow((3, 2, 5), (0, 1, 2), (Segment(0, 3), Segment(3, 5), Segment(5, 7, ((0, 3),))))


def _keeps_apart(backbone: PreTrainedModel) -> tuple[bool, bool] | None:
    """True if a backbone computes the same for two samples in a row as for each alone, and then whether this also holds
    for a third sample that shares the first one's tokens; `None` if it cannot run. Sets its attention to `PACKED`."""
    device = next(backbone.parameters()).device
    whole = torch.tensor([[1, 2, 3, 4, 5]], device=device) % backbone.config.get_text_config().vocab_size
    was_training = backbone.training
    backbone.eval()
    local_attention = _LocalAttention()
    token = _probed.set(local_attention)
    try:
        backbone.set_attn_implementation(PACKED)
        with torch.no_grad():
            separate = [backbone(input_ids=whole[:, :length]).last_hidden_state[0] for length in PROBED.lengths]
            with packed_rows():
                packed = backbone(
                    input_ids=torch.cat([whole[:, :3], whole[:, :2], whole[:, 3:]], 1),
                    position_ids=PROBED.positions.to(device)[None],
                    attention_mask=torch.ones(1, PROBED.tokens, dtype=torch.long, device=device),
                    packed_row=PROBED,
                    use_cache=False,
                ).last_hidden_state[0]
        parts = packed[PROBED.columns.to(device)].split(PROBED.lengths)
        same = [
            torch.allclose(expected.float(), part.float(), rtol=1e-2, atol=1e-3)
            for expected, part in zip(separate, parts, strict=True)
        ]
        packs = all(same[:2]) and local_attention.is_known_to_layers
        return packs, packs and same[2]
    except CANNOT_RUN:
        return None
    finally:
        _probed.reset(token)
        backbone.train(was_training)


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
