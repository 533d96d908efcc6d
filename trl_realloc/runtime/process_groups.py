"""The process groups of a plan: one for every mesh, for every reallocation, and one over all ranks for samples.

All ranks make them together and in the same order, as torch requires. `engine_builder` assigns groups to engines.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..common.errors import PlanError
from ..engines.device import group_device, is_accelerator
from ..engines.mesh_group import MeshGroup, SplitGroups, split_ranks
from ..plan.cluster import DeviceMesh
from ..plan.execution_plan import ExecutionPlan
from .messages import GlooMessages, all_reduce


T = TypeVar("T")


# Timeout of samples and messages between ranks, unless `ddp_timeout` is longer: a rank may wait for another rank's
# whole call. Lost ranks are noticed by their heartbeats.
LONGEST_CALL = timedelta(days=1)
MEETING_TAG = 1 << 27  # above the tags of samples in the same group; each mesh uses one


def new_group(ranks: Sequence[int] | None = None, **settings: Any) -> dist.ProcessGroup:
    """`torch.distributed.new_group`, with NCCL's lazy connection. All ranks call this together.

    With a DeepSpeed config on GPUs, the default group is bound to a device. Torch then connects every further group
    eagerly, by a split of the default group's communicator, which needs all ranks. Ranks outside a new gloo group would
    wait for ranks inside, which do not take part; a group made by its ranks alone would wait for all others; and
    messages between two ranks would wait for all other operations of their group.

    Args:
        ranks: ranks of the group; `None` for all.
        settings: further arguments of `torch.distributed.new_group`.
    """
    world: Any = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if bound is None:
        return dist.new_group(ranks, **settings)
    world.bound_device_id = None
    try:
        return dist.new_group(ranks, **settings)
    finally:
        world.bound_device_id = bound


def from_first_rank(value: T, timeout_s: float) -> T:
    """Rank 0's value, on every rank. All ranks call this together; the other ranks' values are ignored.

    Args:
        timeout_s: timeout of the gloo group that this makes if the default group sends from an accelerator, so that
            pickled objects stay in host memory.
    """
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, 0, group=_host_group(timeout_s))
    return values[0]


# the default group, and the gloo group over the same ranks
_host_groups: list[tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]] = []


def _host_group(timeout_s: float) -> dist.ProcessGroup | None:
    """A cached gloo group over all ranks, which call this together."""
    world = dist.group.WORLD
    if not is_accelerator(group_device()):
        return world
    if not _host_groups or _host_groups[0][0] is not world:  # the default group may have been destroyed and made again
        _host_groups[:] = [(world, new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))]
    return _host_groups[0][1]


def all_gather_object(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """All-gather: the values of all ranks in rank order. All ranks of `group` call this together.

    Args:
        group: a gloo group, because objects are gathered in host memory; `None` in a job of one process.
    """
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def any_rank(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """True if the flag is set on any rank. All ranks of `group` call this together.

    Args:
        group: a gloo group; `None` in a job of one process.
    """
    if group is None:
        return flag
    is_set = torch.tensor(int(flag))
    dist.all_reduce(is_set, dist.ReduceOp.MAX, group=group)
    return bool(is_set)


def wait_for_all(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Barrier of all ranks, after each has synchronized its device.

    Args:
        group: a gloo group; `None` in a job of one process. A barrier over NCCL would first make a communicator, which
            needs memory that a run may lack.
    """
    if is_accelerator(device):
        torch.accelerator.synchronize(device)
    barrier(group)


def barrier(group: dist.ProcessGroup | None) -> None:
    """Barrier of all ranks, without a wait for their devices.

    Args:
        group: a gloo group; `None` in a job of one process.
    """
    if group is not None:
        dist.barrier(group=group)


def at_first_rank(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Gather: the values of all ranks in rank order, on the first rank; an empty list on the others. All ranks of
    `group` call this together.

    Args:
        group: a gloo group with rank 0; `None` in a job of one process.
    """
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else []
    dist.gather_object(value, values or None, 0, group=group)
    return values


def to_each_rank(values: Sequence[T], group: dist.ProcessGroup | None) -> T:
    """Scatter: this rank's item of the first rank's sequence of one item per rank. All ranks of `group` call this
    together; the other ranks' sequences are ignored.

    Args:
        group: a gloo group with rank 0; `None` in a job of one process.
    """
    if group is None:
        return values[0]
    received: list[Any] = [None]
    dist.scatter_object_list(received, list(values) if dist.get_rank(group) == 0 else None, 0, group=group)
    return received[0]


def _allow_connections(plan: ExecutionPlan) -> None:
    """Raise the limit of open files: a gloo group connects each of its ranks with all others.

    Raises:
        PlanError: the system's limit is too low.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    moved = [len({*plan.mesh(source).devices, *plan.mesh(target).devices}) for source, target in plan.reallocations]
    needed = 2 * plan.cluster.size + sum(moved)  # the groups of samples and of control
    if plan.cluster.size > 1 and most != resource.RLIM_INFINITY and needed > most:
        raise PlanError(
            f"a rank of this job has at least {needed} connections over gloo, and the system lets a process open "
            f"{most} files; raise that limit on every host (ulimit -n, LimitNOFILE of the service that starts ranks)."
        )


def make_groups(
    plan: ExecutionPlan, rank: int, timeout: timedelta
) -> tuple[dict[DeviceMesh, MeshGroup], dist.ProcessGroup | None]:
    """(groups, control): a group for every mesh of the plan and for this rank alone, and a gloo group over all ranks
    for samples, which are in host memory. `control` is `None` in a job of one process. All ranks call this together.

    Args:
        timeout: timeout of collectives and messages of tensors (the config's `ddp_timeout`).
    """
    _allow_connections(plan)
    alone = DeviceMesh(rank, 1)
    plan_meshes = sorted({assignment.mesh for assignment in plan.assignments.values()})
    meshes = sorted({*plan_meshes, alone})
    if not dist.is_initialized():
        return {mesh: MeshGroup(tuple(mesh.devices), rank) for mesh in meshes}, None
    device, groups = group_device(), dict[DeviceMesh, MeshGroup]()
    control = new_group(backend="gloo", timeout=max(timeout, LONGEST_CALL))
    for mesh in meshes:
        ranks, group, agree = tuple(mesh.devices), None, None
        if mesh.size > 1:
            group = new_group(list(ranks), timeout=timeout)
            agree = _agreement(control, ranks, rank, MEETING_TAG + plan_meshes.index(mesh))
        groups[mesh] = MeshGroup(ranks, rank, group, device, agree)
    if any(a.strategy.zero_stage and rank in a.mesh for a in plan.assignments.values()):
        # DeepSpeed calls collectives even on a single rank. Only this rank takes part in making the group.
        group = new_group([rank], timeout=timeout, use_local_synchronization=True)
        groups[alone] = MeshGroup((rank,), rank, group, device)
    return groups, control


def _agreement(control: dist.ProcessGroup | None, ranks: tuple[int, ...], rank: int, tag: int) -> Callable[[int], int]:
    """`MeshGroup.agree` of a mesh, by messages under this tag."""
    messages = GlooMessages(control)

    def agree(number: int) -> int:
        largest: int = all_reduce(messages, ranks, rank, number, max, tag)
        messages.flush()
        return largest

    return agree


def make_split_groups(
    plan: ExecutionPlan, rank: int, timeout: timedelta
) -> dict[tuple[DeviceMesh, int, int], SplitGroups]:
    """This rank's tensor, pipeline and data groups for the engine `megatron`, by (mesh, tp, pp). All ranks call this
    together."""
    split_groups: dict[tuple[DeviceMesh, int, int], SplitGroups] = {}
    splits = {(a.mesh, a.strategy.tp, a.strategy.pp) for a in plan.assignments.values() if a.engine == "megatron"}
    for mesh, tp, pp in sorted(splits):
        rank_groups: dict[str, MeshGroup] = {}
        for kind, members in _all_groups(tuple(mesh.devices), tp, pp):
            group = None
            if dist.is_initialized() and len(members) > 1:
                group = new_group(list(members), timeout=timeout)
            # a pipeline's middle stages need the group of its ends too, although they are not in it
            if rank in members or (kind == "ends" and rank in mesh and set(members) <= set(rank_groups["pp"].ranks)):
                rank_groups[kind] = MeshGroup(members, rank, group, group_device())
        if rank in mesh:
            split_groups[mesh, tp, pp] = SplitGroups(**rank_groups)
    return split_groups


def _all_groups(ranks: tuple[int, ...], tp: int, pp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(kind, ranks) of every group of a mesh, in the same order on every rank."""
    yield "mesh", ranks
    for kind, groups in split_ranks(ranks, tp, pp).items():
        for members in groups:
            yield kind, members


@dataclass(frozen=True)
class ReallocationGroups:
    """The process groups of a reallocation.

    Args:
        source, target: the call that trains the parameters, and the call that needs them in another layout.
        ranks: ranks of both calls' meshes, ascending.
        control: a gloo group over these ranks for this reallocation alone; `None` in a job of one process.
        tensors: the group that sends parameters; `control` if they are sent from host memory.
        device: device of the messages of `tensors`.
    """

    source: str
    target: str
    ranks: tuple[int, ...]
    control: dist.ProcessGroup | None
    tensors: dist.ProcessGroup | None
    device: torch.device = torch.device("cpu")


def make_reallocation_groups(plan: ExecutionPlan, rank: int, timeout: timedelta) -> dict[str, ReallocationGroups]:
    """The groups of every reallocation of the plan, by target call. They are not shared, because a transfer's messages
    must not mix with another group's collectives. All ranks call this together.

    A call whose engines get merged weights of the training's ranks has groups too, for its `ranks`, which load the
    engines together (`shared_base.needs_reallocation`)."""
    groups, device = {}, group_device()
    for source, target in plan.reallocations:
        ranks = sorted({*plan.mesh(source).devices, *plan.mesh(target).devices})
        # `control` also waits for calls, so its timeout is longer than that of the transfer's messages
        longest = max(timeout, LONGEST_CALL)
        control = new_group(ranks, backend="gloo", timeout=longest) if dist.is_initialized() else None
        tensors = new_group(ranks, timeout=timeout) if is_accelerator(device) else control
        groups[target] = ReallocationGroups(source, target, tuple(ranks), control, tensors, device)
    return groups


def destroy_groups(owners: object) -> None:
    """Destroy process groups that this rank no longer uses. Tensor-parallel groups stay, because DTensor caches the
    device meshes of earlier operations, which refer to their groups by name. A group keeps its connections until
    nothing refers to it.

    Args:
        owners: results of the functions above, in any nesting.
    """
    groups: list[dist.ProcessGroup] = []
    _collect(owners, groups)
    for group in groups:
        with contextlib.suppress(ValueError):  # a script may have destroyed the default group, and so all groups
            dist.destroy_process_group(group)


def _collect(owner: object, groups: list[dist.ProcessGroup]) -> None:
    if isinstance(owner, dist.ProcessGroup):
        if all(owner is not other for other in groups):
            groups.append(owner)
    elif isinstance(owner, Mapping):
        _collect(tuple(owner.values()), groups)
    elif isinstance(owner, tuple):
        for item in owner:
            _collect(item, groups)
    elif isinstance(owner, MeshGroup | SplitGroups | ReallocationGroups):
        _collect(tuple(value for name, value in vars(owner).items() if name != "tp"), groups)
