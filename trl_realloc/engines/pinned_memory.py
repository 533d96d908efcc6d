"""Pinned host memory, which an accelerator copies at the full speed of its bus: pinned copies of tensors, and memory
that is pinned in place.

Torch rounds each pinned allocation up to a power of two, which can double a tensor's bytes. So tensors share blocks
whose sizes are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


BLOCK_BYTES = 1 << 30  # bytes of a block, unless a tensor is larger
_ALIGNED = 256  # alignment of tensors in bytes; torch's allocator aligns to at least as much


def pinned_blocks(sizes: Sequence[int], block_bytes: int = BLOCK_BYTES) -> list[tuple[int, dict[int, int]]]:
    """Divide tensors among blocks, the largest first, each into the first block that has room (first-fit decreasing).

    Args:
        sizes: bytes of each tensor.
        block_bytes: bytes of a block, a power of two.

    Returns:
        For each block its bytes, a power of two, and the byte offset of each of its tensors by position.
    """
    aligned = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    blocks: list[tuple[int, dict[int, int]]] = []
    used: list[int] = []
    for position in sorted(range(len(sizes)), key=lambda index: (-aligned[index], index)):
        size = aligned[position]
        index = next((index for index, (room, _) in enumerate(blocks) if size <= room - used[index]), len(blocks))
        if index == len(blocks):
            blocks.append((max(block_bytes, _power(size)), {}))
            used.append(0)
        blocks[index][1][position] = used[index]
        used[index] += size
    return [(min(room, _power(of)), starts) for (room, starts), of in zip(blocks, used, strict=True)]


def _power(size: int) -> int:
    """The least power of two >= `size`."""
    return 1 << max(size - 1, 0).bit_length()


def pin(memory: Tensor) -> Callable[[], None]:
    """Pin host memory in place for CUDA GPUs. Does nothing if CUDA cannot pin it.

    Returns:
        A function that unpins it, to be called before the memory is freed.
    """
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        return lambda: None
    address = memory.data_ptr()
    return lambda: runtime.cudaHostUnregister(address) and None


def pinned_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies of tensors in pinned host memory, of the same shapes and dtypes."""
    names, copies = list(tensors), dict[str, Tensor]()
    for size, starts in pinned_blocks([tensors[name].nbytes for name in names]):
        block = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for position, start in starts.items():
            source = tensors[names[position]]
            copy = block[start : start + source.nbytes].view(source.dtype).view(source.shape)
            copies[names[position]] = copy.copy_(source)
    return {name: copies[name] for name in names}
