"""The shared memory through which buckets of parameters get from the trainer's process into that of a vLLM engine.

There are two slots, so that one is filled while the other is loaded. The messages that say which slot is filled are in
`vllm` and `vllm_host`, the reading side in `vllm_worker`.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base import Bucket
from ..device import is_accelerator


_ALIGNMENT = 64  # bytes; the offsets of tensors in a slot are multiples of it


class Filled(NamedTuple):
    """The description of a filled slot, by which the engine's process reads it.

    Args:
        size: used bytes.
        tensors: for each tensor its checkpoint name, the name of its torch dtype, its shape and its offset in bytes.
        handle: for a slot on the GPU, the arguments of torch's `rebuild_cuda_tensor`; `None` for shared memory.
    """

    size: int
    tensors: list[tuple[str, str, tuple[int, ...], int]]
    handle: tuple[Any, ...] | None = None


class WeightBuffers:
    """The two slots, on the trainer's side.

    Args:
        cuda_ipc: keep GPU tensors on the GPU, where the engine's process on the same GPU opens them. Not run by this
            project's tests, which have no GPU.
    """

    def __init__(self, *, cuda_ipc: bool = False) -> None:
        # A memfd has no name in the file system that could be left behind, and no part in a container's limit on
        # /dev/shm (64 MB in Docker). The engine closes the descriptors when it ends.
        self.fds = [os.memfd_create(f"trl_realloc bucket {slot}") for slot in range(2)]
        self.cuda_ipc = cuda_ipc
        self._mapped: dict[int, Tensor] = {}  # slot -> its memory, uint8
        self._on_gpu: dict[int, Tensor] = {}

    def fill(self, slot: int, bucket: Bucket) -> Filled:
        """Copy a bucket into a slot, which is enlarged if it is too small."""
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
            target = self._mapped[slot][offset : offset + tensor.nbytes]
            if is_accelerator(tensor.device):
                target.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            else:  # by NumPy: torch's threads wait for each other, for seconds while two vLLM workers spin on two cores
                target.numpy()[:] = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
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
        """Unmap the memory in this process."""
        self._mapped.clear()
        self._on_gpu.clear()


def asks_for_cuda_ipc() -> bool:
    """Whether the environment enables CUDA IPC: `TRL_REALLOC_CUDA_IPC=1`."""
    return os.environ.get("TRL_REALLOC_CUDA_IPC", "0").lower() in ("1", "true", "yes", "on")
