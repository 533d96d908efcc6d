"""Tests whether an optimizer updates every element independently of the others, which sharding requires, and whether it
keeps numbers in its parameter groups. It is tested on small matrices, because optimizers do not declare it.

What an assignment shards is defined in `plan.assignment`. Optimizers are made in `optimizers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...engines.training.group_settings import RATE, GroupSettings, Numbers, copied
from ...engines.training.tensor_parallel import splits_adapter, stages_adapter
from ...plan.assignment import Assignment
from ...plan.execution_plan import ExecutionPlan
from ...planner.search.space import TrainingSplits
from ..config_checks import ConfigError
from .optimizers import make_optimizer, with_groups


if TYPE_CHECKING:
    from ..grpo_config import PolicyConfig
    from ..ppo_config import PPOConfig


# A matrix has more than 4,096 elements and its halves fewer: up to 4,096, 8-bit optimizers keep a float32 state.
ROWS, COLUMNS = 96, 64
STEPS, STEP_SIZE = 4, 1e-2
TOLERANCE = 1e-4  # for rounding, relative to the largest change of a parameter

Make = Callable[[Sequence[Sequence[nn.Parameter]]], torch.optim.Optimizer]


class OptimizerSharding:
    """Tests how the optimizer of a run may be sharded, on small matrices. The test runs once, when its result is first
    read.

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
        given = self._make, self._groups, self._device
        by_element = works_by_element(*given)
        weights = [[nn.Parameter(torch.zeros(1, device=self._device))] for _ in range(self._groups)]
        # DeepSpeed 0.19.8 makes it anew from its defaults, without its groups (stage_1_and_2.py:946)
        is_adagrad = by_element and isinstance(self._make(weights), torch.optim.Adagrad)
        return TrainingSplits(
            by_element,
            by_element or works_by_parameter(*given),
            by_deepspeed=not is_adagrad,
            by_ranges=not by_element or not keeps_numbers(*given),
        )

    def splits_with(self, adapters: Mapping[str, Any]) -> TrainingSplits:
        """The ways in which training calls may be split with this optimizer and these adapters of the policy.

        Args:
            adapters: PEFT configs by name.
        """
        configs = adapters.values()
        return replace(self.splits, tensor=all(map(splits_adapter, configs)), stages=all(map(stages_adapter, configs)))


def check_sharding(sharding: OptimizerSharding, plan: ExecutionPlan) -> None:
    """Refuse a plan that shards parameters which the optimizer needs whole.

    Raises:
        ConfigError: names the optimizer, the call and what shards its parameters.
    """
    trained = {name: assignment for name, assignment in plan.assignments.items() if plan.graph.call(name).trains}
    sharded = {name: setting for name, a in trained.items() if (setting := element_sharding(a))}
    distributed = {name: setting for name, a in trained.items() if (setting := parameter_distribution(a))}
    if not sharded and not distributed:
        return
    kind, splits = sharding.name, sharding.splits
    way_out = (
        "would not train as on one device; give it replicas (engine zero with zero_stage: 0, as plan: flatten does), "
        "or use an optimizer such as adamw_torch."
    )
    staged = [name for name in sharded if trained[name].engine == "zero"]
    if staged and not splits.by_deepspeed:
        raise ConfigError(
            f"DeepSpeed does not keep the groups of {kind}, so {staged[0]} under {sharded[staged[0]]} {way_out}"
        )
    if not splits.elements:
        for name, setting in sharded.items():
            raise ConfigError(
                f"{kind} does not step each element by itself (it factors, projects, quantises in blocks, or uses "
                f"norms or sums of whole tensors or of all parameters), so {name} under {setting} {way_out}"
            )
    ranged = [name for name in staged if trained[name].strategy.zero_stage == 3]
    if ranged and not splits.by_ranges:
        raise ConfigError(
            f"{kind} keeps numbers in its parameter groups, such as a count of steps, and DeepSpeed's ZeRO stage 3 "
            f"calls it several times in a step, so {ranged[0]} under {sharded[ranged[0]]} {way_out}"
        )
    if not splits.parameters:
        for name, setting in distributed.items():
            raise ConfigError(f"{kind} does not step each parameter by itself, so {name} under {setting} {way_out}")


def can_be_sharded(make: Callable[[nn.Module], torch.optim.Optimizer], device: torch.device) -> bool:
    """True if every plan may shard the optimizer that `make` makes for a role's module."""

    def make_of_groups(groups: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
        return make(_Parameters([p for group in groups for p in group]))

    return works_by_element(make_of_groups, 1, device) and not keeps_numbers(make_of_groups, 1, device)


def element_sharding(assignment: Assignment) -> str:
    """The setting of an assignment that splits parameters, or puts several into one flat tensor; empty if there is
    none."""
    strategy = assignment.strategy
    if assignment.engine == "zero" and strategy.zero_stage:
        return f"zero_stage: {strategy.zero_stage}"
    return f"tp: {strategy.tp}" if strategy.tp > 1 else ""


def parameter_distribution(assignment: Assignment) -> str:
    """The setting of an assignment that distributes whole parameters over several optimizers; empty if there is
    none."""
    strategy = assignment.strategy
    if assignment.engine == "megatron" and strategy.zero_stage and strategy.dp > 1:
        return f"zero_stage: {strategy.zero_stage}"
    return f"pp: {strategy.pp}" if strategy.pp > 1 else ""


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


def works_by_element(make: Make, groups: int, device: torch.device) -> bool:
    """True if the optimizer updates the parts of a parameter as it updates the whole one, independently of other
    parameters. The parameter is split by rows or columns, or flattened."""
    whole = _trained(make, groups, device, lambda matrix: [matrix])
    cut = (
        lambda matrix: list(matrix.tensor_split(2, 0)),
        lambda matrix: list(matrix.tensor_split(2, 1)),
        lambda matrix: [matrix.flatten()],
    )
    same = whole is not None and all(_equal(_trained(make, groups, device, way), whole) for way in cut)
    return same and works_by_parameter(make, groups, device)


def works_by_parameter(make: Make, groups: int, device: torch.device) -> bool:
    """True if the optimizer updates each parameter independently of the others."""
    together = _trained(make, groups, device, lambda matrix: [matrix])
    first = _trained(make, groups, device, lambda matrix: [matrix], slice(0, 1))
    return together is not None and _equal(
        first, replace(together, moved={key: value for key, value in together.moved.items() if key[1] == 0})
    )


def keeps_numbers(make: Make, groups: int, device: torch.device) -> bool:
    """True if the optimizer writes numbers of its own into its parameter groups."""
    whole = _trained(make, groups, device, lambda matrix: [matrix])
    return whole is not None and any(whole.numbers.values())


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
