"""The roles' optimizers and learning rates. An optimizer is the one that the training arguments name, or a role's part
of the user's.

`run_setup` passes the function that creates them to the engines as `EngineOptions.make_optimizer`. Each engine calls it
on its role's module. Schedulers come from Transformers or the user.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer

from ...engines.base import GROUP, Rate
from ...engines.training.optimizer_state import RATE, copied, is_same
from ...plan.dataflow import Role
from ..checks.config_checks import ConfigError
from ..checks.fixed_settings import refuse_changed
from ..checks.optimizer_checks import holds_none


if TYPE_CHECKING:
    from ..grpo_config import PolicyConfig
    from ..ppo_config import PPOConfig


def make_optimizer(args: PPOConfig | PolicyConfig, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `args` over a role's trainable parameters, with weight decay on the same parameters as in
    Trainer."""
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


def part_of(optimizer: torch.optim.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer over one module's parameters, from the user's optimizer over all trained models.

    It has the same class and settings, and the state of these parameters. The key `GROUP` of each group is the number
    of the user's group.

    Raises:
        ConfigError: the user's optimizer has none of the module's trainable parameters.
    """
    module_ids = {id(p) for p in module.parameters() if p.requires_grad}
    groups = [
        {**copied(group), "params": params, GROUP: number}
        for number, group in enumerate(optimizer.param_groups)
        if (params := [p for p in group["params"] if id(p) in module_ids])
    ]
    if not groups:
        raise ConfigError(holds_none(f"the {type(module).__name__} to be trained", "every trained model"))
    state: dict[Any, Any] = {}
    for parameter in (p for group in groups for p in group["params"]):
        if parameter_state := optimizer.state.get(parameter):
            # the engine may have moved the model to a GPU after the state was created
            state[parameter] = {
                name: value.to(parameter.device) if torch.is_tensor(value) and value.dim() else value
                for name, value in parameter_state.items()
            }
    return with_groups(optimizer, groups, state)


def with_groups(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], state: Mapping[Any, Any]
) -> torch.optim.Optimizer:
    """An optimizer with the class and settings of another, over other parameter groups."""
    # Not by the constructor: its arguments differ from `defaults` (for example in torch.optim.AdamW), and the other
    # attributes must stay. `step` is not copied, because a scheduler has wrapped the original's.
    kind = type(optimizer)
    copy: torch.optim.Optimizer = kind.__new__(kind)
    attributes = {name: value for name, value in vars(optimizer).items() if not callable(getattr(kind, name, None))}
    copy.__dict__.update({k: v.copy() if isinstance(v, (dict, list)) else v for k, v in attributes.items()})
    copy.__setstate__({"state": defaultdict(dict, state), "param_groups": list(groups)})
    return copy


def without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer with the class, settings and groups of another, without parameters and state, for checks."""
    return with_groups(optimizer, [{**copied(group), "params": []} for group in optimizer.param_groups], {})


def without_whole(make: partial[torch.optim.Optimizer]) -> partial[torch.optim.Optimizer]:
    """The same function with the user's optimizer replaced by one without parameters. Used once the engines have
    created their optimizers: the user's would keep whole parameters in memory, which the engines have replaced by their
    parts."""
    return partial(part_of, without_parameters(make.args[0])) if make.func is part_of else make


def follows_metrics(scheduler: LRScheduler) -> bool:
    """True if a scheduler steps with the metric of each evaluation (reduce_lr_on_plateau) and not after each update."""
    return "metrics" in inspect.signature(scheduler.step).parameters


def check_own_optimizer(optimizer: torch.optim.Optimizer, rates: LearningRates) -> None:
    """Refuse an optimizer that was set on a trainer after its construction. The engines would not step it.

    Args:
        optimizer: current attribute of the trainer.

    Raises:
        ConfigError: it is not the one that the trainer created.
    """
    if optimizer is not rates.scheduled:
        raise ConfigError(
            f"trainer.optimizer has been set to another {type(optimizer).__name__}, which no engine steps; give it to "
            f"the constructor as optimizers=(optimizer, scheduler or None)."
        )


_NOT_SENT = ("params", "initial_lr")  # keys of a parameter group that are not optimizer settings


@dataclass(frozen=True)
class LearningRates:
    """The learning rates of the roles' optimizers, updated before each update.

    Args:
        scheduled: the optimizer whose parameter groups the scheduler changes. It is not stepped.
        by_group: whether its groups are those of the user's optimizer. Otherwise it has one group per trained role.
        roles: the trained roles, in the order of the groups.
        first_settings: settings of each group of `scheduled` before training.
    """

    scheduled: torch.optim.Optimizer
    by_group: bool
    roles: tuple[Role, ...]
    first_settings: tuple[Mapping[str, Any], ...]

    @staticmethod
    def of(
        args: PPOConfig | PolicyConfig,
        optimizer: torch.optim.Optimizer | None,
        scheduler: LRScheduler | None,
        roles: Sequence[Role] = (Role.ACTOR, Role.CRITIC),
    ) -> LearningRates:
        """The rates of the user's optimizer and scheduler, or those of the training arguments.

        Without a scheduler, an optimizer with the same groups and no model replaces the user's, which would keep whole
        parameters in memory.
        """
        if optimizer is not None and scheduler is not None:
            return LearningRates(optimizer, True, tuple(roles), _settings(optimizer))
        if optimizer is not None:
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        else:
            critic = getattr(args, "value_learning_rate", None)
            groups = [
                {"lr": critic if role is Role.CRITIC and critic is not None else args.learning_rate} for role in roles
            ]
        stand_in = [{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in groups]
        optimizer_of_rates = torch.optim.SGD(stand_in, lr=args.learning_rate)
        return LearningRates(optimizer_of_rates, optimizer is not None, tuple(roles), _settings(optimizer_of_rates))

    def role(self, role: Role) -> Rate:
        """The learning rate of a role. With the user's optimizer, the settings of all its groups, because a scheduler
        or a callback may change others too; an engine applies those that have changed.

        Raises:
            ConfigError: another setting has changed, and the roles' optimizers come from `args`.
        """
        groups = self.scheduled.param_groups
        if not self.by_group:
            for first, group in zip(self.first_settings, groups, strict=True):
                others = [name for name in first if name != RATE]
                refuse_changed(*({f"the optimizer's {name}": of[name] for name in others} for of in (first, group)))
            return float(groups[self.roles.index(role)][RATE])
        return tuple({k: v for k, v in group.items() if k not in _NOT_SENT} for group in groups)

    @property
    def first(self) -> float:
        """The learning rate of the first group, for logs."""
        return float(self.scheduled.param_groups[0][RATE] or 0.0)

    @contextlib.contextmanager
    def unstepped(self, instead: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Context in which `step` of the scheduled optimizer calls `instead`, because the engines step the roles'
        optimizers. Without gradients the user's optimizer might still count a step in its groups, or fail.

        Args:
            instead: replacement of `step`.
        """
        optimizer: Any = self.scheduled
        previous = vars(optimizer).get("step")

        def step(*_: Any, **__: Any) -> None:
            instead()
            optimizer._opt_called = True  # otherwise a scheduler warns that its optimizer has not stepped

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # so that a scheduler does not wrap it
        optimizer.step = step
        try:
            yield
        finally:
            del optimizer.step
            if previous is not None:
                optimizer.step = previous

    def changed(self) -> list[dict[str, Any]]:
        """Copies of each group's learning rate and of its settings that have changed since training began, for a
        checkpoint. Settings of types that a checkpoint cannot hold are left out."""
        return [
            {k: v for k, v in settings.items() if k == RATE or (_is_saved(v) and not is_same(v, first.get(k)))}
            for settings, first in zip(_settings(self.scheduled), self.first_settings, strict=True)
        ]

    def restore(self, changed: Sequence[Mapping[str, Any]] = ()) -> None:
        """Set each group to the first settings, then to a saved result of `changed`. Loading a scheduler's state does
        not set them."""
        groups = self.scheduled.param_groups
        for group, first, saved in zip(groups, self.first_settings, changed or [{}] * len(groups), strict=True):
            group.update({k: _placed_as(first.get(k), value) for k, value in copied({**first, **saved}).items()})


def _settings(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    return tuple(copied({k: v for k, v in g.items() if k not in _NOT_SENT}) for g in optimizer.param_groups)


def _placed_as(first: Any, value: Any) -> Any:
    """`value` on the device of `first`, if both are tensors."""
    return value.to(first.device) if torch.is_tensor(first) and torch.is_tensor(value) else value


def _is_saved(value: object) -> bool:
    """True if `torch.load` with `weights_only` can read the value again."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_saved, value))
    return torch.is_tensor(value) or type(value) in (bool, int, float, str, type(None))
