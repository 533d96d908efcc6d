"""A checkpoint's tensors of a model with PEFT's adapters: their names, and PEFT's merge of adapters into the weights.
`weight_export` exports them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..quantized import dequantized, is_quantized


_BASE = "base_model.model."  # prefix of the base model's names in a PEFT model


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


def trains_base(model: PreTrainedModel) -> bool:
    """True if training a model with adapters changes parameters that it has without them, such as biases (`bias` of
    PEFT's LoRA). Modules and tokens that PEFT trains in a copy do not count.

    Args:
        model: model with adapters; may be on the meta device.
    """
    adapters = Adapters(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad and ".modules_to_save." not in name]
    return any(adapters.checkpoint_name(name) is not None for name in trained)


class Adapters:
    """The modules of PEFT in a model: which parameters they adapt, and which they replace.

    Attributes:
        quantized: the layer of each quantized weight, by the weight's name in the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import ModulesToSaveWrapper

        modules = dict(model.named_modules(remove_duplicate=False))
        self._tuned = {name: module for name, module in modules.items() if isinstance(module, BaseTunerLayer)}
        self.quantized = {f"{name}.weight": module for name, module in modules.items() if is_quantized(module)}
        # of the weights that are not quantized, and of dequantized ones
        self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
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

    def computed(self, name: str, parameter: nn.Parameter) -> tuple[tuple[nn.Parameter, ...], Callable[[], Tensor]]:
        """The parameters that the checkpoint's tensor of a parameter is computed from, and the function that computes
        it when they are full."""
        layers = [self._tuned[owner] for owner in self._owners(name)]
        if not layers:
            packed = self.quantized.get(name)
            return (parameter,), parameter.detach if packed is None else partial(dequantized, packed, self._dtype)
        others = tuple(p for p in dict.fromkeys([*layers[0].parameters(), *self._shared]) if p is not parameter)
        if not is_quantized(layers[-1].get_base_layer()):
            return (parameter, *others), partial(_merged, parameter, layers)
        return (parameter, *others), partial(_merged_quantized, parameter, layers[-1], self._dtype)

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


def _merged_quantized(parameter: nn.Parameter, layer: Any, dtype: torch.dtype) -> Tensor:
    """A quantized base layer's weight in floating point, or its bias, after PEFT's merge of LoRA by `layer`. PEFT's own
    merge would quantize the sum again, by 14 nats on a 135M model."""
    from peft.tuners.lora.layer import Linear

    base, merged_before = layer.get_base_layer(), list(layer.merged_adapters)
    if parameter is base.bias and not any(layer.lora_bias.values()):
        return parameter.data
    plain: Any = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(dequantized(base, torch.float32), requires_grad=False)
    plain.bias = None if base.bias is None else nn.Parameter(base.bias.data, requires_grad=False)
    layer.base_layer = plain
    try:
        Linear.merge(layer, safe_merge=True)
        return plain.bias.data if parameter is base.bias else plain.weight.data.to(dtype)
    finally:
        layer.base_layer = base
        layer.merged_adapters[:] = merged_before
