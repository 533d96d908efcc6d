"""What a call works with while it runs, and where that is between: in host memory (the plan's `offload`), or nowhere
(`drop`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Residency(ModelHook):
    """Brings the module's parameters to `device` before its first forward of a call, or ahead of it where `prefetch` is
    called while another call still runs; `release` takes them back.

    In host memory they are pinned where the device is a GPU, so that the copy back runs at the bus's speed and, on a
    stream of its own, beside the computation of the call before. Where the device is the CPU both places are one, and
    nothing moves.
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
        """Hook `module` and send it to host memory at once."""
        hook = cls(device)
        add_hook_to_module(module, hook, append=True)
        hook.release()
        return hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        self._module = module
        return module

    def prefetch(self) -> None:
        """Start bringing the parameters to the device; the call's first forward waits for them there."""
        assert self._module is not None, "attach the hook first"
        if self.resident:
            return
        if self.device.type == "cuda":
            beside = torch.cuda.Stream(self.device)
            with torch.cuda.stream(beside):
                self._bring(self._module)
            self._arrived = beside.record_event()
        else:
            self._bring(self._module)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.resident:
            self._bring(module)
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
            self._arrived = None
        return args, kwargs

    def _bring(self, module: nn.Module) -> None:
        for parameter in map(_memory, module.parameters()):
            parameter.data = parameter.data.to(self.device, non_blocking=True)
        self.moves += 1
        self.resident = True

    def release(self) -> None:
        """Give the device's memory back. The host's copy is kept from the first time: scoring changes nothing, and a
        reallocation writes to where the parameters rest."""
        assert self._module is not None, "attach the hook first"
        if not self.resident:
            return
        for name, whole in self._module.named_parameters():
            parameter = _memory(whole)
            if name not in self._host:
                copy = parameter.data.to("cpu")
                self._host[name] = copy.pin_memory() if self.device.type == "cuda" else copy
            parameter.data = self._host[name]
        self.resident = False


def _memory(parameter: Tensor) -> Tensor:
    """The plain tensor behind a parameter: a DTensor (of a tensor-parallel group) cannot be pinned, and what is set as
    its `data` leaves its own part where it is."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


class Versioned(Protocol):
    version: int


class Dropped:
    """Memory of a copy of trained parameters, freed between the turns of the call that uses it. The tensors live on
    without it, so that whoever knows them, such as a reallocation, writes to the same ones when it is back.

    Args:
        engine: whose copy it is; freed, it is of no version, and so is filled before it is used again.
        tensors: what a reallocation fills; memory that others share with them stays.
        others: the engine's other tensors.
    """

    def __init__(self, engine: Versioned, tensors: Iterable[Tensor], others: Iterable[Tensor], stale: int) -> None:
        self.engine, self.stale = engine, stale
        kept = {tensor.untyped_storage().data_ptr() for tensor in others}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._storages = [(each, each.nbytes()) for at, each in storages.items() if at not in kept]
        self.release()

    @property
    def bytes(self) -> int:
        """Held now."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def restore(self) -> None:
        """Room for the parameters, with nothing in it yet."""
        for storage, size in self._storages:
            if storage.nbytes() != size:
                storage.resize_(size)

    def release(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)
        self.engine.version = self.stale
