"""Tests whether an optimizer updates every element independently of the others, which sharding requires. It is tested
on small matrices, because optimizers do not declare it.

What an assignment shards is defined in `plan.assignment`. Optimizers are made in `optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..engines.training.tensor_parallel import splits_adapter
from ..plan.assignment import Assignment
from ..plan.execution_plan import ExecutionPlan
from ..planner.space import TrainingSplits
from .config_checks import ConfigError
from .optimizers import make_optimizer, with_groups


if TYPE_CHECKING:
    from .grpo_config import PolicyConfig
    from .ppo_config import PPOConfig


# A matrix has more than 4,096 elements and its halves fewer: up to 4,096, 8-bit optimizers keep a float32 state.
ROWS, COLUMNS = 96, 64
STEPS, RATE = 4, 1e-2
TOLERANCE = 1e-4  # for rounding, relative to the largest change of a parameter

Make = Callable[[Sequence[Sequence[nn.Parameter]]], torch.optim.Optimizer]


class OptimizerSharding:
    """What the optimizer of a run allows, as it is seen on small matrices the first time that it is asked for.

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
        """How training calls may be split."""
        given = self._make, self._groups, self._device
        by_element = works_by_element(*given)
        weights = [[nn.Parameter(torch.zeros(1, device=self._device))] for _ in range(self._groups)]
        # DeepSpeed 0.19.8 makes it anew from its defaults, without its groups (stage_1_and_2.py:946)
        is_adagrad = by_element and isinstance(self._make(weights), torch.optim.Adagrad)
        return TrainingSplits(by_element, by_element or works_by_parameter(*given), not is_adagrad)

    def splits_with(self, adapters: Mapping[str, Any]) -> TrainingSplits:
        """How training calls may be split with these adapters of the policy, PEFT configs by their names."""
        return replace(self.splits, tensor=all(splits_adapter(config) for config in adapters.values()))


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
                f"norms of whole tensors), so {name} under {setting} {way_out}"
            )
    if not splits.parameters:
        for name, setting in distributed.items():
            raise ConfigError(f"{kind} does not step each parameter by itself, so {name} under {setting} {way_out}")


def can_be_sharded(make: Callable[[nn.Module], torch.optim.Optimizer], device: torch.device) -> bool:
    """Whether every plan may shard the optimizer that `make` makes over a role's module."""
    return works_by_element(lambda groups: make(_Parameters([p for group in groups for p in group])), 1, device)


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
            {**group, "params": list(parameters)}
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
    """Whether parameters that are split by rows or columns, or flattened, are updated as whole ones are, and also
    independently of other parameters."""
    whole = _trained(make, groups, device, lambda matrix: [matrix])
    cut = (
        lambda matrix: list(matrix.tensor_split(2, 0)),
        lambda matrix: list(matrix.tensor_split(2, 1)),
        lambda matrix: [matrix.flatten()],
    )
    same = whole is not None and all(_equal(_trained(make, groups, device, way), whole) for way in cut)
    return same and works_by_parameter(make, groups, device)


def works_by_parameter(make: Make, groups: int, device: torch.device) -> bool:
    """Whether a parameter is updated independently of other parameters."""
    together = _trained(make, groups, device, lambda matrix: [matrix])
    first = _trained(make, groups, device, lambda matrix: [matrix], slice(0, 1))
    return together is not None and _equal(first, {key: value for key, value in together.items() if key[1] == 0})


Moved = dict[tuple[int, int], Tensor]


def _trained(
    make: Make,
    groups: int,
    device: torch.device,
    cut: Callable[[Tensor], list[Tensor]],
    which: slice = slice(None),
) -> Moved | None:
    """The change of each of two matrices per group after some steps, flat, by (group, matrix); `None` if the optimizer
    raises."""
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
            if group.get("lr") is not None:  # a warmup may have set it to 0
                group["lr"] = RATE
        for step in range(STEPS):
            gradients = {key: drawn() * 10.0 ** (step * (key[1] - 0.5)) for key in start}
            for key, ps in parameters.items():
                for parameter, gradient in zip(ps, cut(gradients[key]), strict=True):
                    parameter.grad = gradient.contiguous().clone()
            optimizer.step()
    except Exception:  # the user's optimizer may raise any error; one for matrices alone raises on a flat tensor
        return None
    moved: Moved = {}
    with torch.no_grad():
        for key, ps in parameters.items():
            before, place = kept[key], torch.arange(ROWS * COLUMNS, device=device).view(shape)
            after = torch.empty(ROWS * COLUMNS, device=device)
            for parameter, where in zip(ps, cut(place), strict=True):
                after[where.flatten()] = parameter.flatten().float()
            moved[key] = after - before.flatten()
    return moved


def _equal(sharded: Moved | None, whole: Moved) -> bool:
    if sharded is None:
        return False
    return all(bool((sharded[key] - whole[key]).abs().max() <= TOLERANCE * whole[key].abs().max()) for key in whole)
