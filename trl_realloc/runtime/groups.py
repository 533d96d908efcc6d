"""The process groups of a plan: one for every mesh, one for every parameter edge, one for samples.

Made on all ranks together, in one order, as torch demands. Owns no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..cluster import DeviceMesh
from ..engines.group import MeshGroup
from ..plan import ExecutionPlan


def make_groups(plan: ExecutionPlan, rank: int) -> tuple[dict[DeviceMesh, MeshGroup], Any]:
    """A group for every mesh of the plan and for each rank alone, made on all ranks in one order as torch demands;
    and a gloo group over all for samples, which lie on the host."""
    singles = {DeviceMesh(device, 1) for device in range(plan.cluster.size)}
    meshes = sorted({assignment.mesh for assignment in plan.assignments.values()} | singles)
    if not dist.is_initialized():
        return {mesh: MeshGroup(tuple(mesh.devices), rank) for mesh in meshes}, None
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    groups = {mesh: MeshGroup(tuple(mesh.devices), rank, dist.new_group(list(mesh.devices)), device) for mesh in meshes}
    return groups, dist.new_group(backend="gloo")


@dataclass(frozen=True)
class Edge:
    """A parameter edge whose ends differ: its training call, the ranks of both ends, and their groups."""

    source: str
    ranks: tuple[int, ...]
    control: Any
    wire: Any


def make_edges(plan: ExecutionPlan, rank: int) -> dict[str, Edge]:
    """By target call. Groups of their own, for a transfer's messages must not meet another group's collectives."""
    edges = {}
    for source, target in plan.reallocations:
        ranks = sorted({*plan.mesh(source).devices, *plan.mesh(target).devices})
        control = dist.new_group(ranks, backend="gloo") if dist.is_initialized() else None
        on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
        edges[target] = Edge(source, tuple(ranks), control, dist.new_group(ranks) if on_gpu else control)
    return edges
