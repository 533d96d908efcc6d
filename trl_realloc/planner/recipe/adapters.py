"""The adapters of a recipe, by TRL's settings of `ModelConfig`, and their share of the policy's elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...common.errors import PlanError, shown
from ...plan.model_spec import ModelSpec, ParameterSpec


# settings that the planner reads, with the defaults of TRL's `ModelConfig`
ADAPTER_DEFAULTS: Mapping[str, Any] = {
    "use_peft": False,
    "lora_r": 16,
    "lora_target_modules": None,
    "lora_modules_to_save": None,
}
ALL = "all-linear"
# PEFT's default targets by model family
_OF_FAMILY = {"gpt_neox": ("query_key_value",)}
_USUAL = ("q_proj", "v_proj")
_ENDS = ("lm_head", "embed_tokens", "embed_in", "embed_out")


def check_adapters(settings: Mapping[str, Any]) -> None:
    """Raises `PlanError` if modules are not names. The rank is checked by `common.settings`."""
    for name in ("lora_target_modules", "lora_modules_to_save"):
        value = settings[name]
        texts = value is None or isinstance(value, str)
        if not texts and not (isinstance(value, list) and all(isinstance(module, str) for module in value)):
            raise PlanError(f"{name} is a list of names of modules, not {shown(value)}.")


def trained_share(settings: Mapping[str, Any], spec: ModelSpec) -> float:
    """The share of a policy's elements that a recipe trains: 1 without `use_peft`. LoRA of rank r adds r (m + n)
    elements to a matrix of m x n; `lora_modules_to_save` are trained in full. Missing settings have their
    `ADAPTER_DEFAULTS`."""
    settings = {**ADAPTER_DEFAULTS, **settings}
    if not settings["use_peft"]:
        return 1.0
    targets = _names(settings["lora_target_modules"]) or _OF_FAMILY.get(spec.family, _USUAL)
    saved = _names(settings["lora_modules_to_save"])
    rows_and_columns = sum(sum(p.shape) for p in spec.parameters if _is_target(p, targets, spec))
    adapted = settings["lora_r"] * rows_and_columns
    copied = sum(parameter.elements for parameter in spec.parameters if _module(parameter) in saved)
    return float((adapted + copied) / (spec.elements + adapted + copied))


def unties(settings: Mapping[str, Any]) -> bool:
    """True if the adapters of a recipe change the language head or the embedding. If a policy ties the two, its engine
    then holds both."""
    settings = {**ADAPTER_DEFAULTS, **settings}
    modules = {*_names(settings["lora_target_modules"]), *_names(settings["lora_modules_to_save"])}
    return bool(settings["use_peft"]) and not modules.isdisjoint(_ENDS)


def _names(value: str | Sequence[str] | None) -> Sequence[str]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _is_target(parameter: ParameterSpec, targets: Sequence[str], spec: ModelSpec) -> bool:
    if len(parameter.shape) != 2:
        return False
    return 0 <= parameter.layer < spec.layers if ALL in targets else _module(parameter) in targets


def _module(parameter: ParameterSpec) -> str:
    """The last part of the name of a parameter's module."""
    return parameter.name.rpartition(".")[0].rpartition(".")[2]
