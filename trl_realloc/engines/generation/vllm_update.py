"""Loads the trainer's parameters into vLLM, bucket by bucket, and verifies that the workers hold them. `vllm_worker`
handles a bucket in a worker, `weight_proof` computes the digests of its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ..child_process import Message
from ..weight_digest import hexadecimal, total


if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from vllm import LLM

    from .weight_proof import PartKey, WorkerAnswer


class EngineChannel(Protocol):
    """The part of `vllm_host.Channel` that an update uses."""

    @property
    def connection(self) -> Connection[Message, Message]: ...
    def send(self, *message: object) -> None: ...
    def progress(self) -> None: ...


class WeightUpdates:
    """The updates of an engine's weights, and the proof that its workers hold the latest one.

    Args:
        slots: file descriptors of the shared memory.

    Attributes:
        unproven: tensors of the latest update that the model does not hold, or from which it holds only computed
            values.
    """

    def __init__(self, llm: LLM, channel: EngineChannel, slots: Sequence[int]) -> None:
        self._llm, self._channel, self._slots = llm, channel, slots
        self._sent: dict[str, int] | None = None  # digests of the latest update; None if it is incomplete
        self.unproven: list[str] = []

    def take(self, first: Message) -> str | None:
        """Load buckets as they arrive, through vLLM's weight-transfer interface. No decode step may be in progress.

        Args:
            first: the first message: `bucket` or `done`.

        Returns:
            The reason why the engine does not have all parameters as they were sent; `None` if it has.
        """
        self._sent, received = None, set[str]()
        self._llm.start_weight_update()
        word, *arguments = first
        while word == "bucket":
            slot, size, tensors, handle = arguments
            path = f"/proc/{os.getpid()}/fd/{self._slots[slot]}"
            received |= {name for name, *_ in tensors}
            bucket = {"path": path, "size": size, "tensors": tensors, "handle": handle}
            self._llm.update_weights({"update_info": bucket})
            self._channel.send("free", slot)
            word, *arguments = self._channel.connection.recv()
        self._llm.finish_weight_update()  # also after an incomplete update: vLLM needs it before the next one
        complete, sent = arguments if word == "done" else (False, {})
        answers: list[WorkerAnswer] = self._llm.collective_rpc("loaded_weights")
        problem = next((answer.problem for answer in answers if answer.problem is not None), None)
        if problem is None and not complete:
            problem = "the sender stopped before the last bucket"
        if problem is None and (lost := sorted(sent.keys() - received)):
            problem = f"{', '.join(lost[:8])} ({len(lost)} in all) did not arrive."
        problem = problem or difference(sent, answers)
        if problem is None:
            self._sent = sent
            self.unproven = sorted(set.intersection(*(set(answer.unproven) for answer in answers)))
        return problem

    def prove_again(self) -> None:
        """Compare the workers' weights with those sent last, after their memory was freed and taken again.

        Raises:
            RuntimeError: the weights differ.
        """
        if self._sent is None:
            raise RuntimeError("the engine woke without weights, and got none")
        answers: list[WorkerAnswer] = self._llm.collective_rpc("loaded_weights")
        problem = next((answer.problem for answer in answers if answer.problem is not None), None)
        if problem := problem or difference(self._sent, answers):
            raise RuntimeError(f"the engine woke with other weights than it slept with: {problem}")


def difference(sent: Mapping[str, int], answers: Sequence[WorkerAnswer]) -> str | None:
    """A sentence that says how the workers' weights differ from those sent; `None` if they do not.

    Args:
        sent: digests of whole tensors.
        answers: answers of all workers of the engine. A part that several workers hold must be the same in each.
    """
    wrong: dict[str, str] = {}
    for name, digest in sent.items():
        parts: dict[PartKey, set[int]] = {}
        for answer in answers:
            for key, number in answer.digests.get(name, ()):
                parts.setdefault(key, set()).add(number)
        if len(parts) > 1:  # the whole tensor, from a worker that received it but holds no part of it
            parts.pop((), None)
        if any(len(numbers) > 1 for numbers in parts.values()):
            differing = next(numbers for numbers in parts.values() if len(numbers) > 1)
            wrong[name] = f"copies of one part of it have the digests {', '.join(map(hexadecimal, sorted(differing)))}"
        elif (lies := total(number for (number,) in parts.values())) != digest:
            wrong[name] = f"its digest is {hexadecimal(lies)} in the engine and {hexadecimal(digest)} in the trainer"
    if not wrong:
        return None
    name, how = next(iter(wrong.items()))
    return f"{name} does not lie in the engine as it was sent: {how} ({len(wrong)} of {len(sent)} tensors differ)."
