"""What a call scores with, on the device while it runs and in host memory between: the plan's `offload`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn


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
        for parameter in module.parameters():
            parameter.data = parameter.data.to(self.device, non_blocking=True)
        self.moves += 1
        self.resident = True

    def release(self) -> None:
        """Give the device's memory back. The host's copy is kept from the first time: scoring changes nothing, and a
        reallocation writes to where the parameters rest."""
        assert self._module is not None, "attach the hook first"
        if not self.resident:
            return
        for name, parameter in self._module.named_parameters():
            if name not in self._host:
                copy = parameter.data.to("cpu")
                self._host[name] = copy.pin_memory() if self.device.type == "cuda" else copy
            parameter.data = self._host[name]
        self.resident = False
