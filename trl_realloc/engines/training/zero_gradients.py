"""The gradients of a ZeRO optimizer between its backwards and its step: their memory, ending their accumulation,
multiplying and dropping them.

Uses DeepSpeed beyond its documentation, as `deepspeed_compat` does. Line numbers in comments are of release 0.19.8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def end_accumulation(engine: Any) -> None:
    """Let an engine's next `step` be an optimizer step with the gradients of all backwards since the one before, none
    of which DeepSpeed was told to be the last. Collective over the mesh.

    It is what DeepSpeed does at the step under `managed_gradient_accumulation: false` (engine.py:3599), which is not
    allowed with stage 1 and `overlap_comm`, because stage 1 then sums gradients in the last backward alone.
    """
    optimizer = engine.optimizer
    engine.set_gradient_accumulation_boundary(True)
    if engine.zero_optimization_partition_gradients():
        optimizer.finalize_gradient_accumulation_boundary()
        return
    overlaps = getattr(optimizer, "overlap_comm", None)
    if overlaps:
        optimizer.overlap_comm = False
    try:
        engine.allreduce_gradients()
    finally:
        if overlaps:
            optimizer.overlap_comm = overlaps


@contextlib.contextmanager
def multiplied_gradients(optimizer: Any, factor: float) -> Iterator[None]:
    """Inside, an optimizer's step multiplies the gradients before it clips them. DeepSpeed divides them by the scale of
    the losses, wherever they are in memory; where it scales no loss, that scale is 1."""
    gradients = getattr(optimizer, "fp32_groups_gradients_flat", None)
    if factor == 1.0:
        yield
    elif gradients is not None:  # stage 1 in bfloat16 with gradients in float32, which has no scale
        torch._foreach_mul_(list(gradients), factor)
        yield
    else:
        scaler = optimizer.loss_scaler
        before, divided = scaler.cur_scale, scaler.cur_scale / factor
        scaler.cur_scale = divided
        try:
            yield
        finally:
            scaler.cur_scale = before * (scaler.cur_scale / divided)  # what it has changed remains


def drop_gradients(optimizer: Any) -> None:
    """Forget the gradients of all backwards since the latest step, which `end_accumulation` has not ended."""
    optimizer.zero_grad()
    if hasattr(optimizer, "clear_hp_grads"):  # stage 1 in bfloat16 with gradients in float32
        optimizer.clear_hp_grads()
    elif hasattr(optimizer, "all_grad_tensors"):  # stages 1 and 2; the first of further backwards replaces the others
        optimizer.micro_step_id = -1
        optimizer._release_ipg_buffers()
        optimizer._offload_accumulated_param_ids = set()
        for kept in (optimizer.all_grad_tensors, optimizer.averaged_gradients):
            kept.update(dict.fromkeys(kept))
    else:  # stage 3; likewise, since `zero_grad`
        optimizer._offload_boundary_param_ids = set()


class GradientMemory:
    """The memory of stage 3's gradients. DeepSpeed keeps it between the steps; here it is freed.

    Not in other stages, and not if the optimizer is offloaded, whose gradients are in pinned host memory.
    """

    def __init__(self, optimizer: Any) -> None:
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
        """Give the gradients memory, in which they are zero. Does nothing if they have it."""
        if self._buffer is not None and not self._buffer.untyped_storage().nbytes():
            self._resize(self._bytes)
            self._buffer.zero_()

    def free(self) -> None:
        self._resize(0)
