"""Collectives over a tree of messages: every rank gets the value, and sends a number of messages that does not grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from mailboxes import Mailbox, Mailboxes, on_ranks

from trl_realloc.runtime.messages import all_reduce, broadcast


def on_every_rank(ranks: Sequence[int], work: Callable[[int, Mailbox], Any]) -> tuple[list[Any], Mailboxes]:
    """What each rank's work returned, and the messages."""
    boxes = Mailboxes()
    return on_ranks(ranks, lambda rank: work(rank, boxes.of(rank))), boxes


@pytest.mark.parametrize("ranks", [range(1), range(2), range(3, 10), (5, 2, 9, 1), range(33)])
def test_the_first_ranks_value_reaches_all_and_a_rank_sends_two_messages_at_most(ranks: Sequence[int]) -> None:
    results, boxes = on_every_rank(ranks, lambda rank, box: broadcast(box, ranks, rank, {"from": rank}, 7))
    assert results == [{"from": ranks[0]}] * len(ranks)
    assert max(boxes.sent.values(), default=0) <= 2 and boxes.sent.total() == len(ranks) - 1


@pytest.mark.parametrize("ranks", [range(1), range(2), range(3, 10), (5, 2, 9, 1), range(33)])
def test_a_combination_is_of_every_rank_once_and_a_rank_sends_three_messages_at_most(ranks: Sequence[int]) -> None:
    results, boxes = on_every_rank(
        ranks, lambda rank, box: all_reduce(box, ranks, rank, [rank], lambda a, b: sorted(a + b), 7)
    )
    assert results == [sorted(ranks)] * len(ranks)
    assert max(boxes.sent.values(), default=0) <= 3 and boxes.sent.total() == 2 * (len(ranks) - 1)


def test_two_collectives_in_a_row_do_not_mix() -> None:
    def work(rank: int, box: Mailbox) -> tuple[int, int]:
        first = all_reduce(box, range(7), rank, rank, max, 3)
        return first, all_reduce(box, range(7), rank, -rank, min, 3)

    results, _ = on_every_rank(range(7), work)
    assert results == [(6, -6)] * 7
