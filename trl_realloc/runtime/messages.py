"""Messages of bytes between ranks, and two collectives along a binary tree: `broadcast` and `all_reduce`.

With gloo's object collectives a rank sends as many messages as there are ranks. Along the tree it sends at most three.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist


T = TypeVar("T")


class Messages(Protocol):
    """Messages of one process. Messages with the same sender, receiver and tag arrive in the order of sending."""

    def send(self, content: bytes, rank: int, tag: int) -> None:
        """Send to a rank. Does not wait."""

    def receive(self, rank: int, tag: int) -> bytes:
        """The next message of a rank under a tag. Waits for it."""

    def receive_any(self, tag: int) -> tuple[int, bytes]:
        """The next message of any other rank under a tag, and the rank. Waits for it."""

    def flush(self) -> None:
        """Wait until all sent messages have been received."""

    def twin(self) -> Messages:
        """Another object for the same connections. Its `flush` waits only for messages that it sent."""


class GlooMessages:
    """`Messages` over a gloo group, from host memory. A message is its length and, unless it is empty, its content,
    under two of the group's tags.

    Args:
        group: a gloo group; `None` in a job of one process, which sends none.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        # handles, and buffers that must live until these are done
        self._sends: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, content: bytes, rank: int, tag: int) -> None:
        parts = [(2 * tag, torch.tensor([len(content)]))]
        if content:
            parts.append((2 * tag + 1, torch.frombuffer(bytearray(content), dtype=torch.uint8)))
        for part, buffer in parts:
            work = dist.isend(buffer, rank, group=self.group, tag=part)
            assert work is not None, "both ranks are in the group"
            self._sends.append((work, buffer))

    def receive(self, rank: int, tag: int) -> bytes:
        return self._receive(rank, tag)[1]

    def receive_any(self, tag: int) -> tuple[int, bytes]:
        return self._receive(None, tag)

    def _receive(self, rank: int | None, tag: int) -> tuple[int, bytes]:
        size = torch.zeros(1, dtype=torch.long)
        rank = dist.recv(size, rank, group=self.group, tag=2 * tag)
        if not int(size):
            return rank, b""
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(payload, rank, group=self.group, tag=2 * tag + 1)
        return rank, payload.numpy().tobytes()

    def twin(self) -> GlooMessages:
        return GlooMessages(self.group)

    def flush(self) -> None:
        for work, _buffer in self._sends:
            work.wait()
        self._sends.clear()


def broadcast(messages: Messages, ranks: Sequence[int], rank: int, value: T, tag: int) -> T:
    """The first rank's value, on every rank. All ranks call this together; the other ranks' values are ignored.

    Args:
        ranks: the participating ranks; in the same order on each.
        value: any picklable object.
    """
    parent, children = _relatives(ranks, rank)
    content = pickle.dumps(value) if parent is None and children else b""
    if parent is not None:
        content = messages.receive(parent, tag)
        value = pickle.loads(content)  # safe: from another rank of this job
    for child in children:
        messages.send(content, child, tag)
    return value


def all_reduce(
    messages: Messages, ranks: Sequence[int], rank: int, value: T, combine: Callable[[T, T], T], tag: int
) -> T:
    """The combination of all ranks' values, on every rank. All ranks call this together.

    Args:
        ranks: the participating ranks; in the same order on each.
        value: any picklable object.
        combine: associative function of two values. The order of its application depends only on the number of ranks.
        tag: tag of the messages; `tag + 1` is used too.
    """
    parent, children = _relatives(ranks, rank)
    for child in children:
        value = combine(value, pickle.loads(messages.receive(child, tag)))
    if parent is not None:
        messages.send(pickle.dumps(value), parent, tag)
    return broadcast(messages, ranks, rank, value, tag + 1)


def _relatives(ranks: Sequence[int], rank: int) -> tuple[int | None, list[int]]:
    """(parent, children) of a rank in the binary tree over `ranks`."""
    index = ranks.index(rank)
    children = [ranks[i] for i in (2 * index + 1, 2 * index + 2) if i < len(ranks)]
    return ranks[(index - 1) // 2] if index else None, children
