"""Tests on small matrices how an optimizer may be sharded, because an optimizer class does not declare it.

Optimizers that are known without a test are in the table of `optimizer_sharding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...engines.training.group_settings import RATE, GroupSettings, Numbers
from ...planner.search.space import TrainingSplits


# A matrix has more than 4,096 elements and its halves fewer: up to 4,096, 8-bit optimizers keep a float32 state.
ROWS, COLUMNS = 96, 64
STEPS, STEP_SIZE = 4, 1e-2
TOLERANCE = 1e-4  # for rounding, relative to the largest change of a parameter

Make = Callable[[Sequence[Sequence[nn.Parameter]]], torch.optim.Optimizer]


def probed_splits(make: Make, groups: int, device: torch.device) -> TrainingSplits:
    """The splits with which the optimizer takes the same steps as without.

    Args:
        make: makes the optimizer of the parameters of each of its groups.
    """
    whole = _trained(make, groups, device, lambda matrix: [matrix])
    if whole is None:
        return TrainingSplits(elements=False, parameters=False)
    first = {key: change for key, change in whole.moved.items() if key[1] == 0}
    by_parameter = _equal(
        _trained(make, groups, device, lambda matrix: [matrix], slice(0, 1)), replace(whole, moved=first)
    )
    cuts = (
        lambda matrix: list(matrix.tensor_split(2, 0)),
        lambda matrix: list(matrix.tensor_split(2, 1)),
        lambda matrix: [matrix.flatten()],
    )
    by_element = by_parameter and all(_equal(_trained(make, groups, device, cut), whole) for cut in cuts)
    keeps_numbers = any(whole.numbers.values())
    return TrainingSplits(by_element, by_parameter, by_ranges=not (by_element and keeps_numbers))


@dataclass(frozen=True)
class _Trial:
    """The result of a few optimizer steps on two matrices per group.

    Args:
        moved: the change of each matrix, flat, by (group, matrix).
        numbers: the numbers that the optimizer has left in its groups. Prodigy's `d`, computed from sums over all
            parameters, may stay as it is for some steps. These sums are in the same group and change with the first
            step.
    """

    moved: Mapping[tuple[int, int], Tensor]
    numbers: Numbers


def _trained(
    make: Make,
    groups: int,
    device: torch.device,
    cut: Callable[[Tensor], list[Tensor]],
    which: slice = slice(None),
) -> _Trial | None:
    """Take a few optimizer steps on two matrices per group; `None` if the optimizer raises.

    Args:
        cut: divides a matrix into the tensors that the optimizer gets as parameters.
        which: the matrices of each group that the optimizer gets.
    """
    draw = torch.Generator().manual_seed(0)
    shape = (ROWS, COLUMNS)
    scales = torch.logspace(-2, 2, ROWS)[:, None]  # rows of different scales, which a factored moment would mix

    def drawn() -> Tensor:
        return (scales * torch.randn(shape, generator=draw)).to(device)

    start = {(group, at): drawn() for group in range(groups) for at in range(2)}
    kept = {key: value for key, value in start.items() if key[1] in range(2)[which]}
    parameters = {key: [nn.Parameter(part.contiguous().clone()) for part in cut(value)] for key, value in kept.items()}
    try:
        of_group = [[p for key, ps in parameters.items() if key[0] == at for p in ps] for at in range(groups)]
        optimizer = make(of_group)
        for group in optimizer.param_groups:
            if group.get(RATE) is not None:  # a warmup may have set it to 0
                group[RATE] = STEP_SIZE
        settings = GroupSettings(optimizer)
        for step in range(STEPS):
            gradients = {key: drawn() * 10.0 ** (step * (key[1] - 0.5)) for key in start}
            for key, ps in parameters.items():
                for parameter, gradient in zip(ps, cut(gradients[key]), strict=True):
                    parameter.grad = gradient.contiguous().clone()
            optimizer.step()
    except Exception:  # the user's optimizer may raise any error; one for matrices alone raises on a flat tensor
        return None
    moved: dict[tuple[int, int], Tensor] = {}
    with torch.no_grad():
        for key, ps in parameters.items():
            before, place = kept[key], torch.arange(ROWS * COLUMNS, device=device).view(shape)
            after = torch.empty(ROWS * COLUMNS, device=device)
            for parameter, where in zip(ps, cut(place), strict=True):
                after[where.flatten()] = parameter.flatten().float()
            moved[key] = after - before.flatten()
    return _Trial(moved, settings.numbers())


def _equal(sharded: _Trial | None, whole: _Trial) -> bool:
    if sharded is None:
        return False
    ours, theirs = _flat(sharded.numbers), _flat(whole.numbers)
    return (
        all(
            bool((sharded.moved[key] - change).abs().max() <= TOLERANCE * change.abs().max())
            for key, change in whole.moved.items()
        )
        and ours.keys() == theirs.keys()
        and all(math.isclose(ours[key], theirs[key], rel_tol=TOLERANCE) for key in theirs)
    )


def _flat(numbers: Numbers) -> dict[tuple[int, str], float]:
    return {(group, key): float(value) for group, own in numbers.items() for key, value in own.items()}
