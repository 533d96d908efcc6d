"""Sharding that a run's optimizer allows, known for the optimizers of torch and for Transformers' Adafactor. Other
optimizers only train in replicas.

`checks.plan_checks` refuses plans that an optimizer does not allow.
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
from ...engines.training.optimizer_state import copied
from ...engines.training.tensor_parallel import splits_adapter, stages_adapter
from ...planner.search.space import UNKNOWN_OPTIMIZER, TrainingSplits
from .optimizers import make_optimizer, with_groups


if TYPE_CHECKING:
    from peft import PeftConfig

    from ..grpo_config import PolicyConfig
    from ..ppo_config import PPOConfig


Make = Callable[[Sequence[Sequence[nn.Parameter]]], torch.optim.Optimizer]

# Classes whose steps do not change with these splits, whatever their arguments. Subclasses may step differently;
# bitsandbytes' quantise or clip, depending on their arguments.
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
    # DeepSpeed 0.19.8 recreates it from its defaults, without its groups (stage_1_and_2.py:946)
    torch.optim.Adagrad: TrainingSplits(by_deepspeed=False),
    torch.optim.Adafactor: TrainingSplits(elements=False),
    torch.optim.Muon: TrainingSplits(elements=False),
    transformers.Adafactor: TrainingSplits(elements=False),
}


class OptimizerSharding:
    """The optimizer of a run, and the sharding it allows.

    Args:
        optimizer: the user's optimizer, or `None` for the one of `args`.
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
        """The splits of training calls that this optimizer allows."""
        return splits_of(self._make, self._groups, self._device)

    def splits_with(self, adapters: Mapping[str, PeftConfig]) -> TrainingSplits:
        """The splits of training calls that this optimizer and these adapters of the policy allow.

        Args:
            adapters: PEFT configs by name.
        """
        configs = adapters.values()
        return replace(self.splits, tensor=all(map(splits_adapter, configs)), stages=all(map(stages_adapter, configs)))


def can_be_sharded(make: Callable[[nn.Module], torch.optim.Optimizer], device: torch.device) -> bool:
    """True if every plan may shard the optimizer that `make` creates for a role's module."""

    def make_of_groups(groups: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
        return make(_Parameters([p for group in groups for p in group]))

    return splits_of(make_of_groups, 1, device).elements


def splits_of(make: Make, groups: int, device: torch.device) -> TrainingSplits:
    """The splits of training calls that an optimizer allows.

    Args:
        make: creates the optimizer from the parameters of each of its groups.
    """
    try:
        optimizer = make([[nn.Parameter(torch.zeros(1, 1, device=device))] for _ in range(groups)])
    except Exception:  # a user's optimizer may raise anything, for example ImportError
        return UNKNOWN_OPTIMIZER
    return UNKNOWN_OPTIMIZER if has_step_hooks(optimizer) else _KNOWN.get(type(optimizer), UNKNOWN_OPTIMIZER)


def named_maker(args: PPOConfig | PolicyConfig) -> Make:
    """A function that creates the optimizer that `args` name."""
    return lambda groups: make_optimizer(args, _Parameters([p for group in groups for p in group]))


def user_maker(optimizer: torch.optim.Optimizer) -> Make:
    """A function that creates an optimizer with the class and the settings of the user's, group by group."""

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
