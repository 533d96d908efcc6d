"""A model's parameters under the names a checkpoint has, adapters merged in, in buckets.

What a generation engine loads. Owns no transport; where parameters are partitioned (ZeRO-3) the caller says how to
gather a few of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..base import BUCKET_BYTES, Bucket, EngineError
from ..buckets import in_buckets


try:  # what `save_pretrained` names parameters by; not public, and absent before Transformers 5
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:
    revert_weight_conversion = None


Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]


@dataclass(frozen=True)
class _Weight:
    """One tensor of a checkpoint: the parameters that make it, and how, once they are whole."""

    name: str
    sources: tuple[nn.Parameter, ...]
    make: Callable[[], Tensor]


def buckets(
    model: nn.Module, gather: Gather | None = None, bucket_bytes: int = BUCKET_BYTES, *, merged: bool = True
) -> Iterator[Bucket]:
    """Full tensors in checkpoint names, in buckets of about `bucket_bytes`; a larger tensor has one of its own.

    The tensors may be the live parameters: a receiver copies what it keeps. Collective if `gather` is.

    Args:
        gather: makes some parameters whole for a while, where they are partitioned.
        merged: adapters added into the weights they adapt; else every parameter as the module has it, adapters apart.
    """
    gather = gather or (lambda parameters: contextlib.nullcontext())
    named = partial(checkpoint_names, model) if merged else list
    weights = _weights(model) if merged else _plain(model)
    for bucket in in_buckets(weights, lambda weight: _full_bytes(weight.sources[0]), bucket_bytes):
        with torch.no_grad(), gather(list(dict.fromkeys(p for weight in bucket for p in weight.sources))):
            yield named([(weight.name, weight.make()) for weight in bucket])


def checkpoint_names(model: Any, tensors: list[tuple[str, Tensor]]) -> Bucket:
    """The module's names as the family's checkpoints have them, where they differ since Transformers 5 (GPT-NeoX's
    `lm_head` is saved as `embed_out`; a mixture's experts lie fused in the module, one by one in a checkpoint)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if revert_weight_conversion is None or not isinstance(base, PreTrainedModel):
        return tensors
    return list(revert_weight_conversion(base, dict(tensors)).items())


def _full_bytes(parameter: nn.Parameter) -> int:
    # under ZeRO-3 numel() is 0 between gathers; DeepSpeed keeps the true one in ds_numel
    return int(getattr(parameter, "ds_numel", parameter.numel())) * parameter.element_size()


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
        owner = next((layer for layer in tuned if name.startswith(f"{layer}.")), None)
        if owner is None:
            if (kept := _saved_name(name, model.active_adapters)) is not None:
                yield _Weight(kept, (parameter,), parameter.detach)
        elif name.startswith(f"{owner}.base_layer."):
            layer = tuned[owner]
            clean = _clean(name.replace(".base_layer.", "."))
            others = tuple(p for p in layer.parameters() if p is not parameter)
            yield _Weight(clean, (parameter, *others), partial(_merged, parameter, layer))


def _merged(parameter: nn.Parameter, layer: Any) -> Tensor:
    """A base layer's parameter as peft's own merge makes it, whatever the kind of adapter (DoRA and IA3 do not just
    add a product); the layer is left as it was. `safe_merge` puts new tensors in the old ones' place."""
    merged_before = list(layer.merged_adapters)
    before = [(base, base.data) for base in layer.get_base_layer().parameters()]
    try:
        layer.merge(safe_merge=True)
        return parameter.data
    finally:
        for base, data in before:
            base.data = data
        layer.merged_adapters[:] = merged_before


def _saved_name(name: str, active_adapters: Sequence[str]) -> str | None:
    """The checkpoint name of a parameter outside the adapters; None for the original that `modules_to_save` replaced,
    and for its copies in adapters that are not active."""
    if ".original_module." in name:
        return None
    parts = name.split(".")
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        if parts[at + 1] not in active_adapters:
            return None
        del parts[at : at + 2]  # and the adapter's name
    return _clean(".".join(parts))


def _clean(name: str) -> str:
    return name.removeprefix("base_model.model.")


def check_state(state: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse a `state_dict` of another model: what it lacks would be left as it was made.

    Args:
        names: of the parameters that the whole role trains.

    Raises:
        EngineError
    """
    odd = sorted(set(state["parameters"]) ^ set(names))
    if odd:
        raise EngineError(
            f"the state to load has {len(state['parameters'])} parameters, the model trains {len(names)}; "
            f"{', '.join(odd[:3])} {'is' if len(odd) == 1 else 'are'} in one of them only."
        )
