"""Sharding that the optimizer of a run allows: known of the optimizers of torch and of Transformers' Adafactor. Others
train in replicas alone.

Plans that an optimizer does not allow are refused in `checks.plan_checks`.
Optimizers are made in `optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import transformers
from torch import nn

from ...engines.torch_compat import has_step_hooks
from ...engines.training.group_settings import copied
from ...engines.training.tensor_parallel import splits_adapter, stages_adapter
from ...planner.search.space import UNKNOWN_OPTIMIZER, TrainingSplits
from .optimizers import make_optimizer, with_groups


if TYPE_CHECKING:
    from peft import PeftConfig

    from ..grpo_config import PolicyConfig
    from ..ppo_config import PPOConfig


Make = Callable[[Sequence[Sequence[nn.Parameter]]], torch.optim.Optimizer]

# Classes whose steps are the same by these splits with all their arguments. A subclass may step in another way, and
# those of bitsandbytes quantise or clip as their arguments say.
_KNOWN: Mapping[type[torch.optim.Optimizer], TrainingSplits] = {
    torch.optim.Adadelta: TrainingSplits(),
    torch.optim.Adam: TrainingSplits(),
    torch.optim.AdamW: TrainingSplits(),
    torch.optim.Adamax: TrainingSplits(),
    torch.optim.ASGD: TrainingSplits(),
    torch.optim.NAdam: TrainingSplits(),
    torch.optim.RAdam: TrainingSplits(),
    torch.optim.RMSprop: TrainingSplits(),
    torch.optim.Rprop: TrainingSplits(),
    torch.optim.SGD: TrainingSplits(),
    # DeepSpeed 0.19.8 makes it anew from its defaults, without its groups (stage_1_and_2.py:946)
    torch.optim.Adagrad: TrainingSplits(by_deepspeed=False),
    torch.optim.Adafactor: TrainingSplits(elements=False),
    torch.optim.Muon: TrainingSplits(elements=False),
    transformers.Adafactor: TrainingSplits(elements=False),
}


class OptimizerSharding:
    """The optimizer of a run, and how it may be sharded.

    Args:
        optimizer: the user's optimizer, or `None` for the one that `args` name.
    """

    def __init__(self, args: PPOConfig | PolicyConfig, optimizer: torch.optim.Optimizer | None) -> None:
        self._device = args.device
        if optimizer is None:
            self._make, self._groups = named_maker(args), 1
            self.name = f"optim={str(getattr(args.optim, 'value', args.optim))!r}"
        else:
            self._make, self._groups = user_maker(optimizer), len(optimizer.param_groups)
            self.name = type(optimizer).__name__

    @cached_property
    def splits(self) -> TrainingSplits:
        """The ways in which training calls may be split with this optimizer."""
        return splits_of(self._make, self._groups, self._device)

    def splits_with(self, adapters: Mapping[str, PeftConfig]) -> TrainingSplits:
        """The ways in which training calls may be split with this optimizer and these adapters of the policy.

        Args:
            adapters: PEFT configs by name.
        """
        configs = adapters.values()
        return replace(self.splits, tensor=all(map(splits_adapter, configs)), stages=all(map(stages_adapter, configs)))


def can_be_sharded(make: Callable[[nn.Module], torch.optim.Optimizer], device: torch.device) -> bool:
    """True if every plan may shard the optimizer that `make` makes for a role's module."""

    def make_of_groups(groups: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
        return make(_Parameters([p for group in groups for p in group]))

    return splits_of(make_of_groups, 1, device).elements


def splits_of(make: Make, groups: int, device: torch.device) -> TrainingSplits:
    """The ways in which training calls may be split with an optimizer.

    Args:
        make: makes it of the parameters of each of its groups.
    """
    try:
        optimizer = make([[nn.Parameter(torch.zeros(1, 1, device=device))] for _ in range(groups)])
    except Exception:  # the user's may raise any error, such as one that a package is missing
        return UNKNOWN_OPTIMIZER
    return UNKNOWN_OPTIMIZER if has_step_hooks(optimizer) else _KNOWN.get(type(optimizer), UNKNOWN_OPTIMIZER)


def named_maker(args: PPOConfig | PolicyConfig) -> Make:
    """The function that makes the optimizer that `args` name."""
    return lambda groups: make_optimizer(args, _Parameters([p for group in groups for p in group]))


def user_maker(optimizer: torch.optim.Optimizer) -> Make:
    """The function that makes an optimizer with the class and the settings of the user's, group by group."""

    def make(groups: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
        settings = [
            {**copied(group), "params": list(parameters)}
            for group, parameters in zip(optimizer.param_groups, groups, strict=True)
        ]
        return with_groups(optimizer, settings, {})

    return make


class _Parameters(nn.Module):
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(f"weight{number}", parameter)
