"""Attention that keeps the samples of one packed row apart, and the check whether a model can use it.

The forward of packed samples through a model is in `packed_forward`.
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
from .probe_model import probe_model
from .varlen_attention import flash_arguments, has_varlen, is_flash, varlen_attention


@dataclass
class _LocalAttention:
    """The local attention (windows, chunks) that a model uses in a probe. Packed attention ignores the masks and
    applies only the windows that the attention layers pass as an argument. A window of thousands of tokens does not
    show in the outputs of a probe of five tokens, so both are recorded and compared.

    Attributes:
        masks: sizes in the masks that the model asks for.
        windows: sizes that its attention layers pass.
    """

    masks: set[int | str] = field(default_factory=set)
    windows: set[int | str] = field(default_factory=set)

    @property
    def is_known_to_layers(self) -> bool:
        """True if the layers pass every window that the masks have."""
        return self.masks <= self.windows


HALVES = {torch.float16, torch.bfloat16}
CANNOT_RUN = (
    TypeError,
    ValueError,
    KeyError,
    RuntimeError,
    AttributeError,
)  # what a model raises that is run otherwise
PACKED = "trl_realloc_packed"  # the name in Transformers of sdpa within each sample of a packed row
_packing: contextvars.ContextVar[bool] = contextvars.ContextVar("packing", default=False)
_probed: contextvars.ContextVar[_LocalAttention | None] = contextvars.ContextVar("probed", default=None)


def _packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention within each sample of a packed row. Without `sample_lengths` it is Transformers' sdpa.

    One sdpa call per sample costs the sum of the squared lengths. A block mask over the row would cost the square of
    their sum: 32 times as much for 32 samples of equal length.

    Args:
        query, key, value: (1, heads, tokens, head_dim).
        kwargs: of Transformers, with `sample_lengths`, the tokens of each sample of the row.
    """
    lengths = kwargs.pop("sample_lengths", None)
    if lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    window = kwargs.pop("sliding_window", None)
    if (local_attention := _probed.get()) is not None and window is not None:
        local_attention.windows.add(window)
    if has_varlen(query, value, kwargs):
        return varlen_attention(query, key, value, lengths, window, kwargs.get("scaling")), None
    parts = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        mask = None
        if window is not None and q.shape[2] > window:
            at = torch.arange(q.shape[2], device=q.device)
            distance = at[:, None] - at[None, :]
            mask = ((distance >= 0) & (distance < window))[None, None]
        parts.append(sdpa_attention_forward(module, q, k, v, mask, is_causal=mask is None, **kwargs)[0])
    return torch.cat(parts, dim=1), None


def _packed_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask for packed rows; Transformers' sdpa mask otherwise."""
    if not _packing.get():
        return sdpa_mask(*args, **kwargs)
    if (local_attention := _probed.get()) is not None:
        if kwargs.get("local_size") is not None:  # of a sliding window or of chunks
            local_attention.masks.add(kwargs["local_size"])
        if kwargs.get("use_vmap"):  # Transformers sets it for a mask function that the model defines
            local_attention.masks.add("mask function of the model")
    return None


AttentionInterface.register(PACKED, _packed_attention)
AttentionMaskInterface.register(PACKED, _packed_mask)


def packs(model: PreTrainedModel) -> bool:
    """True if the model computes each sample of a packed row as if it were alone. If so, sets its attention to
    `PACKED`, which is plain sdpa for every other caller.

    No flag of Transformers tells this. A recurrent layer, a custom attention or learned absolute positions would mix or
    misplace samples, so the model is run on five tokens, or a `probe_model` if its weights are in 16 bits or not read
    yet. Windows and chunks that its attention layers do not know would be lost, so the masks that it asks for are
    compared with the layers' windows.

    The answer is kept in `model.packs_rows`. A model whose weights are filled later gets it from the model whose
    weights it will have. A model with flash attention keeps it, and gets the bounds of the samples.
    """
    known: bool | None = getattr(model, "packs_rows", None)
    if known is None:
        known = _packs(model)
        model.packs_rows = known
        if not known:
            base, attention = type(base_of(model)).__name__, getattr(model.config, "_attn_implementation", None)
            notice(
                f"{base} (attention {attention}): samples are padded, because the model mixes samples that share a row."
            )
    elif known and not is_flash(_attention_of(model)):
        backbone_of(model).set_attn_implementation(PACKED)
    return known


def may_pack(implementation: str | None) -> bool:
    """True if an attention implementation of Transformers can keep the samples of a packed row apart."""
    return implementation in ("sdpa", PACKED) or is_flash(implementation)


def packed_arguments(model: PreTrainedModel, lengths: list[int], ids: Tensor) -> dict[str, Any]:
    """The arguments of a forward of a packed row beside its ids and positions.

    Args:
        model: one that `packs`.
        ids: (tokens,) of the row.
    """
    if is_flash(_attention_of(model)):
        return flash_arguments(lengths, ids.device)
    # without a mask Transformers looks for samples in the positions, for which the host waits for the device
    return {"attention_mask": torch.ones_like(ids)[None], "sample_lengths": lengths}


def _attention_of(model: PreTrainedModel) -> str | None:
    return getattr(backbone_of(model).config, "_attn_implementation", None)


def _packs(model: PreTrainedModel) -> bool:
    backbone = backbone_of(model)
    implementation = getattr(backbone.config, "_attn_implementation", None)
    # the kernels of flash attention run on a GPU alone; whether the model mixes samples is seen with another attention
    if not may_pack(implementation) or getattr(backbone.config, "is_encoder_decoder", False):
        return False
    answers = map(_keeps_apart, _models_to_run(backbone))
    kept_apart = next((answer for answer in answers if answer is not None), False)
    final = PACKED if kept_apart and not is_flash(implementation) else implementation
    if backbone.config._attn_implementation != final:
        backbone.set_attn_implementation(final)
    return kept_apart


def _models_to_run(backbone: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The models of which the first that can be run answers for a backbone.

    One whose weights are not read yet cannot be run itself. In 16 bits a GPU multiplies rows of another number of
    tokens by other kernels, whose results differ by more than a weak mixing of samples would change them. A quantized
    model has layers that cannot compute with other weights.
    """
    if any(p.is_meta for p in backbone.parameters()):
        yield probe_model(backbone)
        return
    dtypes = {p.dtype for p in backbone.parameters()}
    if dtypes & HALVES and dtypes <= {*HALVES, torch.float32}:
        with contextlib.suppress(*CANNOT_RUN):
            yield probe_model(backbone)
    yield backbone


def _keeps_apart(backbone: PreTrainedModel) -> bool | None:
    """True if a backbone computes the same for two samples in a row as for each alone; `None` if it cannot be run so.
    Its attention is `PACKED` afterwards."""
    device = next(backbone.parameters()).device
    ids = torch.tensor([[1, 2, 3, 1, 2]], device=device) % backbone.config.get_text_config().vocab_size
    was_training = backbone.training
    backbone.eval()
    local_attention = _LocalAttention()
    token = _probed.set(local_attention)
    try:
        backbone.set_attn_implementation(PACKED)
        with torch.no_grad():
            separate = [backbone(input_ids=part).last_hidden_state[0] for part in (ids[:, :3], ids[:, 3:])]
            with packed_rows():
                packed = backbone(
                    input_ids=ids,
                    position_ids=torch.tensor([[0, 1, 2, 0, 1]], device=device),
                    attention_mask=torch.ones_like(ids),
                    sample_lengths=[3, 2],
                    use_cache=False,
                ).last_hidden_state[0]
        same = torch.allclose(torch.cat(separate).float(), packed.float(), rtol=1e-2, atol=1e-3)
        return same and local_attention.is_known_to_layers
    except CANNOT_RUN:
        return None
    finally:
        _probed.reset(token)
        backbone.train(was_training)


@contextlib.contextmanager
def packed_rows() -> Iterator[None]:
    """Inside, a forward of a model with `PACKED` attention is of packed rows, for which no mask is made."""
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
