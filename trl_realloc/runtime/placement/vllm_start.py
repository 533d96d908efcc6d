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
    """The engine that this rank owns; its process starts in the background. `None` on a rank whose tensor group's first
    rank owns the engine.

    Args:
        config: the Transformers config of the call's role.
        stack: closed to end the engine and remove its files.
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
    # on a GPU vLLM compiles the model, and looks by the model's path for what it has compiled before
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
    """A copy of a model's folder in the cache folder (`common.files`), which every run with the same files finds
    under the same path. The folder itself where no copy can be kept.

    Args:
        folder: with the model's config, and no weights.
    """
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode() + file.read_bytes())
    kept = cache_folder() / "vllm" / digest.hexdigest()[:16]
    if kept.is_dir():
        return kept
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as unfinished:
            made = Path(shutil.copytree(folder, Path(unfinished, kept.name)))
            made.rename(kept)
    except OSError:  # no place, or another rank was first
        return kept if kept.is_dir() else folder
    return kept


def _dtype_name(config: PretrainedConfig, options: EngineOptions) -> str:
    """The name of the dtype that the role computes in while it trains, so that its log-probabilities agree there and in
    the engine."""
    dtype = options.compute_dtype or getattr(config, "dtype", None) or torch.float32
    return str(dtype).removeprefix("torch.")


def _devices(plan: ExecutionPlan, assignment: Assignment, rank: int, device: torch.device) -> dict[str, Any]:
    """The GPUs or the CPU cores of the engine that this rank owns: those of its tensor group."""
    per_node, tp = plan.cluster.devices_per_node, assignment.strategy.tp
    if is_accelerator(
        device
    ):  # a CUDA GPU (`trainer.run.plan_request`), numbered among the GPUs that this process sees
        first = device.index or 0
        return {"cuda_devices": list(range(first, first + tp))}
    local = [(rank + i) % per_node for i in range(tp)]
    cores = sorted(os.sched_getaffinity(0))
    per_rank = max(1, len(cores) // per_node)
    return {"cpu_cores": [cores[(at * per_rank + i) % len(cores)] for at in local for i in range(per_rank)]}
