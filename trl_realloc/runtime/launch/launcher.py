"""What a launcher was asked for: refused where the trainer cannot do it, and compared with what runs.

Which processes are on which host is in `hosts`; what a launcher says about placement, in `plugin`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from ...plan.dataflow import CallKind
from ...plan.execution_plan import ExecutionPlan
from .hosts import Process, ranks_by_host


class LaunchError(ValueError):
    """The launcher's configuration asks for what this trainer cannot do. The message says what to use in its place."""


_SHARDS = (
    "the execution plan says how models are sharded: launch with distributed_type MULTI_GPU and a plan with "
    "zero_stage 3 or engine megatron, or with a DeepSpeed config"
)


def check_launch(args: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse, before a process group is made, what Accelerate's launcher and `TrainingArguments` can ask for and no
    engine here does.

    Raises:
        LaunchError: all of it.
    """
    problems = list(_unable(args, environment))
    if problems:
        raise LaunchError("\n".join(problems))


def _unable(args: Any, environment: Mapping[str, str]) -> Iterator[str]:
    def is_on(name: str) -> bool:
        return environment.get(name, "").lower() in ("1", "true", "yes", "on")

    if is_on("ACCELERATE_USE_FSDP") or getattr(args, "fsdp", None):
        yield f"FSDP is asked for, and {_SHARDS}."
    if is_on("ACCELERATE_USE_MEGATRON_LM"):
        yield f"Accelerate's Megatron-LM plugin is asked for, and {_SHARDS}."
    if is_on("ACCELERATE_USE_PARALLELISM_CONFIG") or getattr(args, "parallelism_config", None):
        yield f"Accelerate's parallelism_config is asked for, and {_SHARDS}."
    if environment.get("ACCELERATE_MIXED_PRECISION") == "fp8":
        yield "mixed_precision fp8 is asked for, and no engine here trains in it; use bf16, fp16 or no."


def separate_attempts(environment: Mapping[str, str] = os.environ) -> None:
    """Give a job that `torchrun --max-restarts` has started again a part of its key-value store of its own; before a
    process group is made.

    The store belongs to torchrun and keeps what the ended processes wrote. Torch 2.13 takes that for the new processes'
    own words: gloo then connects to addresses at which nobody listens any more.
    """
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
        return
    # the module; under this name `torch.distributed` has a function
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    connect = rendezvous._create_c10d_store
    if getattr(connect, "attempt", None) is not None:
        return

    def connect_to_part(*args: Any, **kwargs: Any) -> dist.Store:
        return dist.PrefixStore(f"attempt_{attempt}", connect(*args, **kwargs))

    connect_to_part.attempt = attempt  # type: ignore[attr-defined]
    rendezvous._create_c10d_store = connect_to_part


def check_device(device: torch.device) -> None:
    """Raises:
    LaunchError: the job's device is neither a CUDA GPU (or ROCm's, which torch calls the same) nor the CPU.
    """
    if device.type not in ("cpu", "cuda"):
        raise LaunchError(
            f"the job's device is {device}, and the engines run on CUDA GPUs and on the CPU; for the CPU set "
            f"use_cpu=True."
        )


def requested_processes(
    environment: Mapping[str, str] = os.environ, launcher: Sequence[str] | None = None
) -> tuple[int, str]:
    """The most processes that a launcher was asked for, and which of its words says so.

    Args:
        launcher: the command line of the process that started this one; by default read from the system.
    """
    found = [(1, "")]
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        found += (
            [(int(environment[name]), f"{name}={environment[name]}")] if environment.get(name, "").isdigit() else []
        )
    words = list(_parent() if launcher is None else launcher)
    if any("accelerate" in word for word in words[:4]):
        for at, word in enumerate(words):
            name, _, value = word.partition("=")
            if name.replace("-", "_") == "__num_processes":
                value = value or (words[at + 1] if at + 1 < len(words) else "")
                found += [(int(value), f"accelerate launch --num_processes {value}")] if value.isdigit() else []
                break  # what follows may be the script's own
    return max(found, key=lambda each: each[0])


def _parent() -> list[str]:
    try:
        return Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def launch_summary(
    processes: Sequence[Process], plan: ExecutionPlan, asked: tuple[int, str], compiler: str = "no"
) -> Iterator[str]:
    """Sentences for a person who has just started a job: how many processes on how many hosts, under which plan, and
    what differs from what the launcher was asked for.

    Args:
        compiler: the backend of torch.compile that the launcher or `torch_compile` asks for.
    """
    hosts = ranks_by_host(processes)
    names = [processes[ranks[0]].host for ranks in hosts]
    shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    where = f"{len(hosts)} hosts ({shown}), {len(hosts[0])} on each" if len(hosts) > 1 else f"1 host ({shown})"
    count = f"{len(processes)} process{'es' if len(processes) > 1 else ''}"
    engines = dict.fromkeys(plan[call].engine for call in plan.graph.calls_of(CallKind.GENERATE))
    yield (
        f"trl_realloc: {count} on {where}; plan {plan.name or 'without a name'}; generation by "
        f"{' and '.join(engines) or 'none'}."
    )
    number, words = asked
    if number > len(processes):
        way = "give accelerate launch --multi_gpu as well, or a config file with distributed_type: MULTI_GPU"
        if "accelerate" not in words:
            way = "start the processes with torchrun or accelerate launch"
        runs = "1 process runs" if len(processes) == 1 else f"{len(processes)} processes run"
        yield f"trl_realloc: {number} processes were asked for ({words}), but {runs} in this job; {way}."
    elif len(hosts) == 1 and (gpus := processes[0].gpus) > len(processes):
        yield (
            f"trl_realloc: this process sees {gpus} GPUs and the job uses {len(processes)}; for all of them start "
            f"{gpus} processes (accelerate launch --multi_gpu --num_processes {gpus})."
        )
    if compiler.lower() not in ("no", ""):
        yield f"trl_realloc: torch.compile ({compiler.lower()}) is asked for and not used: ragged batches change shape."


def announce(processes: Sequence[Process], plan: ExecutionPlan, rank: int) -> None:
    """Print `launch_summary` once, on rank 0."""
    if rank != 0:
        return
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for line in launch_summary(
        processes, plan, requested_processes(), os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    ):
        console.print(line)
