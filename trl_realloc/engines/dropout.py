"""Dropout rates of Transformers models, which are turned off for every role."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Turn dropout off, in place. With dropout the ratio of new to old probabilities is not 1 before the first step.

    A rate is in an `nn.Dropout`, in an attribute of a module, or in the config, which some modules read in every
    forward (Falcon's `hidden_dropout`). Other rates in the config stay, because it is saved with the model.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in dropout_rates(vars(module)):
            setattr(module, name, 0.0)
    kinds: set[Any] = {type(module) for module in model.modules()}
    read = {name for kind in kinds for name in _read_of_config(kind)}
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        for name in dropout_rates(vars(config)).keys() & read:
            setattr(config, name, 0.0)
    return model


@functools.cache
def _read_of_config(kind: type) -> frozenset[str]:
    """The attributes of its config that the forward of this Transformers class reads."""
    if not kind.__module__.startswith("transformers.") or "forward" not in vars(kind):
        return frozenset()
    return frozenset(re.findall(r"self\.config\.(\w+)", inspect.getsource(vars(kind)["forward"])))


def dropout_rates(settings: Mapping[str, object]) -> dict[str, float]:
    """The rates of dropout among a module's or a config's attributes, by name. The names differ between families:
    `attention_dropout`, `resid_pdrop`, `hidden_dropout`. A classifier's has no effect on a language model."""
    return {
        name: float(value)
        for name, value in settings.items()
        if ("dropout" in name or name.endswith("pdrop"))
        and not name.startswith(("classifier", "summary"))
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


def has_dropout(model: nn.Module) -> bool:
    """True if a module of the model that is in training mode has a rate of dropout above 0."""
    trained = [module for module in model.modules() if module.training]
    rates = (dropout_rates(vars(module)).values() for module in trained)
    return any(map(any, rates)) or any(module.p > 0 for module in trained if isinstance(module, nn.Dropout))
