"""Float32 master weights of the 16-bit parameters of a split model, optionally with the optimizer state sharded over
the data-parallel group. Full replicas use `optimizer_state.MasterWeights`.
"""

from __future__ import annotations

import contextlib
import heapq
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..mesh_group import SplitGroups
from ..training_state import (
    MASTER,
    StateSpecs,
    StateTensor,
    TrainingState,
    is_elementwise,
    loaded_scalars,
    room_for,
    scalars_of,
)
from .optimizer_state import GroupSettings, in_dtype_of, is_low
from .split_layers import clear_gradient, leaf_of
from .tensor_parallel import box_of, is_split, largest_part, local, local_gradient


@dataclass
class Master:
    """One trained parameter of this rank, with its master weight.

    Args:
        name: name of the parameter in the module.
        parameter: parameter that the forward uses; may be a DTensor.
        owner: data-parallel rank that steps it; -1 if every replica steps it.
        tied: whether the first and the last stage have it, so that their copies must stay equal.
        partial: whether each tensor-parallel rank computes a part of its gradient, and the parts must be summed.
        weight: (local shape) float32, master weight on the ranks that step it; shares the memory of a float32
            parameter.
        gradient: (local shape) float32, accumulated gradient of a 16-bit parameter.
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
            # a reference from the hook to this object, and from here to the parameter, would be a cycle that the
            # garbage collector does not see, and the memory of both would never be freed
            reference = weakref.ref(self)

            def add(_: Tensor) -> None:
                master = reference()
                assert master is not None, "the engine that trains the parameter has its master weight"
                master._add()

            leaf_of(self.parameter).register_post_accumulate_grad_hook(add)

    def _add(self) -> None:
        gradient = local_gradient(self.parameter)
        assert gradient is not None, "the hook runs after a gradient is accumulated"
        self.gradient = gradient.float() if self.gradient is None else self.gradient.add_(gradient)
        clear_gradient(self.parameter)

    def take_gradient(self) -> Tensor:
        """Return the gradient summed over the micro-batches, (local shape) float32, and clear it. Zeros if no
        micro-batch had one."""
        gradient = self.gradient if is_low(self.parameter) else local_gradient(self.parameter)
        self.gradient = None
        clear_gradient(self.parameter)
        if gradient is None:
            return torch.zeros_like(self.value, dtype=_master_dtype(self.parameter))
        return gradient.contiguous()

    @property
    def value(self) -> Tensor:
        """This rank's part of the parameter, live."""
        return local(self.parameter.data)

    def part(self, tensor: Tensor) -> StateTensor:
        """This rank's part of one tensor of the training state: the float32 weight, or of the optimizer's state."""
        if self.weight is None or tensor.shape != self.weight.shape:
            return StateTensor.of(tensor)  # a factored moment, which only exists for unsplit parameters
        return StateTensor.of(tensor, tuple(self.parameter.shape), box_of(self.parameter))


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer of a full model whose parameters are replaced by names, so that the full parameters can be freed
    when the model is split.

    Args:
        optimizer: optimizer without parameters and state.
        groups: names of the parameters of each parameter group.
        state: state that the optimizer's constructor made (Adagrad's sums), by parameter name.
    """

    optimizer: torch.optim.Optimizer
    groups: Sequence[Sequence[str]]
    state: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def of(make: Callable[[nn.Module], torch.optim.Optimizer], model: nn.Module) -> NamedOptimizer:
        """Make the optimizer of a full model, which may be on the meta device, and remove its parameters and state."""
        optimizer = make(model)
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        state = {names[p]: values for p, values in optimizer.state.items()}
        if any(p.is_meta for p in optimizer.state):  # its state is on the meta device too
            (example,) = make(nn.Linear(1, 1, bias=False)).state.values()
            state = {names[p]: _repeated(example, p.shape) for p in optimizer.state}
        groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = []
        return NamedOptimizer(optimizer, groups, state)

    def over(self, masters: Iterable[Master]) -> torch.optim.Optimizer:
        """The optimizer of these master weights, each in its parameter's group and with its part of the state."""
        stepped = {m.name: (m, m.weight) for m in masters if m.weight is not None}
        for group, names in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"] = [stepped[name][1] for name in names if name in stepped]
        for name in stepped.keys() & self.state.keys():
            master, weight = stepped[name]
            index = tuple(slice(start, stop) for start, stop in box_of(master.parameter))
            self.optimizer.state[weight] = {
                key: in_dtype_of(weight, value[index])
                if torch.is_tensor(value) and value.shape == master.parameter.shape
                else value
                for key, value in self.state[name].items()
            }
        return self.optimizer


class SplitMasters:
    """The master weights and the optimizer of a split model, on one rank.

    Args:
        parameters: trained parameters of this rank, in the same order on all ranks with the same tensor and pipeline
            rank; may be empty.
        optimizer: optimizer of the full model; changed to step the master weights.
        groups: process groups of the mesh.
        shard: whether to shard the optimizer state over the data-parallel group (ZeRO stage 1). Each parameter has one
            owner, the same for all copies of it: the rank with the fewest elements so far, in order of descending size.
            Rank 0 owns the parameters that both ends of a pipeline have.
        tied: names of the parameters that the first and the last stage share.
        partial: names of the parameters whose gradient each tensor-parallel rank computes in part.
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
        owners = _owners([0 if name in tied else largest_part(p) for name, p in parameters], groups.dp.size)
        owners = [0 if name in tied else owner for (name, _), owner in zip(parameters, owners, strict=True)]
        self.all = [
            Master(name, p, owner if shard else -1, name in tied, name in partial)
            for (name, p), owner in zip(parameters, owners, strict=True)
        ]
        for master in self.all:
            if self.steps(master):
                # for a float32 parameter this shares its memory, so stepping it steps the parameter
                master.weight = nn.Parameter(master.value.detach().to(_master_dtype(master.parameter)))
        self.optimizer = optimizer.over(self.all)
        self.settings = GroupSettings(self.optimizer)

    def steps(self, master: Master) -> bool:
        """True if this rank steps a master weight."""
        return master.owner in (-1, self.groups.dp.index)

    def counts(self, master: Master) -> bool:
        """True if this rank contributes its part of a parameter to the gradient norm. Among ranks with the same part,
        one does."""
        first_replica = master.owner == self.groups.dp.index or (master.owner == -1 and self.groups.dp.index == 0)
        of_tensor = is_split(master.parameter) or self.groups.tp.index == 0
        return first_replica and of_tensor and not (master.tied and self.groups.pp.index > 0)

    @torch.no_grad()
    def step(self, max_norm: float) -> float:
        """Sum the gradients over the mesh, clip them by their global norm, step, and copy the result to every replica.

        Returns:
            The norm before clipping, the same on all ranks. If it is not finite, the step was not taken, and the
            gradients are dropped.
        """
        gradients = {master.name: master.take_gradient() for master in self.all}
        self.sum(gradients)
        norm = self._norm(gradients)
        if not norm.isfinite():
            return float(norm)
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
        self.publish()
        return float(norm)

    def drop(self) -> None:
        """Discard the accumulated gradients."""
        for master in self.all:
            master.gradient = None
            clear_gradient(master.parameter)

    def sum(self, gradients: dict[str, Tensor]) -> None:
        groups, everywhere = self.groups, [master for master in self.all if master.owner == -1]
        if groups.tp.size > 1:
            groups.tp.sum_([gradients[master.name] for master in self.all if master.partial])
        if groups.dp.size > 1:
            groups.dp.sum_([gradients[master.name] for master in everywhere])
            for owner, masters in self._by_owner():
                groups.dp.sum_to([gradients[master.name] for master in masters], owner)
        # After the sums: groups of three or more replicas may add the same numbers in different orders. All ranks with
        # a copy belong to one replica, and their copies have one owner.
        self._agree(gradients, [master for master in self.all if self.steps(master)])

    def _agree(self, gradients: dict[str, Tensor], masters: Sequence[Master]) -> None:
        """Make the copies of a gradient in a tensor-parallel group and at both ends of a pipeline bitwise equal, so
        that the copies of the weights stay equal."""
        groups = self.groups
        if groups.tp.size > 1:
            # every rank has computed these gradients in full; kernels without a fixed order of additions give results
            # that differ in the last bits
            unsplit = [master for master in masters if not master.partial and not is_split(master.parameter)]
            groups.tp.broadcast([gradients[master.name] for master in unsplit], 0)
        if groups.ends.size > 1 and groups.ends.rank in groups.ends.ranks:
            groups.ends.sum_([gradients[master.name] for master in masters if master.tied])

    def _norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """The norm of the full model's gradient, 0-dimensional float64, the same on all ranks."""
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

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the rounded master weights into the parameters, from their owners to all replicas. Collective."""
        for master in self.all:
            if master.weight is not None and master.weight.data_ptr() != master.value.data_ptr():
                master.value.copy_(master.weight)
        for owner, masters in self._by_owner():
            self.groups.dp.broadcast([master.value for master in masters], owner)

    # --- state ------------------------------------------------------------------------------------------------------

    def training_state(self, version: int) -> TrainingState:
        """The parts of the training state that this rank steps."""
        state = TrainingState(version, group_numbers=self.settings.numbers())
        for master, weight in self._stepped():
            values = self.optimizer.state.get(weight, {})
            tensors = {MASTER: weight, **{key: value for key, value in values.items() if is_elementwise(value)}}
            state.tensors[master.name] = {key: master.part(tensor) for key, tensor in tensors.items()}
            state.scalars[master.name] = scalars_of(values)
        return state

    @contextlib.contextmanager
    def loading(self, specs: StateSpecs) -> Iterator[TrainingState]:
        """`base.TrainingEngine.loading` without the check of names."""
        state, values = TrainingState(group_numbers=self.settings.empty()), dict[str, dict[str, Tensor]]()
        for master, weight in self._stepped():
            name, current, shape = master.name, self.optimizer.state.get(weight, {}), tuple(master.parameter.shape)
            others = [(key, spec) for key, spec in specs[name].items() if key != MASTER]
            values[name] = {key: room_for(spec, current.get(key), weight, shape) for key, spec in others}
            state.tensors[name] = {key: master.part(t) for key, t in {MASTER: weight, **values[name]}.items()}
            state.scalars[name] = {}
        yield state
        for master, weight in self._stepped():
            scalars = loaded_scalars(self.optimizer, weight, state.scalars[master.name])
            self.optimizer.state.pop(weight, None)
            if loaded := {**values[master.name], **scalars}:
                self.optimizer.state[weight] = loaded
        self.settings.load(state.group_numbers)
        self.publish()

    def _stepped(self) -> list[tuple[Master, nn.Parameter]]:
        return [(master, master.weight) for master in self.all if master.weight is not None]


def _master_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float32 if is_low(parameter) else parameter.dtype


def _repeated(example: Mapping[str, object], shape: torch.Size) -> dict[str, Any]:
    """The state that an optimizer's constructor makes for a parameter of this shape, expanded from that of one element
    without a copy."""
    return {key: v.reshape(()).expand(shape) if torch.is_tensor(v) and v.dim() else v for key, v in example.items()}


def _owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each parameter: in order of descending size, the rank with the fewest elements so far."""
    heap = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, rank = heapq.heappop(heap)
        owners[index] = rank
        heapq.heappush(heap, (load + sizes[index], rank))
    return owners
