"""Properties of models that no engine supports. PPO refuses such a model; in GRPO and RLOO Accelerate trains it
(`trainable`).

Which quantized policies can be trained is here too. How the models fit together is in `model_checks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from ...engines.model_configs import ModelError
from ...engines.models import adapter_configs
from ...engines.quantized import BITSANDBYTES, has_8_bits, method_of, quantization
from ...engines.training.packed_attention import base_of


if TYPE_CHECKING:
    from peft import PeftConfig


class Obstacle(NamedTuple):
    """A property of a model that no engine supports.

    Args:
        refusal: sentence with which PPO refuses the model.
        reason: reason for which Accelerate trains the model in GRPO and RLOO.
    """

    refusal: str
    reason: str


def model_obstacles(model: PreTrainedModel, argument: str) -> Iterator[Obstacle]:
    """The obstacles of a loaded model: it is quantized, compiled, spread over devices, or already split."""
    base = base_of(model)
    yield from _quantization_obstacles(base, argument)
    if hasattr(model, "_orig_mod") or hasattr(base, "_orig_mod"):
        yield Obstacle(
            f"{argument} is compiled (torch.compile); pass the model itself: ragged batches change shape.",
            "the model is compiled (torch.compile), and packed samples change the shape of every forward",
        )
    devices = set(map(str, (getattr(base, "hf_device_map", None) or {}).values()))
    if len(devices) > 1:
        yield Obstacle(
            f"{argument} is spread over {', '.join(sorted(devices))} (device_map); load it without device_map: the "
            f"execution plan sets which device holds which part.",
            "the model is spread over several devices (device_map), and a plan places whole models",
        )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        yield Obstacle(
            f"{argument} is split already (tp_plan or a device mesh); load it whole, or give its name or path: the "
            f"execution plan splits it.",
            "the model is split already (tp_plan or a device mesh), and a plan splits whole models",
        )


def config_obstacles(config: PretrainedConfig, argument: str) -> Iterator[Obstacle]:
    """The obstacles in a model's Transformers config."""
    if getattr(config, "is_encoder_decoder", False):
        yield Obstacle(
            f"{argument} is an encoder-decoder ({config.model_type}); PPO here is for decoders.",
            f"{config.model_type} is an encoder-decoder, and the engines train decoders",
        )
    yield from _quantization_obstacles(config, argument)


def _quantization_obstacles(model: PreTrainedModel | PretrainedConfig, argument: str) -> Iterator[Obstacle]:
    method = quantization(model)
    if method is None or (argument == "model" and method == BITSANDBYTES):
        return
    can = "only a policy with LoRA can be, by bitsandbytes"
    yield Obstacle(
        f"{argument} is quantized ({method}), and {can}; load it without quantization_config.",
        f"the model is quantized ({method}), and {can}",
    )


# --- a policy that bitsandbytes has quantized -------------------------------------------------------------------------


def check_quantized(
    model: PreTrainedModel | str,
    config: PretrainedConfig,
    peft_config: PeftConfig | None,
    quantization_config: object = None,
) -> None:
    """Check that a quantized policy can be trained.

    Args:
        config: the policy's Transformers config.
        peft_config: PEFT config of an adapter to be added.
        quantization_config: setting for loading a policy passed by name.

    Raises:
        ModelError: see `quantized_obstacles`; or the policy is loaded, and there is a setting for loading it.
    """
    if quantization_config is not None and not isinstance(model, str):
        raise ModelError(
            "quantization_config is for a policy passed by name, and model is loaded already; load it with the "
            "quantization_config, or pass its name."
        )
    policy = config if isinstance(model, str) else model
    for obstacle in quantized_obstacles(policy, peft_config, quantization_config):
        raise ModelError(obstacle.refusal)


def quantized_obstacles(
    model: PreTrainedModel | PretrainedConfig, peft_config: PeftConfig | None, quantization_config: object = None
) -> Iterator[Obstacle]:
    """The obstacles of a policy that bitsandbytes has quantized, or will quantize. The arguments are those of
    `check_quantized`; `model` is a loaded policy or a config."""
    if quantization_config is None and quantization(base_of(model)) is None:
        return
    reason = _why_not_quantized(model, peft_config, quantization_config)
    if reason is not None:
        yield Obstacle(f"model is quantized, and {reason}.", f"the model is quantized, and {reason.partition('; ')[0]}")


_INITIALIZED_ALONE = (True, False, "gaussian")  # without the adapted weights


def _why_not_quantized(model: Any, peft_config: PeftConfig | None, quantization_config: object) -> str | None:
    base: Any = base_of(model)
    settings = quantization_config or getattr(base, "config", base).quantization_config
    if (method := method_of(settings)) != BITSANDBYTES:
        return f"only by bitsandbytes it could be trained, not by {method}; load it without quantization_config"
    if find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed; pip install 'trl_realloc[bitsandbytes]'"
    adapters = adapter_configs(model, peft_config)
    if not adapters:
        return "quantized weights are not trained; give a peft_config, or load it without quantization_config"
    for name, config in adapters.items():
        kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
        if kind != "LORA":
            return f"the adapter {name!r} is of the kind {kind}; use LoRA"
        if getattr(config, "target_parameters", None):
            return f"the adapter {name!r} has target_parameters, and PEFT adapts quantized modules; use target_modules"
        if getattr(config, "use_dora", False) and has_8_bits(settings):
            return f"the adapter {name!r} has use_dora, for which PEFT loses the scales of 8-bit layers; load in 4 bits"
    init = getattr(peft_config, "init_lora_weights", True)
    if init not in _INITIALIZED_ALONE:
        return (
            f"init_lora_weights {init!r} computes the adapter from the weights before quantization; make the adapter "
            f"with PEFT before, and load it with PeftModel.from_pretrained(..., is_trainable=True)"
        )
    return None
