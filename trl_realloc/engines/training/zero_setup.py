"""Sets up DeepSpeed 0.19.8 for an engine on one mesh: its config, its process groups, and workarounds where it assumes
that an engine spans the whole process or job.

The engine is in `zero`; models that DeepSpeed partitioned at their creation are in `zero_init`.
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
    """DeepSpeed's `mpu` argument: the mesh is the data-parallel group, and each rank alone is a model-parallel
    group."""

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


def deepspeed_config(
    stage: int, user_config: Mapping[str, Any] | None, max_grad_norm: float, trains: bool
) -> dict[str, Any]:
    """The config of an engine, from the user's DeepSpeed config (that of `accelerate launch`): ZeRO options, offload,
    precision and clipping are the user's; batch sizes, optimizer and scheduler are the trainer's.

    Args:
        user_config: `None` for DeepSpeed's defaults.
        trains: whether the engine has an optimizer. DeepSpeed fails if the config offloads an optimizer that is not
            there.
    """
    config = _without_auto(copy.deepcopy(dict(user_config or {})))
    for key in ("train_batch_size", "optimizer", "scheduler"):
        config.pop(key, None)
    zero = config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
    if not trains:
        zero.pop("offload_optimizer", None)
        # otherwise small parameters would stay full beside their partitions, and a reallocation fills the partitions
        # only
        zero["stage3_param_persistence_threshold"] = 0
    config["train_micro_batch_size_per_gpu"] = config["gradient_accumulation_steps"] = 1
    config.setdefault("gradient_clipping", max(max_grad_norm, 0.0))
    config.setdefault("steps_per_print", 1 << 60)
    # DeepSpeed finds gradients that are not finite by their norm, and then skips the step
    zero.pop("compute_grad_norm", None)
    config.get("bf16", {}).pop("check_grad_overflow", None)
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    return config


def parameter_dtype(user_config: Mapping[str, Any] | None) -> torch.dtype | None:
    """The dtype that DeepSpeed casts every model's parameters to with the user's config; `None` if it casts none."""
    config = _without_auto(dict(user_config or {}))
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for kind, dtype in kinds.items() if config.get(kind, {}).get("enabled")), None)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of a copy of a model that DeepSpeed trains, as DeepSpeed casts that model's. The buffers keep
    their dtype: the frequencies of a rotary embedding in 16 bits would give other angles at position 2,000."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    """The config without the values "auto", which Transformers would fill in; DeepSpeed then uses its defaults."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto"
    }


@contextlib.contextmanager
def initializing(group: MeshGroup, device: torch.device) -> Iterator[None]:
    """The context in which `deepspeed.initialize` creates an engine on one mesh.

    The constructor of a ZeRO-3 optimizer calls barriers without a group, that is over the whole job (stage3.py:765,
    774, 914). If the mesh is only a part of the job, they would wait for ever for the other ranks. Inside, such a
    barrier is over the mesh. DeepSpeed reads LOCAL_RANK, which a process without a launcher does not have. It is set
    inside only, because Accelerate takes a process that has it for a launched one.
    """
    from deepspeed import comm

    leave_out_shared_memory_op()
    # torch 2.13 warns at every call of two collectives that DeepSpeed 0.19.8 calls under their deprecated names
    warnings.filterwarnings("ignore", message=r".*(reduce_scatter_tensor|all_gather_into_tensor).* is deprecated")
    _skip_job_wide_order_check()
    job_barrier, linear = comm.barrier, nn.functional.linear

    mesh = group.group

    def barrier(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        return job_barrier(mesh if group is None else group, *args, **kwargs)

    launched = "LOCAL_RANK" in os.environ
    if not launched:
        os.environ["LOCAL_RANK"] = str(device.index or 0)
    comm.barrier = barrier
    try:
        yield
    finally:
        comm.barrier = job_barrier
        nn.functional.linear = linear  # stage 3 replaces it for the whole process (`memory_efficient_linear`)
        if not launched:
            del os.environ["LOCAL_RANK"]


@contextlib.contextmanager
def memory_efficient_linear(stage: int, config: Mapping[str, Any]) -> Iterator[None]:
    """Inside, `torch.nn.functional.linear` is DeepSpeed's for stage 3, which saves no gathered weight for the backward.

    DeepSpeed itself replaces the function for every model of the process. The gradients of a layer's weight and bias
    then arrive in another order than on ranks without a stage 3 engine. Stage 2 reduces gradients in the order of
    arrival, so an engine of stage 2, of whose ranks only some had an engine of stage 3, added gradients of different
    parameters.
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


def _skip_job_wide_order_check() -> None:
    """Turn off a check of DeepSpeed: that all ranks ran the modules of a sharded model in the same order. It broadcasts
    from rank 0 over the whole job, and would wait for ever if the mesh is only a part of the job. The ranks of a mesh
    run the same calls on the same model, so their order is the same."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    coordinator.assert_ints_same_as_other_ranks = lambda ints: None


def leave_out_shared_memory_op() -> None:
    """Keep DeepSpeed from compiling its op for all-reduces in shared memory on a CPU. Must be called before the first
    use of `deepspeed.comm`, also before Accelerate's in a job launched with a DeepSpeed config.

    The compilation takes 20 s, on a busy machine minutes, without a message; a job that is killed meanwhile leaves a
    lock at which every later job waits for ever. Only DeepSpeed's inference uses the op, and falls back to gloo without
    it.
    """
    try:  # `from deepspeed.comm import torch` would give torch itself
        backend = importlib.import_module("deepspeed.comm.torch")
    except ImportError:  # not installed; Accelerate raises if DeepSpeed is needed
        return
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]


def ensure_process_group(device: torch.device) -> None:
    """Create a process group of this process, if there is none: DeepSpeed needs one even without a launcher."""
    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
