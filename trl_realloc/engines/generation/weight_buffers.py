"""The memory through which a bucket of parameters gets from a trainer's process into an engine's, on one machine.

Two slots, so that one is loaded while the other is filled. Owns no process and no message: who fills which slot when,
and what the other side is told, is the engine's business.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base import Bucket


_ALIGNMENT = 64  # bytes; where a tensor may begin in a slot


class Filled(NamedTuple):
    """What the other side needs to read a slot.

    Args:
        size: bytes that are used.
        tensors: (checkpoint name, name of the torch dtype, shape, offset in bytes) each.
        handle: of a slot on the GPU, what torch's `reduce_tensor` says of it; `None` of one in shared memory.
    """

    size: int
    tensors: list[tuple[str, str, tuple[int, ...], int]]
    handle: tuple[Any, ...] | None = None


class Slots:
    """Args:
    cuda_ipc: GPU tensors stay on the GPU and are opened there by the engine's process, on that same GPU. Not run by
        this project's tests, which have no GPU.
    """

    def __init__(self, *, cuda_ipc: bool = False) -> None:
        # Memory of a memfd has no name to leave behind, and a container's limit on /dev/shm (64 MB in Docker) does not
        # bind it. Who ends the engine closes them.
        self.fds = [os.memfd_create(f"trl_realloc bucket {slot}") for slot in range(2)]
        self.cuda_ipc = cuda_ipc
        self._mapped: dict[int, Tensor] = {}  # slot -> its memory, uint8
        self._on_gpu: dict[int, Tensor] = {}

    def fill(self, slot: int, bucket: Bucket) -> Filled:
        """Copy a bucket into a slot, which grows if need be."""
        placed, size = [], 0
        for name, tensor in bucket:
            placed.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size))
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self.cuda_ipc and bucket and all(tensor.is_cuda for _, tensor in bucket):
            return Filled(size, placed, self._on_the_gpu(slot, Filled(size, placed), bucket))
        if size > len(self._mapped.get(slot, ())):
            self._mapped.pop(slot, None)
            os.ftruncate(self.fds[slot], size)
            path = f"/proc/self/fd/{self.fds[slot]}"
            self._mapped[slot] = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        for (_, _, _, offset), (_, tensor) in zip(placed, bucket, strict=True):
            place = self._mapped[slot][offset : offset + tensor.nbytes]
            if tensor.is_cuda:
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            else:  # not by torch: its threads wait for each other, for seconds while two vLLM workers spin on two cores
                place.numpy()[:] = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        return Filled(size, placed)

    def _on_the_gpu(self, slot: int, filled: Filled, bucket: Bucket) -> tuple[Any, ...]:
        from torch.multiprocessing.reductions import reduce_tensor

        device = bucket[0][1].device
        if filled.size > len(self._on_gpu.get(slot, ())):
            self._on_gpu[slot] = torch.empty(filled.size, dtype=torch.uint8, device=device)
        memory = self._on_gpu[slot]
        for (_, _, _, offset), (_, tensor) in zip(filled.tensors, bucket, strict=True):
            memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        torch.cuda.synchronize(device)
        handle: tuple[Any, ...] = reduce_tensor(memory)[1]
        return handle

    def clear(self) -> None:
        """Give the memory back that this side has open."""
        self._mapped.clear()
        self._on_gpu.clear()


def asks_for_cuda_ipc() -> bool:
    """Whether the environment turns it on: `TRL_REALLOC_CUDA_IPC=1`."""
    return os.environ.get("TRL_REALLOC_CUDA_IPC", "0").lower() in ("1", "true", "yes", "on")
