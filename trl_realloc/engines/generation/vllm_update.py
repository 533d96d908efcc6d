"""Takes the parameters that the trainer sends into vLLM, bucket by bucket. When that happens is decided in `vllm_host`
and, during a generation, in `vllm_generation`; what a worker does with a bucket is in `vllm_worker`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..child_process import Message


if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from vllm import LLM


class EngineChannel(Protocol):
    """The part of `vllm_host.Channel` that an update uses."""

    @property
    def connection(self) -> Connection[Message, Message]: ...
    def send(self, *message: object) -> None: ...
    def progress(self) -> None: ...


def take_buckets(llm: LLM, channel: EngineChannel, slots: Sequence[int], first: Message) -> str | None:
    """Load buckets as they arrive, through vLLM's weight-transfer interface. No decode step may be under way.

    Args:
        slots: the file descriptors of the shared memory.
        first: the first message: `bucket` or `done`.

    Returns:
        Why the engine does not have all parameters; `None` if it has.
    """
    llm.start_weight_update()
    word, *arguments = first
    while word == "bucket":
        slot, size, tensors, handle = arguments
        path = f"/proc/{os.getpid()}/fd/{slots[slot]}"
        llm.update_weights({"update_info": {"path": path, "size": size, "tensors": tensors, "handle": handle}})
        channel.send("free", slot)
        word, *arguments = channel.connection.recv()
    llm.finish_weight_update()  # also after an incomplete update: vLLM needs it before the next one
    problems = [problem for problem in llm.collective_rpc("weight_problem") if problem]
    if problems or (word == "done" and arguments[0]):
        return problems[0] if problems else None
    return "the sender stopped before the last bucket"
