"""The roles' optimizers: what the training arguments name, or a role's part of one that the user made."""

from __future__ import annotations

import torch
from torch import nn
from transformers import Trainer

from .config import ConfigError, PPOConfig


def make_optimizer(args: PPOConfig, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that `args` name over a role's trainable parameters, weight decay where Trainer has it."""
    from transformers.trainer_pt_utils import get_parameter_names

    kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, module)  # type: ignore[arg-type]
    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decayed = set(get_parameter_names(module, [nn.LayerNorm], patterns))
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trainable if name in decayed], "weight_decay": args.weight_decay},
        {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = kind([group for group in groups if group["params"]], **kwargs)
    return optimizer


def part_of(given: torch.optim.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """The part of a user's optimizer over all trained models that concerns one of them: same class, same groups.

    Raises:
        ConfigError: it holds none of the module's parameters.
    """
    own = {id(p) for p in module.parameters()}
    first = given.param_groups[0]["lr"]
    groups = []
    for group in given.param_groups:
        params = [p for p in group["params"] if id(p) in own]
        if params:
            ratio = group["lr"] / first if first else 1.0
            groups.append({**group, "params": params, "lr_ratio": ratio})
    if not groups:
        raise ConfigError(
            f"the optimizer in `optimizers` holds no parameter of the {type(module).__name__} to be trained; make it "
            f"over the parameters of both model and value_model, after they are loaded."
        )
    return type(given)(groups, **given.defaults)
