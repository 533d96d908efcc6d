"""Checks of the launcher's settings: requests that no engine supports are refused, and the requested number of
processes is compared with the running one.

The Accelerate plugin for plans is in `trainer/accelerate_plugin`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate import PartialState
from rich.console import Console

from ...engines.torch_compat import wrap_store
from ...plan.dataflow import CallKind
from ...plan.execution_plan import ExecutionPlan
from .hosts import Process, ranks_by_host


if TYPE_CHECKING:
    from transformers import TrainingArguments


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # hardware queues for the streams of a process
MAX_CONNECTIONS, ENOUGH_CONNECTIONS = 32, 16


class LaunchError(ValueError):
    """The launcher's configuration requests an unsupported feature. The message names an alternative."""


_SHARDS = (
    "the execution plan sets how models are sharded: launch with distributed_type MULTI_GPU and a plan with "
    "zero_stage 3 or engine megatron, or with a DeepSpeed config"
)


def check_launch(
    args: TrainingArguments, environment: Mapping[str, str] = os.environ, *, allows_fsdp: bool = False
) -> None:
    """Refuse requests of Accelerate's launcher and of `TrainingArguments` that no engine supports. Called before a
    process group is made.

    Args:
        allows_fsdp: the run can be trained by Accelerate.

    Raises:
        LaunchError: there are such requests. The message has a sentence for each.
    """
    problems = list(_problems(args, environment, allows_fsdp))
    if problems:
        raise LaunchError("\n".join(problems))


def _problems(args: TrainingArguments, environment: Mapping[str, str], allows_fsdp: bool) -> Iterator[str]:
    def is_on(name: str) -> bool:
        return environment.get(name, "").lower() in ("1", "true", "yes", "on")

    if not allows_fsdp and (is_on("ACCELERATE_USE_FSDP") or getattr(args, "fsdp", None)):
        yield f"FSDP is asked for, and {_SHARDS}."
    if is_on("ACCELERATE_USE_MEGATRON_LM"):
        yield f"Accelerate's Megatron-LM plugin is asked for, and {_SHARDS}."
    if is_on("ACCELERATE_USE_PARALLELISM_CONFIG") or getattr(args, "parallelism_config", None):
        yield f"Accelerate's parallelism_config is asked for, and {_SHARDS}."
    if is_on("ACCELERATE_USE_SAGEMAKER") and environment.get("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", "NO") != "NO":
        yield (
            "SageMaker's own data parallelism is asked for, whose process groups no engine uses; set distributed_type "
            "NO in the Accelerate config and start the ranks with torchrun."
        )
    if environment.get("PJRT_DEVICE", "").upper() == "TPU" or getattr(args, "tpu_num_cores", None):
        yield "a TPU is asked for, and the engines run on CUDA GPUs and on the CPU; for the CPU set use_cpu=True."
    if environment.get("ACCELERATE_MIXED_PRECISION") == "fp8":
        yield "mixed_precision fp8 is asked for, and no engine here trains in it; use bf16, fp16 or no."


def separate_attempts(environment: Mapping[str, str] = os.environ) -> None:
    """Give a job that `torchrun --max-restarts` has restarted a separate prefix in the key-value store. Called before a
    process group is made.

    The store belongs to torchrun and keeps the entries of the ended processes. Torch 2.13 takes them for entries of the
    new processes: gloo then connects to addresses without a listener.
    """
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
        return
    wrap_store(lambda store: dist.PrefixStore(f"attempt_{attempt}", store), "trl_realloc_attempt")


def wait_on_own_device(environment: Mapping[str, str] = os.environ) -> None:
    """Make Accelerate's `wait_for_everyone` wait on this process's device if its local rank is not the index of a
    visible GPU, such as under Slurm with one visible GPU per process. Accelerate takes the local rank for the index."""
    if not torch.accelerator.device_count() or int(environment.get("LOCAL_RANK", 0)) < torch.accelerator.device_count():
        return

    def wait_for_everyone(self: PartialState) -> None:
        if self.num_processes > 1:
            dist.barrier()

    PartialState.wait_for_everyone = wait_for_everyone


def connect_streams(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let CUDA give each stream of this process a separate hardware queue, unless the user has set their number. CUDA
    reads the variable at its start. The default is eight queues. A stage of fused pipelines has streams for computing,
    copies and collectives and one for each neighbour's messages; in a shared queue, kernels wait for messages."""
    if torch.version.cuda is not None and not torch.cuda.is_initialized():
        environment.setdefault(CONNECTIONS, str(MAX_CONNECTIONS))


def too_few_connections(environment: Mapping[str, str] = os.environ) -> str | None:
    """A warning for fused pipelines on CUDA if streams share hardware queues; `None` if there are enough."""
    value = environment.get(CONNECTIONS, "")
    count = int(value) if value.isdigit() else 8  # CUDA's default
    if count >= ENOUGH_CONNECTIONS:
        return None
    return (
        f"fused pipelines: {CONNECTIONS} is {value or 'not set'}, so CUDA has {count} queues for the streams of a "
        f"process, and a stage's computation may wait for a message that it does not need; set it to "
        f"{MAX_CONNECTIONS} before the script uses CUDA."
    )


def check_device(device: torch.device) -> None:
    """Raise `LaunchError` if no engine runs on the job's device. Engines run on the CPU, on CUDA GPUs (including ROCm)
    and on any PyTorch accelerator with a process-group backend."""
    accelerator = torch.accelerator.current_accelerator()
    is_current = accelerator is not None and accelerator.type == device.type
    backend = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    if device.type not in ("cpu", "cuda") and not (is_current and backend != "gloo"):
        raise LaunchError(
            f"the job's device is {device}, and the engines run on CUDA GPUs, on the CPU, and on an accelerator for "
            f"which this PyTorch has a process-group backend; for the CPU set use_cpu=True."
        )


def requested_processes(
    environment: Mapping[str, str] = os.environ, launcher: Sequence[str] | None = None
) -> tuple[int, str]:
    """The largest number of processes requested from a launcher, and the variable or argument of the request.

    Args:
        launcher: command line of the parent process; by default read from the system.
    """
    requests = [(1, "")]
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if environment.get(name, "").isdigit():
            requests.append((int(environment[name]), f"{name}={environment[name]}"))
    arguments = list(_parent_command() if launcher is None else launcher)
    if any("accelerate" in argument for argument in arguments[:4]):
        for index, argument in enumerate(arguments):
            name, _, value = argument.partition("=")
            if name.replace("-", "_") == "__num_processes":
                value = value or (arguments[index + 1] if index + 1 < len(arguments) else "")
                if value.isdigit():
                    requests.append((int(value), f"accelerate launch --num_processes {value}"))
                break  # later arguments may be the script's
    return max(requests, key=lambda request: request[0])


def _parent_command() -> list[str]:
    try:
        return Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def launch_summary(
    processes: Sequence[Process],
    plan: ExecutionPlan,
    requested: tuple[int, str],
    compiler: str = "no",
    cores: int | None = None,
) -> Iterator[str]:
    """Sentences about a started job: its processes, hosts and plan, and its differences from the launcher's request.

    Args:
        requested: the result of `requested_processes`.
        compiler: the launcher's backend of torch.compile.
        cores: number of cores that the first process may use; `None` for enough.
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
    number, source = requested
    if number > len(processes):
        remedy = "give accelerate launch --multi_gpu as well, or a config file with distributed_type: MULTI_GPU"
        if "accelerate" not in source:
            remedy = "start the processes with torchrun or accelerate launch"
        runs = "1 process runs" if len(processes) == 1 else f"{len(processes)} processes run"
        yield f"trl_realloc: {number} processes were asked for ({source}), but {runs} in this job; {remedy}."
    elif len(hosts) == 1 and (gpus := processes[0].gpus) > len(processes):
        yield (
            f"trl_realloc: this process sees {gpus} GPUs and the job uses {len(processes)}; for all of them start "
            f"{gpus} processes (accelerate launch --multi_gpu --num_processes {gpus})."
        )
    if processes[0].gpus and cores is not None and cores < len(hosts[0]):
        yield (
            f"trl_realloc: the {len(hosts[0])} processes of a host may use {cores} of its cores, too few for them and "
            f"their engines; under Slurm give srun --cpus-per-task as well as sbatch, or --cpu-bind=none."
        )
    if compiler.lower() not in ("no", ""):
        yield f"trl_realloc: torch.compile ({compiler.lower()}) is asked for and not used: ragged batches change shape."


def announce(processes: Sequence[Process], plan: ExecutionPlan, rank: int) -> None:
    """Print `launch_summary` on rank 0."""
    if rank != 0:
        return
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    compiler, cores = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no"), len(os.sched_getaffinity(0))
    for line in launch_summary(processes, plan, requested_processes(), compiler, cores):
        console.print(line)
