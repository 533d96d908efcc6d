"""The roles' optimizers (those that the training arguments name, or a role's part of one that the user made) and their
learning rates. The schedulers are Transformers' or the user's.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from ..engines.base import GROUP, Rate
from ..plan.dataflow import Role
from .ppo_config import ConfigError, PPOConfig


# They step inside the backward pass, or need to be told when parameters are read: neither is the trainer's order.
_UNSUPPORTED = ("lomo", "adalomo", "layerwise", "schedule_free")


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


def check_optimizer(
    args: PPOConfig, given: torch.optim.Optimizer | None, scheduler: Any, models: Sequence[Any]
) -> None:
    """Refuse, before anything is loaded, an optimizer or a scheduler that the roles cannot be trained by.

    Args:
        given, scheduler: the user's, or `None`.
        models: the policy and the critic as the user gave them.

    Raises:
        ConfigError
    """
    if given is None:
        named = str(getattr(args.optim, "value", args.optim))
        if any(word in named for word in _UNSUPPORTED):
            raise ConfigError(
                f"optim={named!r} cannot train a role; use another, such as 'adamw_torch' or 'adafactor'."
            )
        if scheduler is not None:
            raise ConfigError(
                "optimizers has a scheduler without the optimizer whose rates it changes; give both, or set "
                "lr_scheduler_type."
            )
        return
    kind = type(given).__name__
    closure = inspect.signature(type(given).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(f"{kind} asks for the loss several times in one step, which PPO does not do; use another.")
    if isinstance(given, torch.optim.SparseAdam):
        raise ConfigError(f"{kind} wants sparse gradients, which these models do not have; use torch.optim.Adam.")
    if callable(getattr(given, "train", None)) and callable(getattr(given, "eval", None)):
        raise ConfigError(f"{kind} keeps other weights for generating than for training; use another, such as AdamW.")
    if args.value_learning_rate is not None:
        raise ConfigError(
            "value_learning_rate is set, but the optimizer in `optimizers` has rates of its own; put the critic's "
            "parameters into a group of it with its own `lr`."
        )
    if getattr(scheduler, "optimizer", given) is not given:
        raise ConfigError(
            "the scheduler in `optimizers` changes the rates of another optimizer than the one beside it."
        )
    held = {id(p) for group in given.param_groups for p in group["params"]}
    for argument, model in zip(("model", "value_model"), models, strict=True):
        if isinstance(model, str) or not any(p.requires_grad and id(p) in held for p in model.parameters()):
            raise ConfigError(_holds_none(argument))


def _holds_none(what: str) -> str:
    return (
        f"the optimizer in `optimizers` holds no trainable parameter of {what}; make it over the parameters of both "
        f"model and value_model, after they are loaded (and after get_peft_model, in place of peft_config)."
    )


def part_of(given: torch.optim.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """The part of a user's optimizer over all trained models that concerns one of them: same class, same settings, the
    same state of its parameters. Each of its groups has the number of the user's group under `GROUP`.

    Raises:
        ConfigError: it holds none of the module's trainable parameters.
    """
    own = {id(p) for p in module.parameters() if p.requires_grad}
    groups = [
        {**group, "params": params, GROUP: at}
        for at, group in enumerate(given.param_groups)
        if (params := [p for p in group["params"] if id(p) in own])
    ]
    if not groups:
        raise ConfigError(_holds_none(f"the {type(module).__name__} to be trained"))
    state: dict[Any, Any] = {}
    for parameter in (p for group in groups for p in group["params"]):
        if slots := given.state.get(parameter):
            # made where the model was then: the engine may have moved it to a GPU since
            state[parameter] = {
                name: cell.to(parameter.device) if torch.is_tensor(cell) and cell.dim() else cell
                for name, cell in slots.items()
            }
    return with_groups(given, groups, state)


def with_groups(
    given: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], state: Mapping[Any, Any]
) -> torch.optim.Optimizer:
    """An optimizer of the class and the settings of the given one over other parameter groups."""
    # Not by the constructor: its arguments are not the defaults (torch.optim.AdamW's, for one), and what it sets beside
    # the groups must stay. A scheduler wraps the given one's `step`, which must not be this one's.
    kind = type(given)
    made: torch.optim.Optimizer = kind.__new__(kind)
    attributes = {name: value for name, value in vars(given).items() if not callable(getattr(kind, name, None))}
    made.__dict__.update({k: v.copy() if isinstance(v, (dict, list)) else v for k, v in attributes.items()})
    made.__setstate__({"state": defaultdict(dict, state), "param_groups": list(groups)})
    return made


def follows_metrics(scheduler: Any) -> bool:
    """Whether a scheduler steps with each evaluation's metric (reduce_lr_on_plateau), not after each update."""
    return "metrics" in inspect.signature(scheduler.step).parameters


@dataclass(frozen=True)
class LearningRates:
    """What the roles' optimizers are set to before each update.

    Args:
        scheduled: the optimizer whose groups the scheduler changes.
        by_group: its groups are those of the user's optimizer; otherwise they are the policy's rate and the critic's.
    """

    scheduled: torch.optim.Optimizer
    by_group: bool

    @staticmethod
    def of(args: PPOConfig, given: torch.optim.Optimizer | None, scheduler: Any) -> LearningRates:
        """The user's optimizer where a scheduler came with it, otherwise a stand-in with its groups and no model: the
        user's holds the whole parameters, which engines replace by their parts."""
        if given is not None and scheduler is not None:
            return LearningRates(given, by_group=True)
        if given is not None:
            groups = [{k: v for k, v in group.items() if k != "params"} for group in given.param_groups]
        else:
            critic = args.learning_rate if args.value_learning_rate is None else args.value_learning_rate
            groups = [{"lr": args.learning_rate}, {"lr": critic}]
        stand_in = [{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in groups]
        return LearningRates(torch.optim.SGD(stand_in, lr=args.learning_rate), by_group=given is not None)

    def role(self, role: Role) -> Rate:
        """A role's rate; with a user's optimizer all settings of each of its groups, for a scheduler may change its
        momentum too."""
        groups = self.scheduled.param_groups
        if not self.by_group:
            return float(groups[0 if role is Role.ACTOR else 1]["lr"])
        return tuple({k: v for k, v in group.items() if k not in ("params", "initial_lr")} for group in groups)

    @property
    def first(self) -> float:
        """Of the first group, which is logged."""
        return float(self.scheduled.param_groups[0]["lr"] or 0.0)

    def restore(self, rates: Sequence[float]) -> None:
        """The groups' rates as they were when a checkpoint was written: a scheduler's state has them, but does not put
        them back."""
        for group, rate in zip(self.scheduled.param_groups, rates, strict=True):
            group["lr"] = rate
