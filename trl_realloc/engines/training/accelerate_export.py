"""Exports the parameters of a model that Accelerate trains, in buckets under checkpoint names: a whole one (DDP, ZeRO-1
and 2), one that DeepSpeed's stage 3 has partitioned, or one that FSDP2 has sharded. Adapters are merged.

The export of this package's own engines is in their files; what both share is in `weight_export`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..base import BUCKET_BYTES, Bucket
from ..buckets import in_buckets
from ..device import is_accelerator
from . import deepspeed_compat
from .weight_export import buckets, checkpoint_names, persistent_buffers


if TYPE_CHECKING:
    from transformers import PreTrainedModel


# of modules that wrap others, in the names of parameters
_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


def why_not_exported(model: PreTrainedModel, fsdp_version: int | None = None) -> str | None:
    """The reason why the parameters of a model cannot be exported; `None` if they can be.

    Args:
        model: as the trainer has it, before or after Accelerate has prepared it.
        fsdp_version: of the launch; `None` without FSDP.
    """
    if fsdp_version == 1 or isinstance(model, FullyShardedDataParallel):
        return "FSDP1 keeps parameters in flat pieces, which generation engines cannot get; set fsdp_version: 2"
    if fsdp_version is not None and hasattr(model, "peft_config"):
        return "adapters are not merged where FSDP shards the weights; launch with DDP or DeepSpeed"
    if getattr(model, "is_quantized", False):
        return "the model is quantized, and generation engines get whole weights; load it without quantization_config"
    return None


def is_collective(model: nn.Module) -> bool:
    """True if exporting is collective over all ranks, because no rank has all of the parameters."""
    return any(deepspeed_compat.is_partitioned(p) or isinstance(p, DTensor) for p in model.parameters())


def export(model: PreTrainedModel, device: torch.device, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """The parameters as full tensors. They may be live: a receiver copies what it keeps. Where it `is_collective`, all
    ranks iterate to the end.

    Args:
        model: the module itself, not DDP's or DeepSpeed's wrapper of it.
        device: of the rank, where sharded parameters are gathered.
    """
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return _unsharded(model, device, bucket_bytes)
    partitioned = any(map(deepspeed_compat.is_partitioned, model.parameters()))
    return _clean(buckets(model, deepspeed_compat.full if partitioned else None, bucket_bytes))


def _unsharded(model: PreTrainedModel, device: torch.device, bucket_bytes: int) -> Iterator[Bucket]:
    named = model.named_parameters()
    for bucket in in_buckets(named, lambda item: item[1].numel() * item[1].element_size(), bucket_bytes):
        yield checkpoint_names(model, [(_clean_name(name), _full(parameter, device)) for name, parameter in bucket])
    if others := persistent_buffers(model):
        yield checkpoint_names(model, [(_clean_name(name), _full(buffer, device)) for name, buffer in others.items()])


def _full(parameter: Tensor, device: torch.device) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    shard: Any = parameter.detach()
    if is_accelerator(device) and shard.device.type == "cpu":  # FSDP offloads; its group sends from the accelerator
        shard = shard.to(device)
    whole: Tensor = shard.full_tensor()
    return whole


def _clean(exported: Iterator[Bucket]) -> Iterator[Bucket]:
    for bucket in exported:
        yield [(_clean_name(name), tensor) for name, tensor in bucket]


def _clean_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
