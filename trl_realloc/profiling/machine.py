"""A machine by itself: what a device is in words, how devices disturb each other, what messages between them take."""

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

from ..plan.cluster import Cluster
from ..planner.hardware import Sharing
from ..planner.profile import Observation


SIZES = (1 << 14, 1 << 18, 1 << 22, 1 << 24)  # bytes of a message
WORK_S = 0.1  # of arithmetic, to see whether others disturb it
REPEATS = 5
LINK_S = 1.0  # a message that takes longer is sent twice and not REPEATS times


def hardware(device: torch.device) -> str:
    """A device in words; two that read alike are taken for alike."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads a device"


def sharing(
    make: Callable[[], Callable[[], None]], cluster: Cluster, rank: int, device: torch.device
) -> Sharing | None:
    """How the devices of a node slow each other down that compute at once: on CPUs, where they share cores and the way
    to memory. `None` where each has its own. All ranks call this together.

    Args:
        make: makes some arithmetic like the job's.
    """
    per_node = cluster.devices_per_node
    if device.type == "cuda" or per_node == 1:
        return None
    work = make()
    counts = [1, *(n for n in (1 << at for at in range(1, per_node.bit_length())) if n < per_node), per_node]
    times = _largest(max(1, round(WORK_S / max(1e-4, min(_taken(work) for _ in range(2))))))
    best = dict.fromkeys(counts, math.inf)
    for _ in range(REPEATS):
        for count in counts:
            dist.barrier()
            own = 0.0
            if rank % per_node < count:
                own = _taken(lambda: [work() for _ in range(int(times))])
            best[count] = min(best[count], _largest(own))
    slower = tuple((count, max(1.0, best[count] / best[1])) for count in counts[1:])
    return Sharing(slower)


def copies(device: torch.device) -> list[Observation]:
    """What parameters take from host memory to the device; on a CPU, from one place to another."""
    found = []
    for size in SIZES:
        host = torch.zeros(size, dtype=torch.uint8)
        host = host.pin_memory() if device.type == "cuda" else host
        place = torch.zeros(size, dtype=torch.uint8, device=device)
        taken = [_taken(partial(place.copy_, host), device) for _ in range(REPEATS + 1)]
        found.append(Observation("copy", "", statistics.median(taken[1:]), 1, bytes=float(size)))
    return found


def links(cluster: Cluster, device: torch.device) -> list[Observation]:
    """What messages and all-reduces of several sizes take: inside a node, and between nodes where there are several.
    All ranks call this together."""
    rank, per_node = dist.get_rank() if dist.is_initialized() else 0, cluster.devices_per_node
    found: list[Observation] = []
    if per_node > 1:
        node = rank // per_node
        groups = [dist.new_group(list(range(at * per_node, (at + 1) * per_node))) for at in range(cluster.nodes)]
        peer = rank - rank % per_node + (rank % per_node ^ 1)
        found += _link(groups[node], per_node, rank, peer if peer < (node + 1) * per_node else None, device, far=False)
    if cluster.nodes > 1:
        node = rank // per_node ^ 1  # nodes in pairs, each device with its like
        peer = node * per_node + rank % per_node
        found += _link(None, cluster.size, rank, peer if node < cluster.nodes else None, device, far=True)
    return found


def _link(
    group: dist.ProcessGroup | None, devices: int, rank: int, peer: int | None, device: torch.device, *, far: bool
) -> list[Observation]:
    found = []
    for size in SIZES:
        payload = torch.zeros(size, dtype=torch.uint8, device=device)

        def reduce(payload: torch.Tensor = payload) -> None:
            dist.all_reduce(payload.view(torch.float32), group=group)

        def send(payload: torch.Tensor = payload) -> None:
            if peer is not None:
                (dist.send if rank < peer else dist.recv)(payload, peer)

        for work, act in (("all_reduce", reduce), ("send", send)):
            taken: list[float] = []
            while len(taken) <= REPEATS:
                dist.barrier()
                # until the receiver has it, for the sender is done when the system has buffered it
                taken.append(_largest(_taken(act, device), device))
                if len(taken) > 1 and sum(taken) > LINK_S:
                    break
            seconds = statistics.median(taken[1:])  # the first makes connections
            found.append(Observation(work, "", seconds, devices, bytes=float(size), far=far))
    return found


def _taken(act: Callable[[], object], device: torch.device | None = None) -> float:
    begun = time.perf_counter()
    act()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _largest(value: float, device: torch.device | None = None) -> float:
    """Of all ranks."""
    word = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return float(word)
