"""The memory of a ZeRO optimizer's gradients between its steps.

Uses undocumented DeepSpeed interfaces, like `deepspeed_compat`. Line numbers in comments are of release 0.19.8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor


if TYPE_CHECKING:
    from .deepspeed_compat import ZeROOptimizer


class GradientMemory:
    """The memory of stage 3's gradients. DeepSpeed keeps it between the steps; here it is freed.

    Not in other stages, and not for an offloaded optimizer, whose gradients are in pinned host memory.
    """

    def __init__(self, optimizer: ZeROOptimizer) -> None:
        buffer: Tensor | None = getattr(optimizer, "grad_partitions_flat_buffer", None)
        if buffer is not None and getattr(optimizer, "offload_optimizer", False):
            buffer = None
        self._buffer = buffer
        self._bytes = 0 if buffer is None else buffer.untyped_storage().nbytes()
        self._resize(0)

    def _resize(self, size: int) -> None:
        if self._buffer is not None:
            self._buffer.untyped_storage().resize_(size)

    def allocate(self) -> None:
        """Allocate the gradients as zeros. Does nothing if they have memory."""
        if self._buffer is not None and not self._buffer.untyped_storage().nbytes():
            self._resize(self._bytes)
            self._buffer.zero_()

    def free(self) -> None:
        self._resize(0)
