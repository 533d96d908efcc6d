"""Partitions a model like DeepSpeed's stage 3, one parameter at a time; reads only this rank's partition of a model on
the meta device. Sends the partitions to the mesh's first rank, piece by piece.

The layout of DeepSpeed's partitions is in `realloc/layout` (`zero3_layout`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...realloc.layout import Box, whole
from ..mesh_group import MeshGroup, in_buckets
from ..parameter_pieces import Piece
from ..training_state import flat_cells
from ..weight_digest import part_digest
from .deepspeed_compat import Partitioner, full_bytes, full_numel, full_shape, partition
from .weight_source import reading, source_of, to_device
from .zero_setup import Topology, cast_parameters, parameter_dtype


def partition_loaded(
    model: nn.Module, settings: Mapping[str, object], topology: Topology, device: torch.device
) -> None:
    """Partition the parameters of a model in memory over the mesh, so that the device has one full parameter at a time.
    `deepspeed.initialize` would move the whole model there first. Does nothing for a model on the meta device, and if
    DeepSpeed's partitions are not plain: DeepSpeed makes those itself.

    Args:
        settings: DeepSpeed's config of the engine.
        device: device of the computation.
    """
    if source_of(model) is not None or not has_plain_partitions(settings):
        return
    dtype = parameter_dtype(settings)
    if dtype is not None:
        cast_parameters(model, dtype)
    partitioner = Partitioner(topology.group, settings, topology)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(device)
            partitioner.partition(parameter)
    to_device(model, device)  # DeepSpeed does not move a model that has partitions


def partition_unread(
    model: nn.Module, settings: Mapping[str, object], topology: Topology, device: torch.device
) -> None:
    """Partition the parameters on the meta device over the mesh, and read this rank's partitions. Does nothing for a
    model in memory.

    Args:
        settings: DeepSpeed's config of the engine.
        device: device of the computation.
    """
    if source_of(model) is None:
        return
    dtype = parameter_dtype(settings)
    group = topology.group
    partitioner = Partitioner(group, settings, topology)
    to_device(model, device)  # DeepSpeed neither moves nor casts a model that has partitions
    if dtype is not None:
        cast_parameters(model, dtype)
    with reading(model) as (parameters, read), torch.no_grad():
        for item in parameters:
            shape = item.parameter.shape
            memory = torch.empty(shape, dtype=item.parameter.dtype, device=device)
            if not has_plain_partitions(settings):
                read(item.name, whole(shape), memory)
            parameter = item.replace(memory)
            del memory
            partitioner.partition(parameter)
            if has_plain_partitions(settings):
                for box, cell in partition_of(parameter, group):
                    read(item.name, box, cell)


def partition_of(parameter: nn.Parameter, group: MeshGroup) -> list[tuple[Box, Tensor]]:
    """This rank's boxes of a partitioned parameter, as views of DeepSpeed's partition."""
    flat = partition(parameter)
    return flat_cells(full_shape(parameter), group.index * flat.numel(), flat)


def partition_digest(parameter: nn.Parameter, group: MeshGroup) -> Tensor:
    """The contribution of this rank's partition to the parameter's digest, on the partition's device."""
    shape = full_shape(parameter)
    digests = [part_digest(cell, box, shape) for box, cell in partition_of(parameter, group)]
    return torch.stack(digests).sum() if digests else torch.zeros((), dtype=torch.int64, device=group.device)


def summed_digests(digests: Sequence[Tensor], group: MeshGroup) -> list[int]:
    """The digests of the parameters, from those of this rank's partitions. Collective over the mesh."""
    if not digests:
        return []
    sums = torch.stack([digest.to(group.device) for digest in digests])
    group.sum_([sums])
    values: list[int] = sums.tolist()
    return values


def partition_pieces(
    parameters: Sequence[tuple[str, nn.Parameter]], group: MeshGroup, piece_bytes: int
) -> Iterator[list[Piece]]:
    """Partitioned parameters in pieces on the mesh's first rank, nothing elsewhere. Each other rank sends its parts of
    several parameters in messages of up to `piece_bytes`, and its part of a larger parameter in several messages.
    Beyond its partitions no rank has more than two messages: the one that is written, and the next. Collective over the
    mesh.

    Args:
        parameters: (name, parameter) pairs, the same on every rank.
    """
    group.barrier()  # connects the group: NCCL does so in its first operation, in which all of its ranks must take part
    size_of = {name: full_bytes(p) for name, p in parameters}
    for bucket in in_buckets(parameters, lambda item: size_of[item[0]], piece_bytes, lambda item: item[1].dtype):
        for owner in range(group.size):
            ranges = [part for name, p in bucket for part in _ranges(name, p, owner, piece_bytes)]
            for message in in_buckets(ranges, lambda part: part.bytes, piece_bytes):
                if owner == group.index:
                    local_parts = [partition(part.parameter)[part.low : part.high] for part in message]
                    if group.is_leader:
                        yield [part.piece(values) for part, values in zip(message, local_parts, strict=True)]
                    else:
                        group.send(torch.cat(local_parts) if len(local_parts) > 1 else local_parts[0], 0)
                    del local_parts
                elif group.is_leader:
                    sizes = [part.high - part.low for part in message]
                    received = torch.empty(sum(sizes), dtype=message[0].parameter.dtype, device=group.device)
                    group.receive(received, owner)
                    yield [part.piece(v) for part, v in zip(message, received.split(sizes), strict=True)]
                    del received


@dataclass(frozen=True)
class _Range:
    """Elements `low` to `high` of a rank's partition; `start` is the index of the first one in the parameter."""

    name: str
    parameter: nn.Parameter
    start: int
    low: int
    high: int

    @property
    def bytes(self) -> int:
        return (self.high - self.low) * int(self.parameter.element_size())

    def piece(self, values: Tensor) -> Piece:
        return Piece(self.name, self.start, values)


def _ranges(name: str, parameter: nn.Parameter, owner: int, piece_bytes: int) -> Iterator[_Range]:
    """A rank's partition in ranges of at most `piece_bytes`, without the padding at the parameter's end."""
    length = partition(parameter).numel()  # the same on every rank
    first = owner * length
    step = max(1, piece_bytes // parameter.element_size())
    held = max(0, min(length, full_numel(parameter) - first))
    for low in range(0, held, step):
        yield _Range(name, parameter, first + low, low, min(held, low + step))


def has_plain_partitions(settings: Mapping[str, Any]) -> bool:
    """True if a partition is a flat tensor of the parameter's values that stays in memory. Otherwise (NVMe offload,
    quantized weights, secondary partitions) DeepSpeed must make it from the whole parameter."""
    zero = settings["zero_optimization"]
    swaps = (zero.get("offload_param") or {}).get("device") == "nvme"
    quantizes = zero.get("zero_quantized_weights") or zero.get("zero_quantized_nontrainable_weights")
    return not (swaps or quantizes or zero.get("zero_hpz_partition_size", 1) > 1)


__all__ = [
    "has_plain_partitions",
    "partition_digest",
    "partition_loaded",
    "partition_of",
    "partition_pieces",
    "partition_unread",
    "summed_digests",
]
