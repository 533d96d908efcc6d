"""Float32 master weights: of a replica's parameters (`MasterWeights`), and the optimizer's side of a split model, its
state shared out over the data-parallel group or held by every replica (`Masters`).

The forward uses a parameter of 16 bits; its gradients are added up in float32, the optimizer steps its master, and the
parameter is the master rounded. A parameter of float32 is its own master. Owns no forward and no layout: it is handed
parameters, and which of a parameter's gradients have to be summed where.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..mesh_group import SplitGroups
from .tensor_parallel import box_of, is_split, local, local_gradient


def is_low(parameter: Tensor) -> bool:
    """Whether a parameter has so few bits that its master is another tensor."""
    return parameter.dtype.itemsize < 4


class MasterWeights:
    """Puts a float32 master in the place of every parameter of 16 bits that an optimizer steps.

    Args:
        optimizer: over a replica's parameters; from here on over their masters, with its state in float32.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        for group in optimizer.param_groups:
            group["params"] = [self._replace(parameter) for parameter in group["params"]]
        for parameter, master in self._masters.items():
            if slots := optimizer.state.pop(parameter, None):
                optimizer.state[master] = {key: in_dtype_of(master, cell) for key, cell in slots.items()}

    def _replace(self, parameter: nn.Parameter) -> nn.Parameter:
        if not is_low(parameter):
            return parameter
        master = nn.Parameter(parameter.detach().float())

        def add(low: Tensor) -> None:
            assert low.grad is not None, "it is called when a gradient has come"
            gradient = low.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            low.grad = None

        parameter.register_post_accumulate_grad_hook(add)
        self._masters[parameter] = master
        return master

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer steps, and where the parameter's gradients are."""
        return self._masters.get(parameter, parameter)

    def publish(self) -> None:
        """The parameters become their masters, rounded."""
        for parameter, master in self._masters.items():
            parameter.data.copy_(master.data)


def in_dtype_of(weight: Tensor, cell: Any) -> Any:
    """What an optimizer keeps of a weight, on its device; floating-point numbers of the weight's shape in its dtype,
    others (quantized moments with their scales) as they are."""
    if not torch.is_tensor(cell) or not cell.dim():
        return cell
    if cell.is_floating_point() and cell.shape == weight.shape:
        return cell.to(weight.device, weight.dtype, copy=True)
    return cell.to(weight.device, copy=True)


@dataclass
class Master:
    """One trained parameter of this rank.

    Args:
        name: the module's.
        parameter: what the forward uses, maybe a DTensor.
        owner: the data-parallel rank that steps it; -1 where each replica does for itself.
        tied: it is held by the first and the last stage, which must stay equal.
        partial: each tensor-parallel rank has a part of its gradient.
        weight: (local shape) float32, of the owner; the parameter's own memory where that is float32.
        gradient: (local shape) float32, the sum of the micro-batches' gradients of a parameter of 16 bits.
    """

    name: str
    parameter: nn.Parameter
    owner: int
    tied: bool
    partial: bool
    weight: nn.Parameter | None = None
    gradient: Tensor | None = None

    def __post_init__(self) -> None:
        if is_low(self.parameter):
            self.parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: Tensor) -> None:
        gradient = local_gradient(self.parameter)
        assert gradient is not None, "it is called when a gradient has come"
        self.gradient = gradient.float() if self.gradient is None else self.gradient.add_(gradient)
        parameter.grad = None

    def take_gradient(self) -> Tensor:
        """(local shape) float32, the sum over the micro-batches, zeros where there was none; the master has it no
        longer."""
        gradient = self.gradient if is_low(self.parameter) else local_gradient(self.parameter)
        self.gradient = self.parameter.grad = None
        if gradient is None:
            return torch.zeros_like(self.value, dtype=_master_dtype(self.parameter))
        return gradient.contiguous()

    @property
    def value(self) -> Tensor:
        return local(self.parameter.data)


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer that was made over a whole model, with the names of its parameters in their place, so that the
    whole model need not be kept until it is cut.

    Args:
        optimizer: without parameters and state.
        groups: for each of its parameter groups the names.
        state: what it made with itself (Adagrad's sums), by name.
    """

    optimizer: torch.optim.Optimizer
    groups: Sequence[Sequence[str]]
    state: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, model: nn.Module) -> NamedOptimizer:
        """Takes the parameters and the state out of the optimizer."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        state = {names[p]: slots for p, slots in optimizer.state.items()}
        groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = []
        return NamedOptimizer(optimizer, groups, state)

    def over(self, masters: Iterable[Master]) -> torch.optim.Optimizer:
        """The optimizer over the master weights, each in its parameter's group and with its part of the state."""
        stepped = {m.name: (m, m.weight) for m in masters if m.weight is not None}
        for group, names in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"] = [stepped[name][1] for name in names if name in stepped]
        for name in stepped.keys() & self.state.keys():
            master, weight = stepped[name]
            index = tuple(slice(start, stop) for start, stop in box_of(master.parameter))
            self.optimizer.state[weight] = {
                key: in_dtype_of(weight, cell[index])
                if torch.is_tensor(cell) and cell.shape == master.parameter.shape
                else cell
                for key, cell in self.state[name].items()
            }
        return self.optimizer


class Masters:
    """Args:
    parameters: the trained ones of this rank, in the same order on every rank with the same tensor and pipeline rank;
        there may be none.
    optimizer: of the whole model; from here on it steps the master weights.
    groups: of the mesh.
    shard: over dp, parameter by parameter: the largest first, each to the rank with the least (ZeRO stage 1).
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        optimizer: NamedOptimizer,
        groups: SplitGroups,
        *,
        shard: bool,
        tied: frozenset[str],
        partial: frozenset[str],
    ) -> None:
        self.groups = groups
        shard = shard and groups.dp.size > 1
        owners = _owners([local(p.data).numel() for _, p in parameters], groups.dp.size)
        self.all = [
            Master(name, p, owner if shard else -1, name in tied, name in partial)
            for (name, p), owner in zip(parameters, owners, strict=True)
        ]
        for master in self.all:
            if self.steps(master):
                # of float32 the same memory: a step of the master is one of the parameter
                master.weight = nn.Parameter(master.value.detach().to(_master_dtype(master.parameter)))
        self.optimizer = optimizer.over(self.all)

    def steps(self, master: Master) -> bool:
        """Whether this rank steps it."""
        return master.owner in (-1, self.groups.dp.index)

    def counts(self, master: Master) -> bool:
        """Whether this rank stands for it where each part of the model is wanted once: in the norm, in a checkpoint."""
        first_replica = master.owner == self.groups.dp.index or (master.owner == -1 and self.groups.dp.index == 0)
        of_tensor = is_split(master.parameter) or self.groups.tp.index == 0
        return first_replica and of_tensor and not (master.tied and self.groups.pp.index > 0)

    @torch.no_grad()
    def step(self, max_norm: float) -> bool:
        """Sum the gradients over the mesh, clip them by their global norm, step, and hand every replica the result.

        Returns:
            Whether the step was taken: not where the gradients are not finite, on all ranks of the mesh alike. They
            are dropped.
        """
        gradients = {master.name: master.take_gradient() for master in self.all}
        self._sum(gradients)
        norm = self._norm(gradients)
        if not norm.isfinite():
            return False
        for master in self.all:
            if master.weight is not None:
                master.weight.grad = gradients[master.name]
        if max_norm > 0:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).float()
            for gradient in gradients.values():
                gradient.mul_(factor.to(gradient.device))
        self.optimizer.step()
        for master in self.all:
            if master.weight is not None:
                master.weight.grad = None
                if master.weight.data_ptr() != master.value.data_ptr():
                    master.value.copy_(master.weight)
        for owner, masters in self._by_owner():
            self.groups.dp.broadcast([master.value for master in masters], owner)
        return True

    def _sum(self, gradients: dict[str, Tensor]) -> None:
        groups = self.groups
        if groups.tp.size > 1:
            groups.tp.sum_([gradients[master.name] for master in self.all if master.partial])
            # each rank has computed these for itself: a kernel that adds in no fixed order must not part the replicas
            whole = [m for m in self.all if not m.partial and not is_split(m.parameter)]
            groups.tp.broadcast([gradients[master.name] for master in whole], 0)
        if groups.ends.size > 1 and groups.ends.rank in groups.ends.ranks:
            groups.ends.sum_([gradients[master.name] for master in self.all if master.tied])
        if groups.dp.size > 1:
            groups.dp.sum_([gradients[master.name] for master in self.all if master.owner == -1])
            for owner, masters in self._by_owner():
                groups.dp.sum_to([gradients[master.name] for master in masters], owner)

    def _norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """Of the whole model's gradient, 0-dimensional, the same on all ranks: as `torch.nn.utils.get_total_norm`."""
        counted = [gradients[master.name] for master in self.all if self.counts(master)]
        squares = [torch.linalg.vector_norm(gradient) ** 2 for gradient in counted]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=self.groups.mesh.device)
        total = total.to(torch.float64)[None]
        self.groups.mesh.sum_([total])
        return total[0].sqrt()

    def _by_owner(self) -> Iterator[tuple[int, list[Master]]]:
        for owner in range(self.groups.dp.size):
            masters = [master for master in self.all if master.owner == owner]
            if masters:
                yield owner, masters

    # --- state ------------------------------------------------------------------------------------------------------

    def slots(self, master: Master) -> dict[str, Any]:
        """What the optimizer keeps of a parameter that this rank steps."""
        assert master.weight is not None
        return dict(self.optimizer.state.get(master.weight, {}))

    @torch.no_grad()
    def load(self, master: Master, weight: Tensor, slots: dict[str, Any]) -> None:
        """The inverse, of this rank's part; and on a rank that does not step it the weight alone."""
        master.value.copy_(weight)
        if master.weight is not None:
            if master.weight.data_ptr() != master.value.data_ptr():
                master.weight.data.copy_(weight)
            if slots:
                self.optimizer.state[master.weight] = slots


def _master_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float32 if is_low(parameter) else parameter.dtype


def _owners(sizes: Sequence[int], ranks: int) -> list[int]:
    heap = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        load, rank = heapq.heappop(heap)
        owners[at] = rank
        heapq.heappush(heap, (load + sizes[at], rank))
    return owners
