"""`GroupSettings`: the parameter groups of an engine's optimizer. The run sets them before each step, and an optimizer
may keep numbers of its own beside the settings (Prodigy's `d`, the step count of Apex's FusedAdam).

Which settings the run gives is in `trainer/run/optimizers`. The state of single parameters is in the engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..base import GROUP, Rate


RATE = "lr"
_NOT_OWN = ("params", RATE, GROUP)

Numbers = dict[int, dict[str, Any]]  # by the number of the parameter group, and by their keys in it


class GroupSettings:
    """The settings that an optimizer was given last, with which its groups are compared.

    Args:
        optimizer: its groups as they are now are the first settings. The object and the order of its groups stay, their
            parameters need not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._given = [copied(group) for group in optimizer.param_groups]

    def give(self, rate: Rate) -> None:
        """Set every group to one learning rate, or to the settings under its number (`GROUP`). Of these settings only
        those that differ from the settings that were given last are set, and the learning rate. What the optimizer has
        changed in its groups stays."""
        for group, given in zip(self._optimizer.param_groups, self._given, strict=True):
            settings = {RATE: rate} if isinstance(rate, (int, float)) else rate[group[GROUP]]
            changed = {k: v for k, v in settings.items() if k == RATE or k not in given or not is_same(v, given[k])}
            group.update(changed)
            given.update(copied(changed))

    def numbers(self) -> Numbers:
        """Copies, in host memory, of the numbers that the optimizer itself has changed or added, by the number of the
        group. A number is an int, float or bool, or a tensor of one element; other values are not among them. Groups
        without parameters are left out: optimizers differ in whether they count their steps."""
        own = {number: _own(group, given) for number, group, given in self._groups() if group["params"]}
        return {
            number: {k: v.detach().to("cpu", copy=True) if torch.is_tensor(v) else _plain(v) for k, v in values.items()}
            for number, values in own.items()
        }

    def load(self, numbers: Mapping[int, Mapping[str, object]]) -> None:
        """Take over the numbers of another state of this optimizer, and forget the present ones."""
        for number, group, given in self._groups():
            for key in _own(group, given):
                if key in given:
                    group[key] = _copy(given[key])
                else:
                    del group[key]
            for key, value in numbers.get(number, {}).items():
                group[key] = value.to(_device(group, key), copy=True) if torch.is_tensor(value) else value

    def empty(self) -> Numbers:
        """An empty dict for every group, to be filled with the numbers to load."""
        return {number: {} for number, _, _ in self._groups()}

    def _groups(self) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
        """(number, group, settings given last). Groups of the user's optimizer have its numbers, which is the same in
        every engine."""
        for at, (group, given) in enumerate(zip(self._optimizer.param_groups, self._given, strict=True)):
            yield group.get(GROUP, at), group, given


def copied(settings: Mapping[str, object]) -> dict[str, Any]:
    """The settings of a parameter group without its parameters. Tensors of one element and containers are copied,
    because optimizers and schedulers may change them in place."""
    return {key: _copy(value) for key, value in settings.items() if key != "params"}


def _copy(value: Any) -> Any:
    if torch.is_tensor(value) and value.numel() == 1 and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copy, value))
    return {key: _copy(item) for key, item in value.items()} if type(value) is dict else value


def is_same(one: object, other: object) -> bool:
    """True if two values of a setting are equal. Values that cannot be compared are not."""
    try:
        if torch.is_tensor(one):
            return torch.is_tensor(other) and torch.equal(one, other)
        return type(one) is type(other) and bool(one == other)
    except Exception:  # of a type of the user's
        return False


def _own(group: Mapping[str, object], given: Mapping[str, object]) -> dict[str, Any]:
    """The numbers of a group that are not the settings that were given last."""
    return {
        key: value
        for key, value in group.items()
        if key not in _NOT_OWN and _is_number(value) and not (key in given and is_same(value, given[key]))
    }


def _is_number(value: object) -> bool:
    return value.numel() == 1 if torch.is_tensor(value) else isinstance(value, (int, float))


def _plain(number: object) -> Any:
    """A number of NumPy's as one of Python's, which a checkpoint may hold."""
    return number.item() if hasattr(number, "item") else number


def _device(group: Mapping[str, Any], key: str) -> torch.device | str:
    """Device on which an optimizer expects a tensor of a group: the device of the tensor that it has, otherwise that of
    its parameters."""
    tensors = [tensor for tensor in (group.get(key), *group["params"]) if torch.is_tensor(tensor)]
    return tensors[0].device if tensors else "cpu"
