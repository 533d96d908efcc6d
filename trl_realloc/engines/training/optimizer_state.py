"""The optimizer of a model that a rank has in full: float32 master weights of 16-bit parameters (`MasterWeights`), and
the settings of its parameter groups (`GroupSettings`). `split_masters` has the master weights of split models.

The forward uses the 16-bit parameter. Its gradients are accumulated in float32, the optimizer steps the master weight,
and the parameter is the rounded master weight. A float32 parameter is its own master weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..base import GROUP, Rate


RATE = "lr"
_NOT_OWN = ("params", RATE, GROUP)

Numbers = dict[int, dict[str, Any]]  # number of the parameter group -> key in it -> number


def is_low(parameter: Tensor) -> bool:
    """True if a parameter has fewer than 32 bits per element, so that its master weight is another tensor."""
    return parameter.dtype.itemsize < 4


class MasterWeights:
    """Replaces every 16-bit parameter of an optimizer by a float32 master weight.

    Args:
        optimizer: optimizer of a replica's parameters; changed in place to step the master weights, with float32
            state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        for group in optimizer.param_groups:
            group["params"] = [self._replace(parameter) for parameter in group["params"]]
        for parameter, master in self._masters.items():
            if state := optimizer.state.pop(parameter, None):
                optimizer.state[master] = {key: in_dtype_of(master, value) for key, value in state.items()}

    def _replace(self, parameter: nn.Parameter) -> nn.Parameter:
        if not is_low(parameter):
            return parameter
        master = nn.Parameter(parameter.detach().float())
        reference = weakref.ref(master)  # otherwise a script that holds the model would hold its master weights

        def add(low: Tensor) -> None:
            master = reference()
            assert master is not None, "the engine that trains the parameter has its master weight"
            assert low.grad is not None, "the hook runs after a gradient is accumulated"
            gradient = low.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            low.grad = None

        parameter.register_post_accumulate_grad_hook(add)
        self._masters[parameter] = master
        return master

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The tensor that the optimizer steps and that has the gradients: the master weight or the parameter."""
        return self._masters.get(parameter, parameter)

    def publish(self) -> None:
        """Copy the master weights into the parameters, rounded."""
        for parameter, master in self._masters.items():
            parameter.data.copy_(master.data)


def in_dtype_of(weight: Tensor, value: object) -> Any:
    """A copy of one value of a weight's optimizer state, on the weight's device. Floating-point tensors of the weight's
    shape get its dtype. Others, such as quantized moments and their scales, keep their dtype."""
    if not torch.is_tensor(value) or not value.dim():
        return value
    if value.is_floating_point() and value.shape == weight.shape:
        return value.to(weight.device, weight.dtype, copy=True)
    return value.to(weight.device, copy=True)


class GroupSettings:
    """Sets the parameter groups of an optimizer, and remembers the last settings to compare the groups with them.

    Args:
        optimizer: its current groups are the first settings. The object and the order of its groups stay, their
            parameters need not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._last = [copied(group) for group in optimizer.param_groups]

    def give(self, rate: Rate) -> None:
        """Set every group to one learning rate, or to the settings under its number (`GROUP`). Only the learning rate
        and settings that differ from the last ones are set, so the optimizer's own changes to its groups stay."""
        for group, last in zip(self._optimizer.param_groups, self._last, strict=True):
            settings = {RATE: rate} if isinstance(rate, (int, float)) else rate[group[GROUP]]
            changed = {k: v for k, v in settings.items() if k == RATE or k not in last or not is_same(v, last[k])}
            group.update(changed)
            last.update(copied(changed))

    def numbers(self) -> Numbers:
        """Copies, in host memory, of the numbers that the optimizer itself has changed or added, by group number.
        A number is an int, float or bool, or a tensor of one element; other values are left out. Groups without
        parameters are left out: optimizers differ in whether they count their steps."""
        changed = {number: _own(group, last) for number, group, last in self._groups() if group["params"]}
        return {
            number: {k: v.detach().to("cpu", copy=True) if torch.is_tensor(v) else _plain(v) for k, v in values.items()}
            for number, values in changed.items()
        }

    def load(self, numbers: Mapping[int, Mapping[str, object]]) -> None:
        """Replace the numbers by those of another state of this optimizer."""
        for number, group, last in self._groups():
            for key in _own(group, last):
                if key in last:
                    group[key] = _copy(last[key])
                else:
                    del group[key]
            for key, value in numbers.get(number, {}).items():
                group[key] = value.to(_device(group, key), copy=True) if torch.is_tensor(value) else value

    def empty(self) -> Numbers:
        """An empty dict for every group, to be filled with the numbers to load."""
        return {number: {} for number, _, _ in self._groups()}

    def _groups(self) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
        """(number, group, last settings). Groups of the user's optimizer have its numbers, which are the same in every
        engine."""
        for index, (group, last) in enumerate(zip(self._optimizer.param_groups, self._last, strict=True)):
            yield group.get(GROUP, index), group, last


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


def is_same(first: object, second: object) -> bool:
    """True if two values of a setting are equal. Values that cannot be compared are not."""
    try:
        if torch.is_tensor(first):
            return torch.is_tensor(second) and torch.equal(first, second)
        return type(first) is type(second) and bool(first == second)
    except Exception:  # a value of the user's type
        return False


def _own(group: Mapping[str, object], last: Mapping[str, object]) -> dict[str, Any]:
    """The numbers of a group that differ from the last settings."""
    return {
        key: value
        for key, value in group.items()
        if key not in _NOT_OWN and _is_number(value) and not (key in last and is_same(value, last[key]))
    }


def _is_number(value: object) -> bool:
    return value.numel() == 1 if torch.is_tensor(value) else isinstance(value, (int, float))


def _plain(number: object) -> Any:
    """Converts NumPy's numbers to Python's, which a checkpoint may hold."""
    return number.item() if hasattr(number, "item") else number


def _device(group: Mapping[str, Any], key: str) -> torch.device | str:
    """Device on which an optimizer expects a tensor of a group: that of its current tensor, otherwise that of the
    group's parameters."""
    tensors = [tensor for tensor in (group.get(key), *group["params"]) if torch.is_tensor(tensor)]
    return tensors[0].device if tensors else "cpu"
