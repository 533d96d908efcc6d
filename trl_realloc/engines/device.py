"""Memory and streams of an accelerator, and the device whose tensors a process group sends, through PyTorch's interface
for all accelerators.

The functions do nothing for a device of type `cpu`. The launcher chooses a job's device (`runtime/launch`).
"""

from __future__ import annotations

import functools
import gc

import torch
import torch.distributed as dist

from .weight_digest import forget_weights


def is_accelerator(device: torch.device) -> bool:
    """True if the device has separate memory, which the host cannot read."""
    return device.type != "cpu"


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device of the tensors that a process group sends: this process's accelerator, or the CPU with gloo.

    Args:
        group: a process group; `None` for the default one.
    """
    accelerator = torch.accelerator.current_accelerator() if dist.is_initialized() else None
    if accelerator is None:
        return torch.device("cpu")
    backends = dist.BackendConfig(dist.Backend(dist.get_backend(group))).get_device_backend_map()
    if backends.get(accelerator.type, "gloo") == "gloo":  # gloo takes some CUDA tensors, and copies them to the host
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def release_cached_memory(device: torch.device) -> None:
    """Give the memory of objects that are no longer used back to the device, where another process or another engine
    can take it. Collects reference cycles first, because modules with hooks are in some."""
    gc.collect()
    forget_weights()
    if is_accelerator(device):
        torch.get_device_module(device).empty_cache()


def free_bytes(device: torch.device) -> int:
    """The bytes of an accelerator's memory that no process has reserved."""
    return int(torch.get_device_module(device).mem_get_info(device)[0])


def has_room(device: torch.device, size: int) -> bool:
    """True if `size` more bytes fit on the device beside the peak that this process has had allocated so far, which a
    call that runs meanwhile may allocate again."""
    memory = torch.get_device_module(device)
    reserved, peak = int(memory.memory_reserved(device)), int(memory.max_memory_allocated(device))
    return peak + size <= free_bytes(device) + reserved


def memory_bytes(device: torch.device) -> int | None:
    """The bytes of an accelerator's memory; `None` for the host's."""
    return int(torch.get_device_module(device).mem_get_info(device)[1]) if is_accelerator(device) else None


@functools.cache
def copy_stream(device: torch.device) -> torch.Stream:
    """The stream of copies from host memory that run beside the computation; one for each device."""
    return torch.Stream(device)
