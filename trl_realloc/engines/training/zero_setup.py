"""Sets up DeepSpeed for an engine on one mesh: its config and its process groups. Workarounds are in
`deepspeed_compat`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...plan.assignment import REDUCE_BUCKET
from ..mesh_group import MeshGroup


@dataclass(frozen=True)
class Topology:
    """DeepSpeed's `mpu` argument: the mesh is the data-parallel group, and each rank by itself a model-parallel one."""

    group: MeshGroup
    alone: dist.ProcessGroup | None

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self.group.group

    def get_data_parallel_rank(self) -> int:
        return self.group.index

    def get_data_parallel_world_size(self) -> int:
        return self.group.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self.alone

    get_tensor_model_parallel_group = get_model_parallel_group

    def get_model_parallel_rank(self) -> int:
        return 0

    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_model_parallel_world_size(self) -> int:
        return 1

    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def deepspeed_config(
    stage: int, user_config: Mapping[str, object] | None, max_grad_norm: float, trained: int
) -> dict[str, Any]:
    """The config of an engine, from the user's DeepSpeed config (that of `accelerate launch`): ZeRO options, offload,
    precision and clipping are the user's; batch sizes, optimizer and scheduler are the trainer's. If the user sets no
    bucket size, gradients are reduced in smaller buckets than DeepSpeed's (`REDUCE_BUCKET`, or all trained elements).

    Args:
        user_config: the user's config; `None` for DeepSpeed's defaults.
        trained: number of elements of the trained parameters; 0 for an engine without an optimizer, for which an
            offload of the optimizer is removed, because DeepSpeed would fail.
    """
    config = _without_auto(copy.deepcopy(dict(user_config or {})))
    for key in ("train_batch_size", "optimizer", "scheduler"):
        config.pop(key, None)
    zero = config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
    if not trained:
        zero.pop("offload_optimizer", None)
        # otherwise small parameters would stay full beside their partitions, but a reallocation fills only the
        # partitions
        zero["stage3_param_persistence_threshold"] = 0
    zero.setdefault("reduce_bucket_size", max(1, min(REDUCE_BUCKET, trained)))
    config["train_micro_batch_size_per_gpu"] = config["gradient_accumulation_steps"] = 1
    config.setdefault("gradient_clipping", max(max_grad_norm, 0.0))
    config.setdefault("steps_per_print", 1 << 60)
    # DeepSpeed detects gradients that are not finite by their norm, and then skips the step
    zero.pop("compute_grad_norm", None)
    config.get("bf16", {}).pop("check_grad_overflow", None)
    if config.get("bf16", {}).get("enabled"):
        # otherwise stage 1 with gradients in float32 adds a micro-batch's gradients again with each later one
        # (bf16_optimizer.py:508, 0.19.8: the gradients in bfloat16 are accumulated too, and not cleared between)
        config["bf16"]["immediate_grad_update"] = True
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    return config


def parameter_dtype(user_config: Mapping[str, object] | None) -> torch.dtype | None:
    """The dtype that DeepSpeed casts every model's parameters to with the user's config; `None` if it casts none."""
    config = _without_auto(dict(user_config or {}))
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for kind, dtype in kinds.items() if config.get(kind, {}).get("enabled")), None)


def scales_losses(user_config: Mapping[str, object] | None) -> bool:
    """True if DeepSpeed scales losses with the user's config, as training in float16 needs."""
    return parameter_dtype(user_config) is torch.float16


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of a copy of a model as DeepSpeed casts those of the model that it trains. The buffers keep
    their dtype: the frequencies of a rotary embedding in 16 bits would give other angles at position 2,000."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def unify_trained(model: nn.Module) -> None:
    """Cast a model's trained parameters to one dtype, in place; to the 16-bit one if they have several, as with a
    float32 adapter beside a layer that is fully trained in bfloat16. DeepSpeed makes one tensor of all of them, and
    keeps float32 master weights in either case."""
    trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    dtypes = {p.dtype for p in trained}
    if len(dtypes) > 1:
        narrowest = min(dtypes, key=lambda dtype: dtype.itemsize)
        for parameter in trained:
            parameter.data = parameter.data.to(narrowest)


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    """The config without the values "auto", which Transformers would fill in; DeepSpeed then uses its defaults."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto"
    }


def ensure_process_group(device: torch.device) -> None:
    """Create a process group of this process, if there is none: DeepSpeed needs one even without a launcher."""
    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
