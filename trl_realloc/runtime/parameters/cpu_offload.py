"""Moves a module's parameters between device and host memory around a call (the plan's `offload`: `CPUOffload`), or
frees them (`drop`: `DroppedCopy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn

from ...engines.device import copy_stream, has_room, is_accelerator
from ...engines.pinned_memory import pinned_copies
from ...engines.torch_compat import memory_of
from ...engines.training.deepspeed_compat import is_partitioned, move_partition


class CPUOffload(ModelHook):
    """Moves a module's parameters to `device` before its first forward of a call, or earlier by `prefetch`, which may
    be called while another call runs. `release` moves them back to host memory.

    If the device is an accelerator, the host memory is pinned. The copy to the device then runs at the bus's speed and
    on its own stream, in parallel with the computation of the previous call. If the device is the CPU, nothing moves.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.resident = True
        self.moves = 0
        self._module: nn.Module | None = None
        self.host: dict[str, Tensor] = {}
        self._arrived: torch.Event | None = None

    @classmethod
    def attach(cls, module: nn.Module, device: torch.device) -> CPUOffload:
        """Add a hook to `module` and move its parameters to host memory."""
        hook = cls(device)
        add_hook_to_module(module, hook, append=True)
        hook.release()
        return hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        self._module = module
        return module

    def prefetch(self) -> None:
        """Start moving the parameters to the device, if they fit there beside the running call. The call's first
        forward waits for them.

        Before the parameters' first use, the peak memory of the other calls is not known, and nothing is moved early.
        """
        assert self._module is not None, "attach the hook first"
        if self.resident:
            return
        size = sum(tensor.nbytes for tensor in self.host.values())
        # checked each time, because longer responses take more memory
        if not is_accelerator(self.device) or (self.moves > 0 and has_room(self.device, size)):
            self._move_to_device(self._module)

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.resident:
            self._move_to_device(module)
        self._await_copies()
        return args, kwargs

    def _await_copies(self) -> None:
        """Let the computing stream wait for the copies to the device."""
        if self._arrived is not None:
            torch.accelerator.current_stream(self.device).wait_event(self._arrived)
            self._arrived = None

    def _move_to_device(self, module: nn.Module) -> None:
        parameters = [memory_of(parameter) for parameter in module.parameters()]
        if is_accelerator(self.device):
            self._arrived = self._copy_beside(parameters)
        else:
            for parameter in parameters:
                parameter.data = parameter.data.to(self.device)
        self.moves += 1
        self.resident = True

    def _copy_beside(self, parameters: Sequence[Tensor]) -> torch.Event:
        """Start copying the parameters to the device on the copy stream. Returns the event of their arrival."""
        computing, copying = torch.accelerator.current_stream(self.device), copy_stream(self.device)
        # allocated on the computing stream, which uses and frees the memory; the allocator has a pool per stream
        targets = [torch.empty_like(parameter, device=self.device) for parameter in parameters]
        copying.wait_stream(computing)  # pending kernels may still use that memory
        with copying:
            for parameter, target in zip(parameters, targets, strict=True):
                target.copy_(parameter.data, non_blocking=True)
        for parameter, target in zip(parameters, targets, strict=True):
            parameter.data = target
        return copying.record_event()

    def release(self) -> None:
        """Move the parameters to host memory and free the device's memory. Only the first release copies them: scoring
        does not change them, and a reallocation writes to the host copy."""
        assert self._module is not None, "attach the hook first"
        if not self.resident:
            return
        self._await_copies()  # the call may have failed before its first forward
        memory = {name: memory_of(parameter) for name, parameter in self._module.named_parameters()}
        if not self.host:
            data = {name: parameter.data for name, parameter in memory.items()}
            self.host = pinned_copies(data) if is_accelerator(self.device) else {n: t.cpu() for n, t in data.items()}
        for name, parameter in memory.items():
            parameter.data = self.host[name]
        self.resident = False


def move_to_host(module: nn.Module) -> None:
    """Move a module's parameters and gradients to host memory, in place."""
    for parameter in module.parameters():
        parameter.grad = None
        if is_partitioned(parameter):  # the parameter itself is empty
            move_partition(parameter, torch.device("cpu"))
            continue
        local = memory_of(parameter)
        if is_accelerator(local.device):
            local.data = local.data.to("cpu")


class Versioned(Protocol):
    """An engine whose parameters have a version."""

    version: int


class DroppedCopy:
    """Frees the memory of a copy of trained parameters between the uses of its call. The tensor objects stay, so a
    reallocation fills the same tensors after `restore`.

    Args:
        engine: the engine that uses the copy. Its version is set to `stale` when the memory is freed, so that the copy
            is filled before its next use.
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
        """Allocated bytes."""
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
