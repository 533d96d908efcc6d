"""Exports a model's parameters in buckets under checkpoint names, with adapters merged into the weights
(`adapter_weights`). The engine passes a function that gathers partitioned parameters (ZeRO-3).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..base import BUCKET_BYTES, Bucket, EngineError, SourceDigests
from ..mesh_group import in_buckets
from ..parameter_pieces import Piece
from ..quantized import elements, stored
from ..training_state import TensorSpec
from ..transformers_compat import form_in_checkpoint, tied_names
from ..weight_digest import digest, numbers
from .adapter_weights import Adapters
from .deepspeed_compat import full_shape


Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]


@dataclass(frozen=True)
class _Weight:
    """One tensor of a checkpoint: its name, the parameters that it is computed from, and the function that computes it
    when they are full."""

    name: str
    sources: tuple[nn.Parameter, ...]
    compute: Callable[[], Tensor]
    quantized: Any = None  # the layer of a quantized weight

    def stored(self, source: nn.Parameter) -> list[Tensor]:
        """The tensors with a source's values."""
        is_packed = self.quantized is not None and source is self.quantized.weight
        return stored(self.quantized) if is_packed else [source]

    def bytes(self, full_bytes: Callable[[nn.Parameter], int]) -> int:
        # in float32, as which it is computed
        return full_bytes(self.sources[0]) if self.quantized is None else 4 * elements(self.quantized)


def buckets(
    model: nn.Module,
    gather: Gather | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    *,
    merged: bool = True,
    names: Collection[str] | None = None,
    without: Collection[str] = (),
    full_bytes: Callable[[nn.Parameter], int] = lambda parameter: parameter.nbytes,
) -> Iterator[Bucket]:
    """Yield the model's parameters as full tensors, in buckets of at most `bucket_bytes` or of one larger tensor. Under
    checkpoint names its persistent buffers come too, in a separate bucket.

    The tensors may be the live parameters, so a receiver that keeps them copies them. Collective if `gather` is.

    Args:
        gather: context in which the given parameters are full, if they are partitioned.
        merged: True for checkpoint names, with adapters merged into the weights. False for the module's names, with
            the adapters as separate parameters.
        names: parameters to export if not `merged`; `None` for all.
        without: checkpoint names of tensors to leave out if `merged`.
        full_bytes: returns the bytes of a full parameter, if they are partitioned.
    """
    gather = gather or (lambda parameters: contextlib.nullcontext())
    rename = partial(checkpoint_names, model) if merged else list
    weights = _weights(model) if merged else (w for w in _plain(model) if names is None or w.name in names)
    if without:
        weights = (weight for weight, stored in _with_names(model, weights) if not stored <= frozenset(without))
    for bucket in in_buckets(weights, lambda weight: weight.bytes(full_bytes), bucket_bytes):
        with torch.no_grad(), gather(list(dict.fromkeys(p for weight in bucket for p in weight.sources))):
            yield rename([(weight.name, weight.compute()) for weight in bucket])
    if merged and (others := persistent_buffers(model)):
        yield checkpoint_names(model, list(others.items()))


def source_digests(
    model: PreTrainedModel,
    digest_of: Callable[[Tensor], Tensor] = digest,
    values_of: Callable[[Sequence[Tensor]], list[int]] = numbers,
) -> SourceDigests:
    """See `base.ScoringEngine.source_digests`.

    Args:
        digest_of: digest of a tensor, or of this rank's partition of it.
        values_of: the digests of the tensors as numbers, from all results of `digest_of`.
    """
    frozen = [weight for weight in _weights(model) if not any(p.requires_grad for p in weight.sources)]
    tensors = [[tensor for source in weight.sources for tensor in weight.stored(source)] for weight in frozen]
    values = iter(values_of([digest_of(tensor) for sources in tensors for tensor in sources]))
    digests = {w.name: tuple(itertools.islice(values, len(t))) for w, t in zip(frozen, tensors, strict=True)}
    return {name: digests[weight.name] for weight, stored in _with_names(model, frozen) for name in stored}


def _with_names(model: PreTrainedModel, weights: Iterable[_Weight]) -> Iterator[tuple[_Weight, frozenset[str]]]:
    """Each weight with the names of the tensors that it is in a checkpoint."""
    weights = list(weights)
    empty = [(w.name, torch.empty(full_shape(w.sources[0]), device="meta")) for w in weights]
    kept = {name for name, _ in checkpoint_names(model, empty)}
    for weight, item in zip(weights, empty, strict=True):
        # a tensor at a time takes 1 ms
        named = [weight.name] if weight.name in kept else [name for name, _ in checkpoint_names(model, [item])]
        yield weight, frozenset(named)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint of the model has beside its parameters, such as a scale per layer or the bias of a
    router, by their names in the base model without adapters."""
    named: dict[str, Tensor] = {}
    checkpoint_name = Adapters(model).checkpoint_name if hasattr(model, "get_base_model") else str
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            clean = checkpoint_name(f"{prefix}.{name}" if prefix else name)
            if clean is not None and name not in module._non_persistent_buffers_set:
                named[clean] = buffer.detach()
    return named


def whole_pieces(exported: Iterator[Bucket]) -> Iterator[list[Piece]]:
    """Converts an engine's `export` into pieces, each a whole tensor."""
    for bucket in exported:
        yield [Piece(name, 0, tensor.reshape(-1)) for name, tensor in bucket]


def checkpoint_names(model: PreTrainedModel, tensors: list[tuple[str, Tensor]]) -> Bucket:
    """The tensors under the names, and in the form, of the family's checkpoints. Since Transformers 5 they may differ
    from the module's: GPT-NeoX's `lm_head` is saved as `embed_out`, and the experts of a mixture, which the module has
    fused, are saved one by one."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return form_in_checkpoint(base, tensors) if isinstance(base, PreTrainedModel) else tensors


def specs_of(model: nn.Module) -> dict[str, TensorSpec]:
    """Shape and dtype of every parameter, including those that ZeRO-3 has partitioned."""
    return {name: TensorSpec(full_shape(p), p.dtype) for name, p in model.named_parameters()}


def _plain(model: nn.Module) -> Iterator[_Weight]:
    for name, parameter in model.named_parameters():
        yield _Weight(name, (parameter,), parameter.detach)


def _weights(model: PreTrainedModel) -> Iterator[_Weight]:
    if not hasattr(model, "get_base_model"):
        yield from _plain(model)
        return
    adapters = Adapters(model)
    named = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (clean := adapters.checkpoint_name(name)) is not None:
            named[clean] = _Weight(clean, *adapters.computed(name, parameter), adapters.quantized.get(name))
    tied = tied_names(model.get_base_model())
    for name, weight in named.items():
        other = named.get(tied.get(name, ""))
        # an adapter may change one of two tied parameters, which are then exported separately
        if other is None or set(weight.sources) != set(other.sources):
            yield weight


def adapters_untie(model: PreTrainedModel) -> bool:
    """True if an adapter changes one of two parameters that the base model ties, the head or the embedding, so that
    `buckets` returns both.

    Args:
        model: model with adapters; may be on the meta device.
    """
    return not tied_names(model.get_base_model()).keys().isdisjoint(weight.name for weight in _weights(model))


def check_names(saved: Collection[str], names: Collection[str]) -> None:
    """Refuse the training state of another model, which would leave parameters as they were initialized.

    Args:
        saved: names of the parameters of the state.
        names: names of all parameters that the role trains.

    Raises:
        EngineError: the state has other parameters.
    """
    unmatched = sorted(set(saved) ^ set(names))
    if unmatched:
        raise EngineError(
            f"the state to load has {len(saved)} parameters, the model trains {len(names)}; "
            f"{', '.join(unmatched[:3])} {'is' if len(unmatched) == 1 else 'are'} in one of them only."
        )
