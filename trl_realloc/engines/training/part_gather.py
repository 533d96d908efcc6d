"""Gathers full parameters of a split model on the first rank of its mesh, from the parts that all ranks hold. Tensors
are sent from rank to rank over the mesh's group, a bucket at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ...realloc.layout import Box, chunks, whole
from ..mesh_group import SplitGroups
from ..training_state import TensorSpec
from .tensor_parallel import box_of, local


_ABSENT = -2  # in the table of contributions: the rank does not contribute the parameter
_WHOLE = -1  # the rank contributes all of it; 0 and above: a slice of this dimension


class PartGather:
    """Gathers parameters on the first rank. Made on all ranks of the mesh; all methods are collective over the mesh.

    Args:
        parameters: this rank's parameters by name.
        specs: shape and dtype of all parameters of the full model, in the same order on every rank.
        groups: process groups of the mesh.
        contributes: returns whether this rank, among those with the same part of a parameter, sends it.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        specs: Mapping[str, TensorSpec],
        groups: SplitGroups,
        contributes: Callable[[nn.Parameter, str], bool],
    ) -> None:
        self.parameters, self.specs, self.groups = parameters, specs, groups
        mesh = groups.mesh
        split_dims = [
            _split_dim(parameters[name]) if name in parameters and contributes(parameters[name], name) else _ABSENT
            for name in specs
        ]
        # also connects the group: NCCL does so in its first operation, in which all of its ranks must take part
        table = mesh.gather(torch.tensor(split_dims, dtype=torch.int64, device=mesh.device))
        self._dims = [dict(zip(specs, dims.tolist(), strict=True)) for dims in table]  # by the index of a rank

    def full(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Full parameters on the mesh's first rank, on the device that the group sends from; nothing elsewhere. Beyond
        them the first rank holds the parts of one other rank at a time.

        Args:
            names: parameters of one dtype, the same on every rank.
        """
        mesh = self.groups.mesh
        local_parameters = {name: self.parameters[name] for name in names if self._dims[mesh.index][name] != _ABSENT}
        parts = {name: local(parameter.data).to(mesh.device) for name, parameter in local_parameters.items()}
        if not mesh.is_leader:
            if sum(part.numel() for part in parts.values()):
                mesh.send(torch.cat([part.reshape(-1) for part in parts.values()]), 0)
            return {}
        dtype = self.specs[names[0]].dtype
        full = {
            name: parts[name]
            if name in local_parameters and box_of(local_parameters[name]) == whole(self.specs[name].shape)
            else torch.empty(self.specs[name].shape, dtype=dtype, device=mesh.device)
            for name in names
        }
        for name, part in parts.items():
            if full[name] is not part:
                _at(full[name], box_of(local_parameters[name])).copy_(part)
        for index in range(1, mesh.size):
            boxes = {name: self._box(index, name) for name in names if self._dims[index][name] != _ABSENT}
            sizes = [math.prod(stop - start for start, stop in box) for box in boxes.values()]
            if not sum(sizes):
                continue
            received = torch.empty(sum(sizes), dtype=dtype, device=mesh.device)
            mesh.receive(received, index)
            for (name, box), part in zip(boxes.items(), received.split(sizes), strict=True):
                target = _at(full[name], box)
                target.copy_(part.view(target.shape))
        return full

    def _box(self, index: int, name: str) -> Box:
        """The part of a parameter that the rank at this index of the mesh contributes."""
        box, dim = whole(self.specs[name].shape), self._dims[index][name]
        if dim == _WHOLE:
            return box
        tensor_rank = index % self.groups.tp.size
        return (*box[:dim], chunks(self.specs[name].shape[dim], self.groups.tp.size)[tensor_rank], *box[dim + 1 :])


def _split_dim(parameter: Tensor) -> int:
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return next((p.dim % parameter.dim() for p in placements if isinstance(p, Shard)), _WHOLE)


def _at(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]
