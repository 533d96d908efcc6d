"""Moves a module's parameters between device and host memory around a call (the plan's `offload`: `Residency`), or
frees them (`drop`: `DroppedCopy`).

When they are moved is in `placement`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Residency(ModelHook):
    """Moves a module's parameters to `device` before its first forward of a call, or earlier by `prefetch`, which may
    be called while another call runs. `release` moves them back to host memory.

    If the device is a GPU, the host memory is pinned. The copy to the device then runs at the bus's speed and on its
    own stream, in parallel with the computation of the previous call. If the device is the CPU, nothing moves.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.resident = True
        self.moves = 0
        self._module: nn.Module | None = None
        self._host: dict[str, Tensor] = {}
        self._arrived: torch.cuda.Event | None = None

    @classmethod
    def attach(cls, module: nn.Module, device: torch.device) -> Residency:
        """Add a hook to `module` and move its parameters to host memory."""
        hook = cls(device)
        add_hook_to_module(module, hook, append=True)
        hook.release()
        return hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        self._module = module
        return module

    def prefetch(self) -> None:
        """Start moving the parameters to the device. The call's first forward waits until they have arrived."""
        assert self._module is not None, "attach the hook first"
        if self.resident:
            return
        if self.device.type == "cuda":
            copy_stream = torch.cuda.Stream(self.device)
            with torch.cuda.stream(copy_stream):
                self._move_to_device(self._module)
            self._arrived = copy_stream.record_event()
        else:
            self._move_to_device(self._module)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.resident:
            self._move_to_device(module)
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
            self._arrived = None
        return args, kwargs

    def _move_to_device(self, module: nn.Module) -> None:
        for parameter in map(_memory, module.parameters()):
            parameter.data = parameter.data.to(self.device, non_blocking=True)
        self.moves += 1
        self.resident = True

    def release(self) -> None:
        """Move the parameters to host memory and free the device's memory. Only the first release copies them: scoring
        does not change them, and a reallocation writes to the host's copy."""
        assert self._module is not None, "attach the hook first"
        if not self.resident:
            return
        for name, tensor in self._module.named_parameters():
            parameter = _memory(tensor)
            if name not in self._host:
                copy = parameter.data.to("cpu")
                self._host[name] = copy.pin_memory() if self.device.type == "cuda" else copy
            parameter.data = self._host[name]
        self.resident = False


def _memory(parameter: Tensor) -> Tensor:
    """The plain tensor of a parameter. A DTensor (of a tensor-parallel group) cannot be pinned, and setting its `data`
    does not move its local part."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


class Versioned(Protocol):
    """An engine whose parameters have a version."""

    version: int


class DroppedCopy:
    """The memory of a copy of trained parameters, freed between the uses of its call. The tensor objects stay, so a
    reallocation fills the same tensors when the memory is back.

    Args:
        engine: the engine that uses the copy. Its version is set to `stale` when the memory is freed, so that the copy
            is filled before it is used again.
        tensors: the tensors that a reallocation fills. Memory that they share with `others` is not freed.
        others: the engine's other tensors.
        stale: the version of parameters that are absent.
    """

    def __init__(self, engine: Versioned, tensors: Iterable[Tensor], others: Iterable[Tensor], stale: int) -> None:
        self.engine, self.stale = engine, stale
        shared = {tensor.untyped_storage().data_ptr() for tensor in others}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._storages = [(storage, storage.nbytes()) for address, storage in storages.items() if address not in shared]
        self.release()

    @property
    def bytes(self) -> int:
        """Bytes that are allocated now."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def restore(self) -> None:
        """Allocate the memory, uninitialized."""
        for storage, size in self._storages:
            if storage.nbytes() != size:
                storage.resize_(size)

    def release(self) -> None:
        """Free the memory and mark the copy stale."""
        for storage, _ in self._storages:
            storage.resize_(0)
        self.engine.version = self.stale
