"""Measures a machine: name of the devices, slowdown of devices that share processors, copies, messages, all-reduces."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ..engines.device import is_accelerator
from ..engines.mesh_group import MeshGroup
from ..plan.cluster import Cluster
from ..planner.cost.hardware import Sharing
from ..planner.cost.profile import Observation
from ..runtime.process_groups import destroy_groups, new_group


SIZES = (1 << 14, 1 << 18, 1 << 22, 1 << 24)  # bytes of a message
WORK_S = 0.1  # seconds of arithmetic in one measurement of shared processors
REPEATS = 5
LINK_S = 1.0  # a message that takes longer is sent twice instead of REPEATS times


def hardware(device: torch.device) -> str:
    """The name of a device's hardware. Devices with the same name are taken to be equally fast."""
    if is_accelerator(device):
        return str(torch.get_device_module(device).get_device_name(device))
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    return f"{name}, {cores} core{'s'[: cores > 1]}, {threads} thread{'s'[: threads > 1]} a device"


def sharing(
    make: Callable[[], Callable[[], None]], cluster: Cluster, rank: int, device: torch.device
) -> Sharing | None:
    """Measures the slowdown of a node's devices that compute at the same time, such as CPU ranks that share cores and
    memory bandwidth. `None` for accelerators and for one device per node. All ranks call this together.

    It measures processor time, which grows with shared caches and memory bandwidth and does not depend on other
    programs on the node. If ranks outnumber cores, the factor of taking turns is included.

    Args:
        make: function that returns a function with a computation like the job's.
    """
    per_node = cluster.devices_per_node
    if is_accelerator(device) or per_node == 1:
        return None
    work = make()
    counts = [1, *(n for n in (1 << power for power in range(1, per_node.bit_length())) if n < per_node), per_node]
    once = min(_timed(work, clock=time.process_time) for _ in range(2))
    repeats = int(_largest(max(1, round(WORK_S / max(1e-4, once)))))
    best = dict.fromkeys(counts, math.inf)
    for _ in range(REPEATS):
        for count in counts:
            dist.barrier()
            seconds = 0.0
            if rank % per_node < count:
                seconds = _timed(lambda: [work() for _ in range(repeats)], clock=time.process_time)
            best[count] = min(best[count], _largest(seconds))
    turns = Sharing.of(_ranks_at_once())
    slower = tuple((count, turns.slowdown(count) * max(1.0, best[count] / best[1])) for count in counts[1:])
    return Sharing(slower)


def shared_cores(cluster: Cluster, device: torch.device) -> Sharing | None:
    """Slowdown of a node's CPU ranks, computed from the number of cores without measuring; `None` if there is none."""
    if is_accelerator(device) or cluster.devices_per_node == 1:
        return None
    ranks_at_once = _ranks_at_once()
    return Sharing.of(ranks_at_once) if ranks_at_once < cluster.devices_per_node else None


def _ranks_at_once() -> float:
    """Number of CPU ranks that compute at the same time without taking turns."""
    return len(os.sched_getaffinity(0)) / torch.get_num_threads()


def copies(device: torch.device) -> list[Observation]:
    """Times of copies from host memory to the device, or within host memory on a CPU."""
    observations = []
    for size in SIZES:
        host = torch.zeros(size, dtype=torch.uint8)
        host = host.pin_memory() if is_accelerator(device) else host
        target = torch.zeros(size, dtype=torch.uint8, device=device)
        times = [_timed(partial(target.copy_, host), device) for _ in range(REPEATS + 1)]
        observations.append(Observation("copy", "", statistics.median(times[1:]), 1, bytes=float(size)))
    return observations


def links(cluster: Cluster, device: torch.device) -> list[Observation]:
    """Times of messages and all-reduces of several sizes inside a node, and between nodes if there are several. All
    ranks call this together."""
    rank, per_node = dist.get_rank() if dist.is_initialized() else 0, cluster.devices_per_node
    observations: list[Observation] = []
    if per_node > 1:
        node = rank // per_node
        nodes = [tuple(range(n * per_node, (n + 1) * per_node)) for n in range(cluster.nodes)]
        groups = [new_group(list(ranks)) for ranks in nodes]
        peer = rank % per_node ^ 1
        mesh = MeshGroup(nodes[node], rank, groups[node], device)
        observations += _link(mesh, peer if peer < per_node else None, far=False)
        destroy_groups(tuple(groups))
    if cluster.nodes > 1:
        node = rank // per_node ^ 1  # pairs of nodes; a device's peer has the same place in the other node
        peer = node * per_node + rank % per_node
        mesh = MeshGroup(tuple(range(cluster.size)), rank, None, device)
        observations += _link(mesh, peer if node < cluster.nodes else None, far=True)
    return observations


def _link(mesh: MeshGroup, peer: int | None, *, far: bool) -> list[Observation]:
    """`peer`: index in the mesh of the rank with which this one exchanges messages; `None` without one."""
    exchange = mesh.send if peer is not None and mesh.index < peer else mesh.receive
    observations = []
    for size in SIZES:
        payload = torch.zeros(size, dtype=torch.uint8, device=mesh.device)

        def reduce(payload: torch.Tensor = payload) -> None:
            dist.all_reduce(payload.view(torch.float32), group=mesh.group)

        def send(payload: torch.Tensor = payload) -> None:
            if peer is not None:
                exchange(payload, peer)

        for work, act in (("all_reduce", reduce), ("send", send)):
            times: list[float] = []
            while len(times) <= REPEATS:
                dist.barrier()
                # the receiver's time counts: a sender is done as soon as the system has buffered the message
                times.append(_largest(_timed(act, mesh.device), mesh.device))
                if len(times) > 1 and sum(times) > LINK_S:
                    break
            seconds = statistics.median(times[1:])  # the first makes connections
            observations.append(Observation(work, "", seconds, mesh.size, bytes=float(size), far=far))
    return observations


def _timed(
    act: Callable[[], object], device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of `act`; on an accelerator until the device has finished."""
    start = clock()
    act()
    if device is not None and is_accelerator(device):
        torch.accelerator.synchronize(device)
    return clock() - start


def _largest(value: float, device: torch.device | None = None) -> float:
    """The largest value of all ranks."""
    largest = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
