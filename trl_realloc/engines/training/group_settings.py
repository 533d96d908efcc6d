"""`GroupSettings`: the settings in an optimizer's parameter groups. The scheduler gives some of them before each step.
Others the optimizer changes itself, such as Prodigy's estimate of the step size, and these are part of its state.

The state of the parameters is handled by each engine.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..base import GROUP, Rate
from ..training_state import scalars_of


PREFIX = "group."  # of an optimizer's own settings among the scalars of each parameter of the group
_GIVEN = ("params", "lr", GROUP)


class GroupSettings:
    """Sets what the scheduler gives, and finds out what the optimizer changes itself: that is kept.

    Args:
        optimizer: its `param_groups` are changed in place.

    Attributes:
        own: the names of the settings that a step of the optimizer has changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.own: set[str] = set()

    def give(self, rate: Rate) -> None:
        """Set every group to one learning rate, or to the settings under its number (`GROUP`), without the optimizer's
        own."""
        for group in self.optimizer.param_groups:
            given = {"lr": rate} if isinstance(rate, (int, float)) else rate[group[GROUP]]
            # copies, because the optimizer may change a tensor in place
            group.update({name: copy.deepcopy(value) for name, value in given.items() if name not in self.own})

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step: find out which settings it changes."""
        before = [_copied(group) for group in self.optimizer.param_groups]
        yield
        for old, group in zip(before, self.optimizer.param_groups, strict=True):
            now = _settings(group)
            self.own |= {name for name in now if name not in old or not _equal(old[name], now[name])}

    def scalars(self) -> dict[torch.Tensor, dict[str, Any]]:
        """By parameter: the optimizer's own settings of its group, for the training state; numbers, not tensors with
        dimensions."""
        found: dict[torch.Tensor, dict[str, Any]] = {}
        for group in self.optimizer.param_groups:
            found.update(dict.fromkeys(group["params"], self._own_of(group)))
        return found

    def of_first_group(self) -> dict[str, Any]:
        """The optimizer's own settings of its first group, as of `scalars`."""
        return self._own_of(self.optimizer.param_groups[0])

    def _own_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        own = {PREFIX + name: group[name] for name in sorted(self.own & group.keys())}
        return scalars_of({name: value for name, value in own.items() if not isinstance(value, list | dict)})

    def load(self, weight: torch.Tensor | None, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Set the optimizer's own settings of the group of a weight.

        Args:
            weight: `None` for all groups.
            scalars: that were loaded for the weight.

        Returns:
            The others of the scalars, which belong to the weight's state.
        """
        own = {name.removeprefix(PREFIX): value for name, value in scalars.items() if name.startswith(PREFIX)}
        for group in self.optimizer.param_groups if own else ():
            if weight is None or any(parameter is weight for parameter in group["params"]):
                group.update({name: _as_in(group.get(name), value) for name, value in own.items()})
        self.own |= own.keys()
        return {name: value for name, value in scalars.items() if not name.startswith(PREFIX)}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _GIVEN}


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a step cannot change in place."""
    return {
        name: value.clone() if torch.is_tensor(value) else list(value) if isinstance(value, list) else value
        for name, value in _settings(group).items()
    }


def _equal(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and bool(one == other)


def _as_in(current: Any, value: Any) -> Any:
    """A loaded value, on the device on which the optimizer has it."""
    return value.to(current.device) if torch.is_tensor(current) and torch.is_tensor(value) else value


__all__ = ["PREFIX", "GroupSettings"]
