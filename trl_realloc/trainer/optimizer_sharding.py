"""Whether an optimizer steps every element by itself, which sharding its state or its parameters needs: tried on small
matrices, for no flag says it. Which plan shards what is `assignment`'s; optimizers are made in `optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..plan.assignment import Assignment
from ..plan.execution_plan import ExecutionPlan
from .optimizers import make_optimizer, with_groups
from .ppo_config import ConfigError, PPOConfig


# More elements than the 4,096 up to which 8-bit optimizers keep a state in float32, whose halves have fewer.
ROWS, COLUMNS = 96, 64
STEPS, RATE = 4, 1e-2
TOLERANCE = 1e-4  # of the largest movement: rounding

Make = Callable[[Sequence[Sequence[nn.Parameter]]], torch.optim.Optimizer]


def check_sharding(args: PPOConfig, given: torch.optim.Optimizer | None, plan: ExecutionPlan) -> None:
    """Refuse a plan that cuts what the optimizer must have whole.

    Args:
        given: the user's optimizer, or `None` for the one that `args` name.

    Raises:
        ConfigError
    """
    trained = {name: assignment for name, assignment in plan.assignments.items() if plan.graph.call(name).trains}
    cut = {name: what for name, assignment in trained.items() if (what := cuts(assignment))}
    apart = {name: what for name, assignment in trained.items() if (what := parts(assignment))}
    if not cut and not apart:
        return
    make, count = (named_maker(args), 1) if given is None else (given_maker(given), len(given.param_groups))
    kind = type(given).__name__ if given is not None else f"optim={str(getattr(args.optim, 'value', args.optim))!r}"
    way_out = (
        "would not train as on one device; give it replicas (engine zero with zero_stage: 0, as plan: flatten does), "
        "or use an optimizer such as adamw_torch."
    )
    for name, what in cut.items():
        if not works_by_element(make, count, args.device):
            raise ConfigError(
                f"{kind} does not step each element by itself (it factors, projects, quantises in blocks, or uses "
                f"norms of whole tensors), so {name} under {what} {way_out}"
            )
    for name, what in apart.items():
        if not works_by_parameter(make, count, args.device):
            raise ConfigError(f"{kind} does not step each parameter by itself, so {name} under {what} {way_out}")


def shards_anyhow(make: Callable[[nn.Module], torch.optim.Optimizer], device: torch.device) -> bool:
    """Whether any plan may shard what `make` makes over a role's module."""
    return works_by_element(lambda groups: make(_Parameters([p for group in groups for p in group])), 1, device)


def cuts(assignment: Assignment) -> str:
    """What of an assignment cuts parameters, or lays several into one flat tensor; empty where nothing does."""
    strategy = assignment.strategy
    if assignment.engine == "zero" and strategy.zero_stage:
        return f"zero_stage: {strategy.zero_stage}"
    return f"tp: {strategy.tp}" if strategy.tp > 1 else ""


def parts(assignment: Assignment) -> str:
    """What of an assignment deals whole parameters to several optimizers; empty where nothing does."""
    strategy = assignment.strategy
    if assignment.engine == "megatron" and strategy.zero_stage and strategy.dp > 1:
        return f"zero_stage: {strategy.zero_stage}"
    return f"pp: {strategy.pp}" if strategy.pp > 1 else ""


def named_maker(args: PPOConfig) -> Make:
    """Makes the optimizer that `args` name."""
    return lambda groups: make_optimizer(args, _Parameters([p for group in groups for p in group]))


def given_maker(given: torch.optim.Optimizer) -> Make:
    """Makes one with the class and the settings of a user's optimizer, group by group."""

    def make(groups: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
        settings = [{**group, "params": list(ours)} for group, ours in zip(given.param_groups, groups, strict=True)]
        return with_groups(given, settings, {})

    return make


class _Parameters(nn.Module):
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for at, parameter in enumerate(parameters):
            self.register_parameter(f"weight{at}", parameter)


def works_by_element(make: Make, groups: int, device: torch.device) -> bool:
    """Whether parameters that are cut by rows or columns, or lie flat, become what whole ones become, and without the
    others too."""
    whole = _trained(make, groups, device, lambda matrix: [matrix])
    cut = (
        lambda matrix: list(matrix.tensor_split(2, 0)),
        lambda matrix: list(matrix.tensor_split(2, 1)),
        lambda matrix: [matrix.flatten()],
    )
    same = whole is not None and all(_equal(_trained(make, groups, device, way), whole) for way in cut)
    return same and works_by_parameter(make, groups, device)


def works_by_parameter(make: Make, groups: int, device: torch.device) -> bool:
    """Whether a parameter becomes the same beside others and without them."""
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
    """How far each of two matrices per group moves, flat, by (group, matrix); `None` where the optimizer fails."""
    draw = torch.Generator().manual_seed(0)
    shape = (ROWS, COLUMNS)
    scales = torch.logspace(-2, 2, ROWS)[:, None]  # rows unlike each other, as a factored moment would have them

    def drawn() -> Tensor:
        return (scales * torch.randn(shape, generator=draw)).to(device)

    start = {(group, at): drawn() for group in range(groups) for at in range(2)}
    kept = {key: value for key, value in start.items() if key[1] in range(2)[which]}
    parameters = {key: [nn.Parameter(part.contiguous().clone()) for part in cut(value)] for key, value in kept.items()}
    try:
        of_group = [[p for key, ps in parameters.items() if key[0] == at for p in ps] for at in range(groups)]
        optimizer = make(of_group)
        for group in optimizer.param_groups:
            if group.get("lr") is not None:  # a warmup may have it at 0
                group["lr"] = RATE
        for step in range(STEPS):
            gradients = {key: drawn() * 10.0 ** (step * (key[1] - 0.5)) for key in start}
            for key, ps in parameters.items():
                for parameter, gradient in zip(ps, cut(gradients[key]), strict=True):
                    parameter.grad = gradient.contiguous().clone()
            optimizer.step()
    except Exception:  # an optimizer of the user's may raise anything, and one for matrices alone does on a flat tensor
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


def _equal(ours: Moved | None, whole: Moved) -> bool:
    if ours is None:
        return False
    return all(bool((ours[key] - whole[key]).abs().max() <= TOLERANCE * whole[key].abs().max()) for key in whole)
