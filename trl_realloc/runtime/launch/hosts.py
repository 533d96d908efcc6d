"""Hosts of a job's processes, and the cluster that they form.

Processes exchange their hosts through the job's key-value store, because collectives between hosts may not work yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...common.errors import PlanError
from ...plan.assignment import Assignment
from ...plan.cluster import Cluster
from ...plan.dataflow import CallKind
from ...plan.execution_plan import ExecutionPlan
from .network_interfaces import VARIABLE, NetworkError, gloo_address, is_loopback


REACH_S = 15.0  # time limit of a connection between two hosts
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# the result of the first call of `all_processes`, and the store, whose server ends when the object is deleted
_met: list[tuple[tuple[Process, ...], Any]] = []


@dataclass(frozen=True)
class Process:
    """One process of the job, and its place.

    Args:
        machine: the boot id, which identifies the machine independently of its hostname.
        local_rank: the launcher's local rank; negative without one.
        gpu: index of its GPU among its visible GPUs; `None` on a CPU.
        gpus: number of visible GPUs.
        address, port: address of its listener while connections between hosts are tested.
    """

    host: str
    machine: str = ""
    local_rank: int = -1
    gpu: int | None = None
    gpus: int = 0
    address: str = "127.0.0.1"
    port: int = 0


def all_processes() -> tuple[Process, ...]:
    """Every process of the job, by rank. All ranks call this together. Later calls return the first call's result.

    It needs no process group, so that hosts which cannot reach each other end with a message and not with a group's
    timeout.

    Raises:
        NetworkError: a host cannot reach another. Raised on all ranks.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", -1))
    gpus = torch.accelerator.device_count()
    place: dict[str, Any] = {
        "host": socket.gethostname(),
        "machine": machine_id(),
        "local_rank": local_rank,
        "gpu": max(local_rank, 0) % gpus if gpus else None,  # Accelerate's assignment
        "gpus": gpus,
    }
    if dist.is_initialized():
        store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    elif has_rendezvous():
        # the key-value store that the process group will use too: torch shares one server in a process
        store, rank, size = next(dist.rendezvous("env://"))
    else:
        return (Process(**place),)
    if not _met:
        _met.append((_all_processes(dist.PrefixStore("trl_realloc/hosts", store), rank, size, place), store))
    return _met[0][0]


def machine_id() -> str:
    """The boot id, which differs between machines with the same hostname; empty if the system has none."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""


def has_rendezvous() -> bool:
    """True if the launcher's environment variables define a rendezvous of several processes."""
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(os.environ.get(name) for name in variables) and os.environ["WORLD_SIZE"] != "1"


def _all_processes(store: dist.Store, rank: int, size: int, place: dict[str, Any]) -> tuple[Process, ...]:
    with contextlib.ExitStack() as servers:
        problem = ""
        try:
            address = gloo_address()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = servers.enter_context(socket.create_server((address, 0), family=family))
            place |= {"address": address, "port": server.getsockname()[1]}
        except (NetworkError, OSError) as error:
            problem = str(error)
        # a rank with a problem reports it before it fails, because the others wait for it
        problems, places = zip(*_exchange(store, "place", rank, range(size), (problem, place)), strict=True)
        _refuse(store, rank, size, problems)
        processes = tuple(Process(**fields) for fields in places)
        firsts = [ranks[0] for ranks in ranks_by_host(processes)]
        if len(firsts) > 1:
            _refuse(store, rank, size, [on_loopback(processes[first]) for first in firsts])
            # in a ring: each host's first process connects to the next host's
            if rank in firsts:
                problem = _test_connection(processes[rank], processes[firsts[(firsts.index(rank) + 1) % len(firsts)]])
            _refuse(store, rank, size, _exchange(store, "problem", rank, firsts, problem))
    return processes


def _refuse(store: dist.Store, rank: int, size: int, problems: Iterable[str]) -> None:
    """Raise `NetworkError` with the problems on every rank, if there are any."""
    unique = list(dict.fromkeys(filter(None, problems)))
    if not unique:
        return
    read, deadline = store.add("read", 1), time.monotonic() + REACH_S
    while rank == 0 and read < size and time.monotonic() < deadline:  # the store's server may be in this process
        time.sleep(0.05)
        read = store.add("read", 0)
    raise NetworkError("\n".join(unique))


def on_loopback(process: Process) -> str:
    """A sentence if the process listens on loopback, which no other host can reach; else an empty string."""
    if not is_loopback(process.address):
        return ""
    return (
        f"gloo listens at {process.address} on {process.host}, which no other host can reach; set {VARIABLE} to the "
        f"interface of the network between the hosts, on each of them."
    )


def _exchange(store: dist.Store, key: str, rank: int, senders: Sequence[int], value: object) -> list[Any]:
    """The senders' values, on every rank. Rank 0 collects them, so that each rank reads a single message."""
    if rank in senders:
        store.set(f"{key}/{rank}", json.dumps(value))
    if rank == 0:
        store.set(key, json.dumps([json.loads(store.get(f"{key}/{sender}")) for sender in senders]))
    collected: list[Any] = json.loads(store.get(key))
    return collected


def _test_connection(here: Process, there: Process) -> str:
    """Connect to another process as gloo would. Returns an error message, or an empty string."""
    try:
        with socket.create_connection((there.address, there.port), REACH_S, source_address=(here.address, 0)):
            return ""
    except OSError as error:
        return (
            f"{here.host} ({here.address}) cannot reach {there.host} at {there.address}, where gloo listens there "
            f"({error}); set {VARIABLE} to the interface of the network between the hosts, on each of them, and let "
            f"no firewall close its ports to them."
        )


def without_gpus(processes: Iterable[Process]) -> tuple[Process, ...]:
    """The same processes without their GPUs, for a job that runs on CPUs."""
    return tuple(replace(process, gpu=None, gpus=0) for process in processes)


def ranks_by_host(processes: Sequence[Process]) -> list[list[int]]:
    """The ranks of every host, in the order of their first ranks.

    A host is a machine with one hostname. A local rank that occurs twice on it means several hosts (containers with the
    machine's hostname).
    """
    hosts: dict[tuple[str, str, int], list[int]] = {}
    seen: Counter[tuple[str, str, int]] = Counter()
    for rank, process in enumerate(processes):
        turn = seen[process.host, process.machine, process.local_rank] if process.local_rank >= 0 else 0
        seen[process.host, process.machine, process.local_rank] += 1
        hosts.setdefault((process.host, process.machine, turn), []).append(rank)
    return list(hosts.values())


def cluster_of(processes: Sequence[Process]) -> Cluster:
    """The cluster whose nodes are the job's hosts.

    Raises:
        PlanError: hosts with different numbers of processes, or ranks that are not numbered host by host.
    """
    hosts = ranks_by_host(processes)
    names = [processes[ranks[0]].host for ranks in hosts]
    counts = ", ".join(f"{len(ranks)} on {name}" for name, ranks in zip(names, hosts, strict=True))
    if len({len(ranks) for ranks in hosts}) > 1:
        raise PlanError(
            f"the job's processes are dealt to its hosts unevenly ({counts}), and a plan has nodes of one size; start "
            f"equally many on each host."
        )
    mixed = next((ranks for ranks in hosts if ranks[-1] - ranks[0] != len(ranks) - 1), None)
    if mixed is not None:
        ranks = ", ".join(map(str, mixed[:4])) + (", …" if len(mixed) > 4 else "")
        raise PlanError(
            f"host {processes[mixed[0]].host} has the ranks {ranks}, and a plan numbers devices host by host; start "
            f"with consecutive ranks on each host (srun --distribution=block, mpirun --map-by slot)."
        )
    return Cluster(nodes=len(hosts), devices_per_node=len(hosts[0]))


def check_gpus(processes: Sequence[Process], plan: ExecutionPlan) -> None:
    """Check that each process that starts a vLLM engine sees all of the engine's GPUs.

    Raises:
        PlanError: a process does not see them.
    """
    for call in plan.graph.calls_of(CallKind.GENERATE):
        _check_gpus(processes, call, plan[call])


def _check_gpus(processes: Sequence[Process], call: str, generate: Assignment) -> None:
    tp = generate.strategy.tp
    if generate.engine != "vllm" or tp == 1:
        return
    for rank in generate.mesh.devices[::tp]:
        process = processes[rank]
        if process.gpu is not None and process.gpu + tp > process.gpus:
            raise PlanError(
                f"{call}: a vLLM engine with tp {tp} uses the GPUs of {tp} processes, but rank {rank} on "
                f"{process.host} sees {process.gpus} and its own is number {process.gpu}; let every process see all "
                f"GPUs of its host (Slurm: --gpus-per-node, not --gpus-per-task), or use tp: 1."
            )
