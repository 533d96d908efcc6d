"""`start_vllm`: starts this rank's vLLM engine with the devices, dtype and length limits of the plan.

The engine itself is in `engines/generation/vllm`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...common.files import cache_folder
from ...engines.device import is_accelerator
from ...plan.assignment import Assignment
from ...plan.execution_plan import ExecutionPlan
from ..failures.temporary_folder import temporary_folder
from ..failures.watchdog_client import current_watchdog, watch
from .engine_options import EngineOptions


if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ...engines.generation.vllm import VLLMEngine


def start_vllm(
    plan: ExecutionPlan,
    call: str,
    rank: int,
    config: PretrainedConfig,
    options: EngineOptions,
    stack: contextlib.ExitStack,
) -> VLLMEngine | None:
    """This rank's engine; its process starts in the background. `None` on all ranks of a tensor group but its first.

    Args:
        config: the Transformers config of the call's role.
        stack: its `close` ends the engine and removes its files.
    """
    from ...engines.generation.vllm import VLLMEngine

    assignment = plan[call]
    index, tp = assignment.mesh.index(rank), assignment.strategy.tp
    if index % tp:
        return None
    folder = temporary_folder(stack, current_watchdog() or (watch() if plan.cluster.size == 1 else None))
    config.save_pretrained(folder / "model")
    log = folder / "vllm.log"
    if options.log_folder is not None:
        log = options.log_folder / f"vllm-{plan.graph.call(call).label}rank{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
    settings = {"log_path": log, "stop_timeout_s": options.heartbeat_timeout_s, **options.vllm}
    if assignment.memory_share is not None:
        settings["gpu_memory_utilization"] = assignment.memory_share
    # on a GPU vLLM compiles the model, and caches the result by the model's path
    model = kept_model(folder / "model") if is_accelerator(options.device) else folder / "model"
    engine = VLLMEngine(
        model,
        name=f"{call} engine {index // tp} (rank {rank})",
        tensor_parallel_size=tp,
        dtype=_dtype_name(config, options),
        max_model_len=options.context_length,
        folder=folder,
        sleep_level=2 if assignment.drop else 1 if assignment.offload else 0,
        **_devices(plan, assignment, rank, options.device),
        **settings,
    )
    stack.callback(engine.close)
    return engine


def kept_model(folder: Path) -> Path:
    """A copy of a model's folder in the cache folder, at the same path for every run with the same files. The folder
    itself if no copy can be made.

    Args:
        folder: folder with the model's config and no weights.
    """
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode() + file.read_bytes())
    cached = cache_folder() / "vllm" / digest.hexdigest()[:16]
    if cached.is_dir():
        return cached
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as unfinished:
            copy = Path(shutil.copytree(folder, Path(unfinished, cached.name)))
            copy.rename(cached)
    except OSError:  # no space, or another rank was first
        return cached if cached.is_dir() else folder
    return cached


def _dtype_name(config: PretrainedConfig, options: EngineOptions) -> str:
    """The dtype of the role's training, so that its log-probabilities agree with the engine's."""
    dtype = options.compute_dtype or getattr(config, "dtype", None) or torch.float32
    return str(dtype).removeprefix("torch.")


def _devices(plan: ExecutionPlan, assignment: Assignment, rank: int, device: torch.device) -> dict[str, Any]:
    """The GPUs or the CPU cores of the tensor group of this rank's engine."""
    per_node, tp = plan.cluster.devices_per_node, assignment.strategy.tp
    if is_accelerator(device):  # a CUDA GPU, numbered among the GPUs that this process sees
        first = device.index or 0
        return {"cuda_devices": list(range(first, first + tp))}
    local = [(rank + i) % per_node for i in range(tp)]
    cores = sorted(os.sched_getaffinity(0))
    per_rank = max(1, len(cores) // per_node)
    return {"cpu_cores": [cores[(index * per_rank + i) % len(cores)] for index in local for i in range(per_rank)]}
