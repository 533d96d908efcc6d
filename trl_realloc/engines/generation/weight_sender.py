"""Sends the trainer's parameters to a vLLM engine's process, bucket by bucket: through shared host memory, or through
the memory of a GPU that both processes use.

There are two slots, so that one is filled while the other is loaded. GPU slots exist only during a load.
`weight_receiver` reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..base import Bucket
from ..device import is_accelerator
from ..pinned_memory import pin
from ..weight_digest import digest, numbers


if TYPE_CHECKING:
    from ..child_process import Message
    from .engine_process import EngineProcess


_ALIGNMENT = 64  # bytes; the offsets of tensors in a slot are multiples of it
Handle = tuple[str, tuple[Any, ...]]  # a GPU's UUID, and the arguments of torch's `rebuild_cuda_tensor`


class Filled(NamedTuple):
    """The description of a filled slot for the engine's process.

    Args:
        size: used bytes.
        tensors: (checkpoint name, name of the torch dtype, shape, offset in bytes) of each tensor.
        handle: the GPU's UUID and the arguments of torch's `rebuild_cuda_tensor`, for a slot on the GPU; `None` for
            shared memory.
        digests: digests of the tensors as they are sent. They are sent apart from the bucket.
    """

    size: int
    tensors: list[tuple[str, str, tuple[int, ...], int]]
    handle: Handle | None = None
    digests: tuple[int, ...] = ()


def by_cuda_ipc(on_gpu: bool, tensor_parallel_size: int, environment: Mapping[str, str] = os.environ) -> bool:
    """True if weights go to an engine through the memory of the GPU (CUDA IPC) instead of shared host memory.

    They do if the engine has one GPU, that of the sending rank. The workers of a tensor-parallel group are on other
    GPUs: to open this one's memory each would need a CUDA context here, some 0.5 GB. vLLM's `nccl` engine does not
    apply: the sending rank is on the GPU of the engine's first worker in every plan, and NCCL refuses two ranks on one
    GPU.

    Args:
        on_gpu: whether the engine runs on CUDA GPUs.
        environment: `TRL_REALLOC_CUDA_IPC=0` switches it off.
    """
    if environment.get("TRL_REALLOC_CUDA_IPC", "1").lower() in ("0", "false", "no", "off"):
        return False
    return on_gpu and tensor_parallel_size == 1


class WeightBuffers:
    """The two slots, on the trainer's side.

    Attributes:
        cuda_ipc: whether GPU tensors stay on the GPU, where the engine's process opens them. This project's tests,
            which have no GPU, do not run it; `benchmarks/check_gpu.py` does.
        dtype: dtype to which wider floating-point tensors are cast, unless their name is in `wider`; `None` to cast
            nothing.
        wider: names of tensors that the engine holds in a wider dtype.
    """

    def __init__(self, *, cuda_ipc: bool = False) -> None:
        # A memfd has no name in the file system that could be left behind, and does not count towards a container's
        # limit on /dev/shm (64 MB in Docker). The engine closes the descriptors when it ends.
        self.fds = [os.memfd_create(f"trl_realloc bucket {slot}") for slot in range(2)]
        self.cuda_ipc = cuda_ipc
        self.dtype: torch.dtype | None = None
        self.wider: frozenset[str] = frozenset()
        self._mapped: dict[int, Tensor] = {}  # slot -> its memory, uint8
        self._unpin: dict[int, Callable[[], None]] = {}
        self._on_gpu: dict[int, tuple[Tensor, Handle]] = {}
        self._probed: Tensor | None = None

    def fill(self, slot: int, bucket: Bucket) -> Filled:
        """Copy a bucket into a slot in the engine's dtype. A slot that is too small is enlarged."""
        on_gpu = self.cuda_ipc and bool(bucket) and all(tensor.is_cuda for _, tensor in bucket)
        placed, size = [], 0
        for name, tensor in bucket:
            dtype = self._wire_dtype(name, tensor)
            placed.append((name, str(dtype).removeprefix("torch."), tuple(tensor.shape), size))
            size += -(-tensor.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if on_gpu:
            return self._on_the_gpu(slot, Filled(size, placed), bucket)
        if size > len(self._mapped.get(slot, ())):
            self._map(slot, size, pinned=any(tensor.is_cuda for _, tensor in bucket))
        digests = []
        for (name, _, _, offset), (_, tensor) in zip(placed, bucket, strict=True):
            dtype = self._wire_dtype(name, tensor)
            target = self._mapped[slot][offset : offset + tensor.numel() * dtype.itemsize]
            source = tensor.detach().to(dtype)  # on its device, so that fewer bytes leave it
            if is_accelerator(source.device):
                target.view(dtype).view(source.shape).copy_(source)
            else:  # by NumPy: torch's threads wait for each other, for seconds while two vLLM workers spin on two cores
                # `Tensor.numpy` of the source would keep torch from freeing its storage (`DroppedCopy`)
                target.numpy()[:] = np.from_dlpack(source.contiguous().view(-1).view(torch.uint8))
            digests.append(digest(source))
        return Filled(size, placed, digests=tuple(numbers(digests)))

    def _map(self, slot: int, size: int, *, pinned: bool) -> None:
        """Enlarge a slot of host memory; `pinned` lets GPUs copy to it at the full speed of their bus."""
        self._unmap(slot)
        os.ftruncate(self.fds[slot], size)
        path = f"/proc/self/fd/{self.fds[slot]}"
        self._mapped[slot] = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        if pinned:
            self._unpin[slot] = pin(self._mapped[slot])

    def _unmap(self, slot: int) -> None:
        self._unpin.pop(slot, lambda: None)()
        self._mapped.pop(slot, None)

    def _wire_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        if self.dtype is None or not tensor.dtype.is_floating_point or name in self.wider:
            return tensor.dtype
        # for equal sizes neither dtype has all values of the other
        narrower = self.dtype.itemsize <= tensor.dtype.itemsize
        return self.dtype if narrower else tensor.dtype

    def probe(self, device: torch.device) -> Handle:
        """The handle of a byte on the GPU, with which the engine tests whether it can open this process's memory.
        `release_gpu` frees the byte."""
        self._probed = torch.zeros(1, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        return _handle(self._probed)

    def _on_the_gpu(self, slot: int, filled: Filled, bucket: Bucket) -> Filled:
        device = bucket[0][1].device
        if slot not in self._on_gpu or filled.size > len(self._on_gpu[slot][0]):
            self._on_gpu.pop(slot, None)
            memory = torch.empty(filled.size, dtype=torch.uint8, device=device)
            # One handle per memory, which the engine opens once (`open_handle`): torch wraps the storage again for
            # each handle, and frees it by equally deep recursion.
            self._on_gpu[slot] = memory, _handle(memory)
        memory, handle = self._on_gpu[slot]
        digests = []
        for (name, _, _, offset), (_, tensor) in zip(filled.tensors, bucket, strict=True):
            dtype = self._wire_dtype(name, tensor)
            target = memory[offset : offset + tensor.numel() * dtype.itemsize].view(dtype).view(tensor.shape)
            target.copy_(tensor.detach())
            digests.append(digest(tensor if tensor.dtype == dtype else target))
        digest_numbers = tuple(numbers(digests))
        torch.cuda.synchronize(device)
        return filled._replace(handle=handle, digests=digest_numbers)

    def release_gpu(self) -> None:
        """Free the slots on the GPU, and the byte of `probe`. The engine must have closed them
        (`SharedMemoryWeightTransfer.finish_weight_update`), because torch keeps memory that another process has open.
        At the end of the process torch reports sent memory that was not freed as leaked."""
        self._on_gpu.clear()
        self._probed = None

    def clear(self) -> None:
        """Unmap the memory in this process, and free the GPU's."""
        for slot in list(self._mapped):
            self._unmap(slot)
        self.release_gpu()


def _handle(memory: Tensor) -> Handle:
    from torch.multiprocessing.reductions import reduce_tensor

    uuid = str(torch.cuda.get_device_properties(memory.device).uuid)
    return uuid, reduce_tensor(memory)[1]


class SentWeights(NamedTuple):
    """The outcome of sending an update.

    Args:
        problem: the reason why the engine does not have the parameters as sent; `None` if it has.
        stopped_s: seconds for which it stopped decoding.
        unproven: tensors that its model does not hold, or from which it holds only computed values.
        together: names of the tensors that each layer of its model is loaded from.
        digests: of all of its parameters, by name.
        bytes: that were sent.
    """

    problem: str | None
    stopped_s: float
    unproven: list[str]
    together: list[list[str]]
    digests: dict[str, int]
    bytes: int


def send_weights(
    process: EngineProcess,
    buffers: WeightBuffers,
    buckets: Iterable[Bucket],
    version: int,
    take: Callable[[Message], bool],
    kept: Mapping[str, int],
) -> SentWeights:
    """Send the parameters of a `load` bucket by bucket, then the digests of all. `weight_receiver` has the other side.
    While one bucket is loaded the next one is filled. Slots on the GPU are freed afterwards.

    Args:
        take: handles messages of a generation meanwhile, as in `EngineProcess.expect`.
        kept: digests of the tensors that the engine has and that the buckets may lack.
    """
    process.send("load", version)
    limit_s, free, complete = process.limits.load, [0, 1], False
    digests, size = dict(kept), 0
    try:
        for bucket in buckets:
            if not free:
                free += process.expect("free", "loading weights", limit_s, take=take)
            slot = free.pop(0)
            filled = buffers.fill(slot, bucket)
            if filled.tensors:
                digests |= {name: number for (name, *_), number in zip(filled.tensors, filled.digests, strict=True)}
                size += filled.size
                process.send("bucket", slot, filled.size, filled.tensors, filled.handle)
            else:
                free.append(slot)
        complete = True
    finally:
        try:
            if process.is_running:
                process.send("done", complete, digests, list(kept))
                answer = process.expect("loaded", "loading weights", limit_s, ("free",), take)
        finally:
            buffers.release_gpu()
    problem, stopped_s, unproven, together = answer
    return SentWeights(problem, stopped_s, unproven, together, digests, size)
