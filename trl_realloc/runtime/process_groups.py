"""The process groups of a plan: one for every mesh, one for every parameter edge, one for samples.

Made on all ranks together, in one order, as torch demands. Owns no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..engines.mesh_group import MeshGroup, SplitGroups, split_ranks
from ..plan.cluster import DeviceMesh
from ..plan.execution_plan import ExecutionPlan


def from_first_rank(value: Any) -> Any:
    """Rank 0's value on every rank. All ranks call this together; the others' values do not count."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, 0)
    return box[0]


def from_every_rank(value: Any, group: Any) -> list[Any]:
    """What each rank passes, in the order of the ranks, on every rank. All ranks of `group` call this together.

    Args:
        group: a gloo group, because objects are gathered on the host; `None` in a job of one process.
    """
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def make_groups(plan: ExecutionPlan, rank: int, timeout: timedelta) -> tuple[dict[DeviceMesh, MeshGroup], Any]:
    """A group for every mesh of the plan and for each rank alone, made on all ranks in one order as torch demands;
    and a gloo group over all for samples, which lie on the host.

    Args:
        timeout: of every collective and message, here and below: the config's `ddp_timeout`.
    """
    singles = {DeviceMesh(device, 1) for device in range(plan.cluster.size)}
    meshes = sorted({assignment.mesh for assignment in plan.assignments.values()} | singles)
    if not dist.is_initialized():
        return {mesh: MeshGroup(tuple(mesh.devices), rank) for mesh in meshes}, None
    device = _device()
    groups = {
        mesh: MeshGroup(tuple(mesh.devices), rank, dist.new_group(list(mesh.devices), timeout=timeout), device)
        for mesh in meshes
    }
    return groups, dist.new_group(backend="gloo", timeout=timeout)


def make_split_groups(
    plan: ExecutionPlan, rank: int, timeout: timedelta
) -> dict[tuple[DeviceMesh, int, int], SplitGroups]:
    """This rank's tensor, pipeline and data groups, by mesh, tp and pp of the calls that the engine megatron runs."""
    found: dict[tuple[DeviceMesh, int, int], SplitGroups] = {}
    splits = {(a.mesh, a.strategy.tp, a.strategy.pp) for a in plan.assignments.values() if a.engine == "megatron"}
    for mesh, tp, pp in sorted(splits):
        mine: dict[str, MeshGroup] = {}
        for kind, members in _each_group(tuple(mesh.devices), tp, pp):
            group = None
            if dist.is_initialized() and len(members) > 1:
                group = dist.new_group(list(members), timeout=timeout)
            # the ends of a pipeline are of interest to its middle stages too, though not theirs
            if rank in members or (kind == "ends" and rank in mesh and set(members) <= set(mine["pp"].ranks)):
                mine[kind] = MeshGroup(members, rank, group, _device())
        if rank in mesh:
            found[mesh, tp, pp] = SplitGroups(**mine)
    return found


def _each_group(ranks: tuple[int, ...], tp: int, pp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mesh", ranks
    for kind, groups in split_ranks(ranks, tp, pp).items():
        for members in groups:
            yield kind, members


def _device() -> torch.device:
    """Where the default backend's tensors lie."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@dataclass(frozen=True)
class Edge:
    """A parameter edge whose ends differ: its training call, the ranks of both ends, and their groups."""

    source: str
    ranks: tuple[int, ...]
    control: Any
    wire: Any


def make_edges(plan: ExecutionPlan, rank: int, timeout: timedelta) -> dict[str, Edge]:
    """By target call. Groups of their own, for a transfer's messages must not meet another group's collectives."""
    edges = {}
    for source, target in plan.reallocations:
        ranks = sorted({*plan.mesh(source).devices, *plan.mesh(target).devices})
        control = dist.new_group(ranks, backend="gloo", timeout=timeout) if dist.is_initialized() else None
        on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
        wire = dist.new_group(ranks, timeout=timeout) if on_gpu else control
        edges[target] = Edge(source, tuple(ranks), control, wire)
    return edges
