"""Exports a model's parameters in buckets under checkpoint names, with adapters merged into the weights. The engine
passes a function that gathers partitioned parameters (ZeRO-3).
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
from ..mesh_group import in_buckets
from ..parameter_pieces import Piece
from ..training_state import TensorSpec
from ..transformers_compat import form_in_checkpoint, tied_names
from .deepspeed_compat import full_shape


_BASE = "base_model.model."  # prefix of the base model's names in a PEFT model
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
        full_bytes: returns the bytes of a full parameter, if they are partitioned.
    """
    gather = gather or (lambda parameters: contextlib.nullcontext())
    rename = partial(checkpoint_names, model) if merged else list
    weights = _weights(model) if merged else (w for w in _plain(model) if names is None or w.name in names)
    for bucket in in_buckets(weights, lambda weight: full_bytes(weight.sources[0]), bucket_bytes):
        with torch.no_grad(), gather(list(dict.fromkeys(p for weight in bucket for p in weight.sources))):
            yield rename([(weight.name, weight.compute()) for weight in bucket])
    if merged and (others := persistent_buffers(model)):
        yield checkpoint_names(model, list(others.items()))


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint of the model has beside its parameters, such as a scale per layer or the bias of a
    router, by their names in the base model without adapters."""
    named: dict[str, Tensor] = {}
    checkpoint_name = _Adapters(model).checkpoint_name if hasattr(model, "get_base_model") else str
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
    adapters = _Adapters(model)
    named = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (clean := adapters.checkpoint_name(name)) is not None:
            named[clean] = adapters.weight(clean, name, parameter)
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


def why_not_merged(model: PreTrainedModel) -> str | None:
    """The reason why PEFT cannot merge the adapters of a model, as a sentence without its end; `None` if it can.

    Args:
        model: model with adapters; may be on the meta device.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        base, name = layer.get_base_layer(), name.removeprefix(_BASE)
        if isinstance(base, AuxiliaryTrainingWrapper):
            return f"{name} has two adapters, of which one is in trainable_token_indices, and PEFT merges only one"
        adapts_bias = any(getattr(layer, "lora_bias", {}).values()) or hasattr(layer, "beft_bias")
        if adapts_bias and getattr(base, "bias", None) is None:
            return f"{name} has no bias into which that of its adapter could be merged"
    return None


class _Adapters:
    """The modules of PEFT in a model: which parameters they adapt, and which they replace."""

    def __init__(self, model: PreTrainedModel) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import ModulesToSaveWrapper

        modules = dict(model.named_modules(remove_duplicate=False))
        self._tuned = {name: module for name, module in modules.items() if isinstance(module, BaseTunerLayer)}
        # parameters that all adapter layers share, as VB-LoRA's vectors
        self._shared = [p for name, p in model.named_parameters() if not name.startswith(_BASE)]
        # prefix of a wrapper -> prefix of the module that computes in its place
        self._used = {
            f"{name}.": f"{name}.{_used_copy(module)}."
            for name, module in modules.items()
            if isinstance(module, ModulesToSaveWrapper)
        }

    def checkpoint_name(self, name: str) -> str | None:
        """The name in the checkpoint of a parameter or buffer. `None` for an adapter's own, and for copies of a module
        that do not compute (`modules_to_save`)."""
        if not name.startswith(_BASE):
            return None
        if any(name.startswith(wrapper) and not name.startswith(used) for wrapper, used in self._used.items()):
            return None
        if (owners := self._owners(name)) and not name.startswith(f"{owners[-1]}.base_layer."):
            return None
        for wrapper, used in sorted(self._used.items(), reverse=True):
            if name.startswith(used):
                name = wrapper + name.removeprefix(used)
        return re.sub(r"(\.(base_layer|token_adapter))+\.", ".", name).removeprefix(_BASE)

    def weight(self, clean: str, name: str, parameter: nn.Parameter) -> _Weight:
        layers = [self._tuned[owner] for owner in self._owners(name)]
        if not layers:
            return _Weight(clean, (parameter,), parameter.detach)
        others = tuple(p for p in dict.fromkeys([*layers[0].parameters(), *self._shared]) if p is not parameter)
        return _Weight(clean, (parameter, *others), partial(_merged, parameter, layers))

    def _owners(self, name: str) -> list[str]:
        """The adapter layers around a parameter, the outermost first: PEFT wraps a module once for each of its
        parameters that has a separate adapter."""
        return [layer for layer in self._tuned if name.startswith(f"{layer}.")]


def _used_copy(wrapper: Any) -> str:
    """Path, in a `ModulesToSaveWrapper`, of the module that computes."""
    active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
    return f"modules_to_save.{active[0]}" if active else "original_module"


def _merged(parameter: nn.Parameter, layers: Sequence[Any]) -> Tensor:
    """A base layer's parameter after PEFT's own merge by `layers`, the outermost first. It supports every kind of
    adapter (DoRA and IA3 do more than add a product). The layers are unchanged afterwards: `safe_merge` replaces
    tensors, and the old ones are put back."""
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
