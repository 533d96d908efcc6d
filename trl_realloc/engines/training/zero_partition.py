"""Partitions a model on the meta device as DeepSpeed's stage 3 does, one parameter at a time, and reads only this
rank's partition of each.

DeepSpeed itself partitions models that are in memory (`deepspeed.initialize`). The layout of its partitions is in
`realloc/layout` (`zero3_layout`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...realloc.layout import Box, whole
from ..mesh_group import MeshGroup
from ..training_state import flat_cells
from .deepspeed_compat import Partitioner, full_shape, partition
from .weight_source import reading, source_of, to_device
from .zero_setup import Topology, cast_parameters, parameter_dtype


def partition_unread(model: nn.Module, settings: Mapping[str, Any], topology: Topology, device: torch.device) -> None:
    """Partition the parameters on the meta device over the mesh, and read this rank's partitions. Does nothing for a
    model in memory. DeepSpeed partitions parameters in memory later.

    Args:
        settings: DeepSpeed's config of the engine.
        device: that the model computes on.
    """
    if source_of(model) is None:
        return
    dtype = parameter_dtype(settings)
    group = topology.group
    partitioner = Partitioner(group, settings, topology)
    to_device(model, device)  # DeepSpeed moves and casts no model that has partitions
    if dtype is not None:
        cast_parameters(model, dtype)
    with reading(model) as (parameters, read), torch.no_grad():
        for item in parameters:
            shape = item.parameter.shape
            memory = torch.empty(shape, dtype=item.parameter.dtype, device=device)
            if not _has_plain_partitions(settings):
                read(item.name, whole(shape), memory)
            parameter = item.replace(memory)
            del memory
            partitioner.partition(parameter)
            if _has_plain_partitions(settings):
                for box, cell in partition_of(parameter, group):
                    read(item.name, box, cell)


def partition_of(parameter: Any, group: MeshGroup) -> list[tuple[Box, Tensor]]:
    """This rank's boxes of a partitioned parameter, as views of DeepSpeed's partition."""
    flat = partition(parameter)
    return flat_cells(full_shape(parameter), group.index * flat.numel(), flat)


def _has_plain_partitions(settings: Mapping[str, Any]) -> bool:
    """Whether a partition is a flat tensor of the parameter's values that stays in memory. Otherwise (NVMe offload,
    quantized weights, secondary partitions) DeepSpeed must make it of the whole parameter."""
    zero = settings["zero_optimization"]
    swaps = (zero.get("offload_param") or {}).get("device") == "nvme"
    quantizes = zero.get("zero_quantized_weights") or zero.get("zero_quantized_nontrainable_weights")
    return not (swaps or quantizes or zero.get("zero_hpz_partition_size", 1) > 1)


__all__ = ["partition_of", "partition_unread"]
