"""Sends the parameters of a `load` to a vLLM engine's process, bucket by bucket. `vllm_update` is the receiver."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..base import Bucket
from ..child_process import Message
from .engine_process import EngineProcess
from .weight_buffers import WeightBuffers


def send_weights(
    process: EngineProcess,
    buffers: WeightBuffers,
    buckets: Iterable[Bucket],
    version: int,
    take: Callable[[Message], bool],
) -> tuple[str | None, float, list[str]]:
    """Send all buckets, then the digests. While one bucket is loaded the next one is filled. Slots on the GPU are freed
    afterwards.

    Args:
        take: handles messages of a generation meanwhile, as in `EngineProcess.expect`.

    Returns:
        The reason why the engine does not have the parameters as sent, or `None`; seconds for which it stopped
        decoding; tensors that its model does not hold, or from which it holds only computed values.
    """
    process.send("load", version)
    limit_s, free, complete = process.limits.load, [0, 1], False
    digests: dict[str, int] = {}
    try:
        for bucket in buckets:
            if not free:
                free += process.expect("free", "loading weights", limit_s, take=take)
            slot = free.pop(0)
            filled = buffers.fill(slot, bucket)
            if filled.tensors:
                digests |= {name: number for (name, *_), number in zip(filled.tensors, filled.digests, strict=True)}
                process.send("bucket", slot, filled.size, filled.tensors, filled.handle)
            else:
                free.append(slot)
        complete = True
    finally:
        try:
            if process.is_running:
                process.send("done", complete, digests)
                problem, stopped_s, unproven = process.expect("loaded", "loading weights", limit_s, ("free",), take)
        finally:
            buffers.release_gpu()
    return problem, stopped_s, unproven
