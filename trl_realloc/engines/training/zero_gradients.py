"""The gradients of a ZeRO optimizer: their memory between its steps, and those that are not finite (DeepSpeed's check,
and its float16 loss scaler).

Uses undocumented DeepSpeed interfaces, like `deepspeed_compat`. Line numbers in comments are of release 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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


def check_gradients(optimizer: ZeROOptimizer) -> None:
    """Make a ZeRO optimizer skip steps whose gradients are not finite. DeepSpeed checks them in float16 and float32,
    but not if the first parameter is in bfloat16 without a config that says so (stage_1_and_2.py:3042)."""
    if hasattr(optimizer, "check_grad_overflow"):
        optimizer.check_grad_overflow = True


def loss_scale(optimizer: ZeROOptimizer) -> dict[str, Any]:
    """The state of DeepSpeed's dynamic loss scaler under the names of torch's `GradScaler`, so that another engine can
    continue with it; empty without one."""
    scaler: Any = getattr(optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return {}
    return {
        "scale": float(scaler.cur_scale),
        "growth_factor": float(scaler.scale_factor),
        "backoff_factor": 1 / float(scaler.scale_factor),
        "growth_interval": int(scaler.scale_window),
        "_growth_tracker": int(scaler.cur_iter - scaler.last_overflow_iter - 1),
    }


def set_loss_scale(optimizer: ZeROOptimizer, state: Mapping[str, object]) -> None:
    """Continue with the scale of `loss_scale`, and the number of steps since it changed."""
    scaler: Any = getattr(optimizer, "loss_scaler", None)
    if state and getattr(scaler, "dynamic", False):
        scaler.cur_scale = state["scale"]
        scaler.last_overflow_iter = scaler.cur_iter - 1 - state["_growth_tracker"]
