"""Exports a model's parameters in buckets under checkpoint names, with adapters merged into the weights.

How a bucket gets into a generation engine is in `generation/weight_buffers`. Gathering partitioned parameters (ZeRO-3)
is in `zero`, which passes the function for it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..base import BUCKET_BYTES, Bucket, EngineError
from ..buckets import in_buckets
from ..parameter_pieces import Piece
from ..training_state import TensorSpec
from ..transformers_compat import form_in_checkpoint
from .deepspeed_compat import full_numel, full_shape


Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]


@dataclass(frozen=True)
class _Weight:
    """One tensor of a checkpoint: its name, the parameters that it is computed from, and the function that computes it
    when they are full."""

    name: str
    sources: tuple[nn.Parameter, ...]
    compute: Callable[[], Tensor]


def buckets(
    model: nn.Module,
    gather: Gather | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    *,
    merged: bool = True,
    names: Collection[str] | None = None,
) -> Iterator[Bucket]:
    """Yield the model's parameters as full tensors, in buckets of at most `bucket_bytes` or of one larger tensor. Under
    checkpoint names its persistent buffers come too, in a bucket of their own.

    The tensors may be the live parameters: a receiver copies what it keeps. Collective if `gather` is.

    Args:
        gather: the context in which the given parameters are full, where they are partitioned.
        merged: under checkpoint names, with adapters merged into the weights. Otherwise under the module's names, with
            the adapters as parameters of their own.
        names: without `merged`, the parameters to export; `None` for all.
    """
    gather = gather or (lambda parameters: contextlib.nullcontext())
    rename = partial(checkpoint_names, model) if merged else list
    weights = _weights(model) if merged else (w for w in _plain(model) if names is None or w.name in names)
    for bucket in in_buckets(weights, lambda weight: _full_bytes(weight.sources[0]), bucket_bytes):
        with torch.no_grad(), gather(list(dict.fromkeys(p for weight in bucket for p in weight.sources))):
            yield rename([(weight.name, weight.compute()) for weight in bucket])
    if merged and (others := persistent_buffers(model)):
        yield checkpoint_names(model, list(others.items()))


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of the model has beside parameters, by its names in the base model without adapters: a scale of
    each layer, the bias of a router."""
    named: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                whole = f"{prefix}.{name}" if prefix else name
                named[_clean(re.sub(r"(\.base_layer)+\.", ".", whole))] = buffer.detach()
    return named


def whole_pieces(exported: Iterator[Bucket]) -> Iterator[list[Piece]]:
    """What an engine's `export` gives, as pieces: each a whole tensor."""
    for bucket in exported:
        yield [Piece(name, 0, tensor.reshape(-1)) for name, tensor in bucket]


def checkpoint_names(model: Any, tensors: list[tuple[str, Tensor]]) -> Bucket:
    """The tensors under the names, and in the form, that the family's checkpoints have. Since Transformers 5 they may
    differ from the module's: GPT-NeoX's `lm_head` is saved as `embed_out`, and the experts of a mixture, which the
    module has fused, are saved one by one."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return form_in_checkpoint(base, tensors) if isinstance(base, PreTrainedModel) else tensors


def specs_of(model: nn.Module) -> dict[str, TensorSpec]:
    """Shape and dtype of every parameter, also of those that ZeRO-3 has partitioned."""
    return {name: TensorSpec(full_shape(p), p.dtype) for name, p in model.named_parameters()}


def _full_bytes(parameter: nn.Parameter) -> int:
    return full_numel(parameter) * parameter.element_size()  # of a partitioned parameter numel() is 0


def _plain(model: nn.Module) -> Iterator[_Weight]:
    for name, parameter in model.named_parameters():
        yield _Weight(name, (parameter,), parameter.detach)


def _weights(model: Any) -> Iterator[_Weight]:
    if not hasattr(model, "get_base_model"):
        yield from _plain(model)
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    tuned = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, parameter in model.named_parameters():
        # the outermost first: PEFT wraps a module once for each of its parameters that has an adapter of its own
        owners = [layer for layer in tuned if name.startswith(f"{layer}.")]
        if not owners:
            if (saved := _saved_name(name, model.active_adapters)) is not None:
                yield _Weight(saved, (parameter,), parameter.detach)
        elif name.startswith(f"{owners[-1]}.base_layer."):  # otherwise it is an adapter's
            layers = [tuned[owner] for owner in owners]
            clean = _clean(re.sub(r"(\.base_layer)+\.", ".", name))
            others = tuple(p for p in layers[0].parameters() if p is not parameter)
            yield _Weight(clean, (parameter, *others), partial(_merged, parameter, layers))


def _merged(parameter: nn.Parameter, layers: Sequence[Any]) -> Tensor:
    """A base layer's parameter after PEFT's own merge, which is right for every kind of adapter (DoRA and IA3 do not
    only add a product). The layers are unchanged afterwards: `safe_merge` replaces tensors, and the old ones are put
    back.

    Args:
        layers: that adapt the base layer, the outermost first.
    """
    merged_before = [list(layer.merged_adapters) for layer in layers]
    before = [(base, base.data) for base in layers[-1].get_base_layer().parameters()]
    try:
        for layer in reversed(layers):
            layer.merge(safe_merge=True)
        return parameter.data
    finally:
        for base, data in before:
            base.data = data
        for layer, merged in zip(layers, merged_before, strict=True):
            layer.merged_adapters[:] = merged


def _saved_name(name: str, active_adapters: Sequence[str]) -> str | None:
    """The checkpoint name of a parameter that no adapter layer has. `None` for a module that `modules_to_save` has
    replaced, and for its copies in adapters that are not active."""
    if ".original_module." in name:
        return None
    parts = name.split(".")
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        if parts[at + 1] not in active_adapters:
            return None
        del parts[at : at + 2]  # with the adapter's name
    return _clean(".".join(parts))


def _clean(name: str) -> str:
    return name.removeprefix("base_model.model.")


def check_names(saved: Collection[str], names: Collection[str]) -> None:
    """Refuse the training state of another model, which would leave parameters as they were initialized.

    Args:
        saved: names of the parameters of the state.
        names: of all parameters that the role trains.

    Raises:
        EngineError: the state has other parameters.
    """
    unmatched = sorted(set(saved) ^ set(names))
    if unmatched:
        raise EngineError(
            f"the state to load has {len(saved)} parameters, the model trains {len(names)}; "
            f"{', '.join(unmatched[:3])} {'is' if len(unmatched) == 1 else 'are'} in one of them only."
        )
