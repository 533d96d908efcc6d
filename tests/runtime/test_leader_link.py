"""The connection between the ranks and rank 0, which orders what they do while samples are generated."""

from __future__ import annotations

import pickle
import queue
from dataclasses import dataclass
from typing import Any

import pytest

from trl_realloc.runtime.overlap.leader_link import Leader, LeaderLink, Left


TAG, LIMIT_S = 7, 60.0


@dataclass(frozen=True)
class End:
    """The last task of a rank."""


class Wires:
    """Messages between the ranks of one process."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], queue.SimpleQueue[tuple[int, bytes]]] = {}

    def at(self, rank: int, tag: int) -> queue.SimpleQueue[tuple[int, bytes]]:
        return self._queues.setdefault((rank, tag), queue.SimpleQueue())


class Messages:
    def __init__(self, wires: Wires, rank: int) -> None:
        self._wires, self._rank = wires, rank

    def send(self, content: bytes, rank: int, tag: int) -> None:
        self._wires.at(rank, tag).put((self._rank, content))

    def receive(self, rank: int, tag: int) -> bytes:
        return self._wires.at(self._rank, tag).get(timeout=LIMIT_S)[1]

    def receive_any(self, tag: int) -> tuple[int, bytes]:
        return self._wires.at(self._rank, tag).get(timeout=LIMIT_S)


class EndsAll(Leader[Left, End]):
    """Ends the part of every rank when one has left."""

    def __init__(self, messages: Any) -> None:
        super().__init__(messages, TAG, {0, 1, 2})
        self.listen(2, "leader")

    def report(self, event: Left) -> None:
        for rank in self.ranks:
            self.send(rank, End())


def three_ranks() -> tuple[Wires, EndsAll, list[LeaderLink[Left, End]]]:
    wires = Wires()
    messages: list[Any] = [Messages(wires, rank) for rank in range(3)]
    leader = EndsAll(messages[0])
    links: list[LeaderLink[Left, End]] = [
        LeaderLink(messages[rank], TAG, None if rank else leader, End) for rank in range(3)
    ]
    return wires, leader, links


def test_tasks_reach_every_rank_and_the_leader_waits_for_all() -> None:
    _, leader, links = three_ranks()
    links[1].report(Left())
    assert [link.next_task(LIMIT_S) for link in links] == [End()] * 3
    links[2].report(Left())
    leader.wait()


def test_if_rank_0_cannot_receive_events_every_rank_that_waits_for_tasks_learns_it_at_once() -> None:
    wires, leader, links = three_ranks()
    wires.at(0, TAG).put((1, b"what no rank sends"))
    for link in links[1:]:
        with pytest.raises(RuntimeError, match="rank 0 failed to schedule the next task: UnpicklingError"):
            link.next_task(LIMIT_S)
    with pytest.raises(pickle.UnpicklingError):
        links[0].next_task(LIMIT_S)
    with pytest.raises(pickle.UnpicklingError):
        leader.wait()
