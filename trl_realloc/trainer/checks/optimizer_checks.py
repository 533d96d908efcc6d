"""Refuses an optimizer or a scheduler that no engine supports.

`plan_checks` refuses plans that would change an optimizer's result.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainingArguments

from .config_checks import ConfigError


# These step inside the backward pass, need calls before parameters are read, or project gradients of whole matrices
# (`optim_target_modules`). The engines support none of this.
_UNSUPPORTED = ("lomo", "adalomo", "layerwise", "schedule_free", "galore", "apollo")


def check_optimizer(
    args: TrainingArguments,
    optimizer: torch.optim.Optimizer | None,
    scheduler: LRScheduler | None,
    models: Mapping[str, object],
) -> None:
    """Refuse an optimizer or a scheduler that cannot train the roles, before anything is loaded.

    Args:
        optimizer, scheduler: the user's objects, or `None`.
        models: the user's trained models, by the trainer's argument name.

    Raises:
        ConfigError: names the optimizer or the argument.
    """
    if optimizer is None:
        optimizer_name = str(getattr(args.optim, "value", args.optim))
        if any(word in optimizer_name for word in _UNSUPPORTED):
            raise ConfigError(
                f"optim={optimizer_name!r} steps within the backward pass, projects gradients, or keeps other weights "
                f"for generating than for training, which no engine of a plan does; use another, such as 'adamw_torch' "
                f"or 'adafactor'."
            )
        if scheduler is not None:
            raise ConfigError(
                "optimizers has a scheduler without the optimizer whose rates it changes; give both, or set "
                "lr_scheduler_type."
            )
        return
    kind = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(f"{kind} asks for the loss several times in one step, which no engine does; use another.")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(f"{kind} wants sparse gradients, which these models do not have; use torch.optim.Adam.")
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ConfigError(f"{kind} keeps other weights for generating than for training; use another, such as AdamW.")
    if getattr(args, "value_learning_rate", None) is not None:
        raise ConfigError(
            "value_learning_rate is set, but the optimizer in `optimizers` has its own rates; put the critic's "
            "parameters into a group of it with its own `lr`."
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "the scheduler in `optimizers` changes the rates of another optimizer than the one beside it."
        )
    parameter_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for argument, model in models.items():
        trained = model.parameters() if isinstance(model, nn.Module) else ()
        if not any(p.requires_grad and id(p) in parameter_ids for p in trained):
            raise ConfigError(holds_none(argument, " and ".join(models)))


def holds_none(what: str, trained: str) -> str:
    """The sentence about a user's optimizer without a parameter of a model."""
    return (
        f"the optimizer in `optimizers` holds no trainable parameter of {what}; make it over the parameters of "
        f"{trained}, after loading (and after get_peft_model, in place of peft_config)."
    )
