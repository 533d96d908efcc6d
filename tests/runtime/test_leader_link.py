"""The connection between the ranks and rank 0, which orders what they do while samples are generated."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest
from mailboxes import Mailboxes

from trl_realloc.runtime.messages import EVENTS, Channels
from trl_realloc.runtime.overlap.leader_link import Leader, LeaderLink, Left


LIMIT_S = 60.0


@dataclass(frozen=True)
class End:
    """The last task of a rank."""


class EndsAll(Leader[Left, End]):
    """Ends the part of every rank when one has left."""

    def __init__(self, channels: Channels) -> None:
        super().__init__(channels, {0, 1, 2})
        self.listen(2, "leader")

    def report(self, event: Left) -> None:
        for rank in self.ranks:
            self.send(rank, End())


def three_ranks() -> tuple[list[Channels], EndsAll, list[LeaderLink[Left, End]]]:
    boxes = Mailboxes(LIMIT_S)
    channels = [Channels(boxes.of(rank), (), rank, 3) for rank in range(3)]
    leader = EndsAll(channels[0])
    links: list[LeaderLink[Left, End]] = [LeaderLink(each, None if each.rank else leader, End) for each in channels]
    return channels, leader, links


def test_tasks_reach_every_rank_and_the_leader_waits_for_all() -> None:
    _, leader, links = three_ranks()
    links[1].report(Left())
    assert [link.next_task(LIMIT_S) for link in links] == [End()] * 3
    links[2].report(Left())
    leader.wait()


def test_if_rank_0_cannot_receive_events_every_rank_that_waits_for_tasks_learns_it_at_once() -> None:
    channels, leader, links = three_ranks()
    channels[1].about(EVENTS).send(b"what no rank sends", 0)
    for link in links[1:]:
        with pytest.raises(RuntimeError, match="rank 0 failed to schedule the next task: UnpicklingError"):
            link.next_task(LIMIT_S)
    with pytest.raises(pickle.UnpicklingError):
        links[0].next_task(LIMIT_S)
    with pytest.raises(pickle.UnpicklingError):
        leader.wait()
