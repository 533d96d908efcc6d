"""What DeepSpeed assumes of the whole process or the whole job, set right for an engine on one mesh.

Owns the engine's config, its groups, and the places where DeepSpeed 0.19.8 speaks of the job where a mesh is meant.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..mesh_group import MeshGroup


@dataclass(frozen=True)
class Topology:
    """What DeepSpeed calls an mpu: a data-parallel group over the mesh, each rank its own model-parallel group."""

    group: MeshGroup
    alone: Any

    def get_data_parallel_group(self) -> Any:
        return self.group.group

    def get_data_parallel_rank(self) -> int:
        return self.group.index

    def get_data_parallel_world_size(self) -> int:
        return self.group.size

    def get_model_parallel_group(self) -> Any:
        return self.alone

    get_tensor_model_parallel_group = get_model_parallel_group

    def get_model_parallel_rank(self) -> int:
        return 0

    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_model_parallel_world_size(self) -> int:
        return 1

    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def deepspeed_config(stage: int, given: Mapping[str, Any] | None, max_grad_norm: float, trains: bool) -> dict[str, Any]:
    """The user's DeepSpeed config (that of `accelerate launch`) as this engine runs it: its ZeRO options, offload,
    precision and clipping are kept; batch sizes, optimizer and scheduler are the trainer's.

    Args:
        trains: an engine without an optimizer has none to offload, and DeepSpeed fails where its config says so.
    """
    config = _without_auto(copy.deepcopy(dict(given or {})))
    for key in ("train_batch_size", "optimizer", "scheduler"):
        config.pop(key, None)
    zero = config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
    if not trains:
        zero.pop("offload_optimizer", None)
        # small parameters would be kept whole beside their partitions, and a reallocation fills the partitions
        zero["stage3_param_persistence_threshold"] = 0
    config["train_micro_batch_size_per_gpu"] = config["gradient_accumulation_steps"] = 1
    config.setdefault("gradient_clipping", max(max_grad_norm, 0.0))
    config.setdefault("steps_per_print", 1 << 60)
    # by the norm it sees that gradients are not finite, and leaves the step out
    zero.pop("compute_grad_norm", None)
    config.get("bf16", {}).pop("check_grad_overflow", None)
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    return config


def parameter_dtype(given: Mapping[str, Any] | None) -> torch.dtype | None:
    """What DeepSpeed casts the parameters of every model to by the user's config; `None`: they keep their own."""
    config = _without_auto(dict(given or {}))
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for kind, dtype in kinds.items() if config.get(kind, {}).get("enabled")), None)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a copy of a model that DeepSpeed trains as DeepSpeed casts that model: its parameters, not its buffers. The
    frequencies of a rotary embedding in 16 bits would turn a token at position 2,000 by another angle."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's own default wherever a config for Transformers says "auto"."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto"
    }


@contextlib.contextmanager
def initializing(group: MeshGroup, device: torch.device) -> Iterator[None]:
    """The context in which `deepspeed.initialize` makes an engine on one mesh.

    Making a ZeRO-3 optimizer waits at barriers without a group, that is over the whole job (stage3.py:765, 774, 914):
    on a mesh that is a part of the job they would wait for ranks that never come. Inside, such a barrier is over the
    mesh. A process that no launcher started has no LOCAL_RANK, which DeepSpeed asks for; it is set only inside,
    because Accelerate takes a process that has one for a launched one.
    """
    from deepspeed import comm

    leave_out_shared_memory_op()
    # DeepSpeed 0.19.8 calls two collectives under names that torch 2.13 has renamed, and torch says so each time
    warnings.filterwarnings("ignore", message=r".*(reduce_scatter_tensor|all_gather_into_tensor).* is deprecated")
    _leave_out_job_wide_comparison()
    over_all, linear = comm.barrier, nn.functional.linear

    mesh = group.group

    def barrier(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        return over_all(mesh if group is None else group, *args, **kwargs)

    launched = "LOCAL_RANK" in os.environ
    if not launched:
        os.environ["LOCAL_RANK"] = str(device.index or 0)
    comm.barrier = barrier
    try:
        yield
    finally:
        comm.barrier = over_all
        nn.functional.linear = linear  # stage 3 replaces it for the whole process: `memory_efficient_linear`
        if not launched:
            del os.environ["LOCAL_RANK"]


@contextlib.contextmanager
def memory_efficient_linear(stage: int, config: Mapping[str, Any]) -> Iterator[None]:
    """Inside, `torch.nn.functional.linear` is DeepSpeed's for stage 3, which keeps no gathered weight for the backward.

    DeepSpeed would leave it so for every model of the process. Gradients of a layer's weight and bias then come in
    another order than on ranks without a stage 3 engine, and stage 2 reduces gradients in the order in which they come:
    where only some ranks of its mesh had another engine of stage 3, it added up gradients of different parameters.
    """
    if stage < 3 or not config["zero_optimization"].get("memory_efficient_linear", True):
        yield
        return
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    linear = nn.functional.linear
    nn.functional.linear = zero3_linear_wrap
    try:
        yield
    finally:
        nn.functional.linear = linear


def _leave_out_job_wide_comparison() -> None:
    """DeepSpeed compares the order in which ranks ran a sharded model's modules, once, by broadcasts from rank 0 over
    the whole job: on a mesh that is a part of the job they wait for ranks that never come. Ranks of a mesh run the same
    calls on the same model, so the comparison is left out."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    coordinator.assert_ints_same_as_other_ranks = lambda ints: None


def leave_out_shared_memory_op() -> None:
    """On a CPU DeepSpeed compiles an op for all-reduces in shared memory when it is first used (20 s, minutes on a busy
    machine, without a word; a job killed meanwhile leaves a lock at which every later job waits for ever). Only
    DeepSpeed's inference uses it, and without it gloo's all-reduce. It is not compiled here.

    Before the first use of `deepspeed.comm`: of ours, or of Accelerate's where it launches with a DeepSpeed config.
    """
    try:  # not `from deepspeed.comm import torch`, which is torch itself
        backend = importlib.import_module("deepspeed.comm.torch")
    except ImportError:  # Accelerate says what is missing, where DeepSpeed is asked for
        return
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]


def ensure_process_group(device: torch.device) -> None:
    """DeepSpeed needs a process group even for one process; without a launcher this makes one of this process."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
