"""The process-group backend `simccl`: stands in for NCCL on the device `sim`.

It runs gloo on the device's memory, which is host memory. As with NCCL, it takes tensors of the device alone; stricter
than NCCL, it refuses collectives of Python objects too, which NCCL would send through the device's memory. Unlike NCCL,
a send does not wait for its receive, operations in different orders on two ranks may end, and `wait` blocks the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import NAME, on_host


BACKEND = "simccl"


class SimGroup(dist.ProcessGroup):
    """One process's end of a group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        gloo: Any = dist.ProcessGroupGloo
        self.gloo = gloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._name = ""

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def _raw(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for tensor in tensors:
            if tensor.device.type != NAME:
                raise RuntimeError(
                    f"No backend type associated with device type {tensor.device.type}: {BACKEND} takes tensors of "
                    f"{NAME} alone, and no Python objects"
                )
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        if tensors:  # the collective comes after what is in the stream
            torch.accelerator.current_stream(tensors[0].device).synchronize()
        return [on_host(tensor) for tensor in tensors]

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self.gloo.allreduce(self._raw(tensors), *_given(opts))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self.gloo.broadcast(self._raw(tensors), opts)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        return self.gloo.reduce(self._raw(tensors), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.gloo.allgather([self._raw(out) for out in outputs], self._raw(inputs), *_given(opts))

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self.gloo.gather([self._raw(out) for out in outputs], self._raw(inputs), opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self.gloo.scatter(self._raw(outputs), [self._raw(part) for part in inputs], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.gloo.reduce_scatter(self._raw(outputs), [self._raw(part) for part in inputs], *_given(opts))

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        (raw_output,), (raw_input,) = self._raw([output]), self._raw([tensor])
        return self.gloo.allgather([list(raw_output.view(-1).chunk(self.size()))], [raw_input.view(-1)], *_given(opts))

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        (raw_output,), (raw_input,) = self._raw([output]), self._raw([tensor])
        parts = [part.clone() for part in raw_input.view(-1).chunk(self.size())]
        return self.gloo.reduce_scatter([raw_output.view(-1)], [parts], *_given(opts))

    _reduce_scatter_base = reduce_scatter_single

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        return self.gloo.send(self._raw(tensors), peer, 0)  # NCCL has no tags

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        return self.gloo.recv(self._raw(tensors), peer, 0)

    def barrier(self, opts: Any = None) -> Any:
        return self.gloo.barrier(dist.BarrierOptions())


def _given(options: Any) -> list[Any]:
    return [] if options is None else [options]


def register() -> None:
    def make(store: Any, rank: int, size: int, timeout: timedelta) -> SimGroup:
        return SimGroup(store, rank, size, timeout)

    dist.Backend.register_backend(BACKEND, make, devices=[NAME])
