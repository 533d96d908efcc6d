"""Messages of bytes between ranks: by tag (`Messages`), and by what they are about (`Channels`). `broadcast` and
`all_reduce` are collectives along a binary tree.

With gloo's object collectives a rank sends as many messages as there are ranks. Along the tree it sends at most three.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist


T = TypeVar("T")

EVENTS = "events"  # what ranks tell the rank that schedules their tasks (`overlap.leader_link`)
TASKS = "tasks"  # its answers
ROWS = "rows"  # samples that the first rank of a replica forwards in a stream
PARTIAL = "partial"  # samples that are under way, for a checkpoint
_ALL_RANKS = "all ranks"  # collectives
_SUBJECTS = (EVENTS, TASKS, ROWS, PARTIAL, _ALL_RANKS)


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


class Channel:
    """The messages under one tag."""

    def __init__(self, messages: Messages, tag: int) -> None:
        self._messages, self._tag = messages, tag

    def send(self, content: bytes, rank: int) -> None:
        """Send to a rank. Does not wait."""
        self._messages.send(content, rank, self._tag)

    def receive(self, rank: int) -> bytes:
        """The next message of a rank. Waits for it."""
        return self._messages.receive(rank, self._tag)

    def receive_any(self) -> tuple[int, bytes]:
        """The next message of any other rank, and the rank. Waits for it."""
        return self._messages.receive_any(self._tag)


class Channels:
    """One rank's messages about samples, a channel for each subject. All of their tags are chosen here.

    Batches that are under way together may share channels, if all ranks use a channel batch by batch in one order.

    Args:
        calls: names of the plan's calls, in the same order on every rank.
        world: number of ranks.
        series: series 0 has tags of its own; any other shares them with those `SERIES` further on.
    """

    SERIES = (1 << 16) - 1

    def __init__(self, messages: Messages, calls: Sequence[str], rank: int, world: int, series: int = 0) -> None:
        self.messages, self.calls, self.rank, self.world, self.series = messages, tuple(calls), rank, world, series
        subjects = [*((call, of) for call in self.calls for of in ("inputs", "outputs")), *_SUBJECTS]
        first = len(subjects) * (1 + (series - 1) % self.SERIES if series else 0)
        self._tags = {subject: first + number for number, subject in enumerate(subjects)}

    def inputs(self, call: str) -> Channel:
        """The samples that a call reads."""
        return Channel(self.messages, self._tags[call, "inputs"])

    def outputs(self, call: str) -> Channel:
        """The samples that a call made."""
        return Channel(self.messages, self._tags[call, "outputs"])

    def about(self, subject: str) -> Channel:
        """The messages about one of `_SUBJECTS`."""
        return Channel(self.messages, self._tags[subject])

    def twin(self, *, apart: bool = False) -> Channels:
        """The same channels, whose `flush` waits only for their messages; or channels of the next series (`apart`),
        which never mix with these."""
        return Channels(self.messages.twin(), self.calls, self.rank, self.world, self.series + apart)

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank. All ranks together."""
        return broadcast(self.messages, range(self.world), self.rank, value, self._tags[_ALL_RANKS])

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks in rank order. All ranks together."""
        ranks, local = range(self.world), {self.rank: value}
        values = all_reduce(self.messages, ranks, self.rank, local, lambda a, b: {**a, **b}, self._tags[_ALL_RANKS])
        return [values[rank] for rank in ranks]

    def flush(self) -> None:
        """Wait until all messages have been received. Must be called before the channels are deleted, because gloo
        drops messages in flight on deletion, and other ranks would wait for them."""
        self.messages.flush()


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
    """
    parent, children = _relatives(ranks, rank)
    for child in children:
        value = combine(value, pickle.loads(messages.receive(child, tag)))
    if parent is not None:
        messages.send(pickle.dumps(value), parent, tag)
    return broadcast(messages, ranks, rank, value, tag)


def _relatives(ranks: Sequence[int], rank: int) -> tuple[int | None, list[int]]:
    """(parent, children) of a rank in the binary tree over `ranks`."""
    index = ranks.index(rank)
    children = [ranks[i] for i in (2 * index + 1, 2 * index + 2) if i < len(ranks)]
    return ranks[(index - 1) // 2] if index else None, children
