"""bitsandbytes' quantized layers of a policy that trains adapters (QLoRA): which models can be trained, the layers'
weights as floating-point numbers, and a check that a layer computes with these weights.

`adapter_weights` adds the adapters to the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn


if TYPE_CHECKING:
    from transformers import PretrainedConfig

BITSANDBYTES = "bitsandbytes"
MOST_ERROR = 0.05  # largest relative difference of a layer's outputs. Quantized activations on a GPU: some 0.01


def quantization(model: object) -> str | None:
    """The quantization method of a model or of its Transformers config, such as "bitsandbytes" or "gptq"; `None` if it
    is not quantized."""
    config: Any = getattr(model, "config", model)
    if settings := getattr(config, "quantization_config", None):
        return method_of(settings)
    return "unknown" if getattr(model, "is_quantized", False) else None


def method_of(settings: Any) -> str:
    """The method of a `quantization_config`, an object of Transformers or a mapping."""
    method = _setting(settings, "quant_method", BITSANDBYTES)
    return str(getattr(method, "value", method))


def has_8_bits(settings: Any) -> bool:
    return bool(_setting(settings, "load_in_8bit", False))


def _setting(settings: Any, name: str, default: object) -> Any:
    return settings.get(name, default) if isinstance(settings, Mapping) else getattr(settings, name, default)


def without_quantization(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of a config for models with floating-point weights, such as those of generation engines; the config itself
    if it has no quantization."""
    if quantization(config) is None:
        return config
    config = copy.copy(config)
    del config.quantization_config
    return config


def is_quantized(layer: nn.Module) -> bool:
    """True for a layer with quantized weights. bitsandbytes need not be installed."""
    return type(layer._parameters.get("weight")).__name__ in ("Params4bit", "Int8Params")


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, layer) for name, layer in model.named_modules() if is_quantized(layer))


def dequantized(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight that a quantized layer computes with, (outputs, inputs), in new memory."""
    import bitsandbytes

    weight = layer.weight
    if isinstance(weight, bitsandbytes.nn.Params4bit):
        state = copy.copy(weight.quant_state)
        # the layer dequantizes into the dtype of its product, not into that of the weights before quantization
        state.dtype = layer.compute_dtype or dtype
        return bitsandbytes.functional.dequantize_4bit(weight.data, state).to(dtype)
    scales = layer.state.SCB if layer.state.SCB is not None else weight.SCB
    return weight.data.to(dtype) * (scales / 127).to(dtype).unsqueeze(1)


def stored(layer: Any) -> list[Tensor]:
    """The tensors that a quantized layer's weight is computed from."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return [layer.weight.data, layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB]
    nested = [state.offset.reshape(1), state.state2.absmax] if state.nested else []
    return [layer.weight.data, state.absmax, *nested]


def elements(layer: Any) -> int:
    """The number of elements of a quantized layer's weight."""
    return int(layer.in_features * layer.out_features)


def compute_as_in_training(model: nn.Module) -> str | None:
    """Let quantized layers compute in evaluation mode as in training.

    In evaluation on a CPU with AVX512-BF16, bitsandbytes packs 4-bit weights into another order with scales of 16 bits,
    which no function undoes exactly; and on every CPU 8-bit layers round their inputs to 8 bits. Log-probabilities
    would differ from those of the training, and packed weights cannot be dequantized.

    Returns:
        Why the model cannot be used: its weights are packed already, or a layer does not compute with `dequantized`.
    """
    checked: set[type] = set()
    for name, layer in quantized_layers(model):
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            return (
                f"the model was run in evaluation mode, and bitsandbytes has packed the 4-bit weights of {name} for "
                f"this CPU, which rounds their scales; load the model anew, and run it before the training only after "
                f"model.train()."
            )
        if _in_training not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_in_training)
        if type(layer) not in checked:
            checked.add(type(layer))
            if not (error := _output_error(layer)) <= MOST_ERROR:
                return (
                    f"bitsandbytes' {type(layer).__name__} does not compute with its dequantized weights (the outputs "
                    f"of {name} differ by {100 * error:.0f} %), so an engine would generate by another model; install "
                    f"another release of bitsandbytes, or load the model without quantization_config."
                )
    return None


def _in_training(layer: nn.Module, inputs: object) -> None:
    layer.training = True


@torch.no_grad()
def _output_error(layer: Any) -> float:
    """The relative difference of a layer's outputs in evaluation mode from the product with its dequantized weight."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(layer, "compute_dtype", None) or torch.float32
    inputs = torch.randn(4, layer.in_features, generator=generator).to(layer.weight.device, dtype)
    expected = inputs.float() @ dequantized(layer, torch.float32).T
    outputs = layer.eval()(inputs).float() - (0 if layer.bias is None else layer.bias.float())
    return float((outputs - expected).norm() / expected.norm().clamp(min=1e-20))
