"""Ranks that share engines: every request is served once and answered where it came from, however many turns a rank
takes, and a failure of one rank ends the round on all of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mailboxes import Mailboxes

from trl_realloc.runtime.failures.alarm import JobFailed
from trl_realloc.runtime.samples.rounds import Rounds, divide


@st.composite
def jobs(draw: Any) -> tuple[list[int], list[int]]:
    """(counts, homes) of 1 to 6 ranks."""
    size = draw(st.integers(1, 6))
    servers = draw(st.sets(st.integers(0, size - 1), min_size=1))
    homes = [draw(st.sampled_from(sorted(servers))) for _ in range(size)]
    return [draw(st.integers(0, 9)) for _ in range(size)], homes


@given(jobs())
def test_every_request_has_one_server_and_no_server_more_than_its_share(job: tuple[list[int], list[int]]) -> None:
    counts, homes = job
    shares = divide(counts, homes)
    positions = [(share.source, at) for share in shares for at in range(share.start, share.stop)]
    assert positions == [(rank, at) for rank, count in enumerate(counts) for at in range(count)]
    assert len({(share.source, share.server) for share in shares}) == len(shares)
    served = Counter[int]()
    for share in shares:
        assert share.server in homes and share.stop > share.start
        served[share.server] += share.stop - share.start
    assert max(served.values(), default=0) <= -(-sum(counts) // len(set(homes)))


def test_requests_stay_with_their_home_where_the_load_is_even() -> None:
    assert [share.server for share in divide([4, 4, 4, 4], [0, 0, 2, 2])] == [0, 0, 2, 2]
    assert [share.server for share in divide([3, 2], [0, 1])] == [0, 1]


def on_all(size: int, homes: Sequence[int], work: Callable[[int, Rounds], Any], serve: Any = None) -> list[Any]:
    """What `work` returned or raised on every rank. `serve` is given the rank and the requests."""
    boxes, results = Mailboxes(timeout_s=20.0), dict[int, Any]()
    serve = serve or (lambda rank, requests: [(request, rank) for request in requests])

    def one(rank: int) -> None:
        rounds = Rounds(boxes.of(rank), range(size), rank, homes, lambda requests: serve(rank, requests))
        try:
            results[rank] = work(rank, rounds)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(results) == size, f"only ranks {sorted(results)} ended"
    return [results[rank] for rank in range(size)]


def test_ranks_that_take_no_one_and_three_turns_all_end_with_their_answers() -> None:
    turns = [0, 1, 3]

    def generation(rank: int, rounds: Rounds) -> list[list[Any]]:
        answers = []
        for turn in range(turns[rank]):
            answers.append(rounds.join([(rank, turn, at) for at in range(4 - turn)]))
        rounds.finish()
        return answers

    for answers, count, rank in zip(on_all(3, [0, 1, 0], generation), turns, range(3), strict=True):
        requests = [[request for request, _ in turn] for turn in answers]
        assert requests == [[(rank, turn, at) for at in range(4 - turn)] for turn in range(count)]
        assert {server for turn in answers for _, server in turn} <= {0, 1}


@settings(max_examples=30)
@given(jobs(), st.data())
def test_any_turns_in_any_generation_are_answered_in_order(job: tuple[list[int], list[int]], data: Any) -> None:
    _, homes = job
    plans = [data.draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=2, max_size=2)) for _ in homes]

    def run(rank: int, rounds: Rounds) -> list[list[Any]]:
        answers = []
        for number, turns in enumerate(plans[rank]):  # generations: between two of them all ranks finish
            answers += [
                rounds.join([(rank, number, turn, at) for at in range(size)]) for turn, size in enumerate(turns)
            ]
            rounds.finish()
        return answers

    for rank, answers in enumerate(on_all(len(homes), homes, run)):
        expected = [
            [(rank, number, turn, at) for at in range(size)]
            for number, turns in enumerate(plans[rank])
            for turn, size in enumerate(turns)
        ]
        assert [[request for request, _ in turn] for turn in answers] == expected


def test_without_finish_each_call_is_one_round() -> None:
    answers = on_all(2, [1, 1], lambda rank, rounds: [rounds.join([rank] * rank), rounds.join([rank])])
    assert answers == [[[], [(0, 1)]], [[(1, 1)], [(1, 1)]]]


def test_a_failure_while_serving_is_raised_on_every_rank_with_its_cause() -> None:
    def serve(rank: int, requests: list[Any]) -> list[Any]:
        if rank == 1:
            raise ValueError("the engine of rank 1 has died")
        return requests

    def run(rank: int, rounds: Rounds) -> None:
        if rank != 2:
            rounds.join([rank])
        rounds.finish()

    raised = on_all(3, [0, 1, 0], run, serve)
    assert [type(error) for error in raised] == [JobFailed, ValueError, JobFailed]
    assert {str(error) for error in raised} == {"the engine of rank 1 has died"}


@pytest.mark.parametrize("size", [1, 4])
def test_an_error_of_one_rank_is_every_ranks(size: int) -> None:
    def run(rank: int, rounds: Rounds) -> None:
        rounds.agree(None)
        rounds.agree(ValueError("no weights") if rank == size - 1 else None)

    raised = on_all(size, [0] * size, run)
    assert [type(error) for error in raised] == [JobFailed] * (size - 1) + [ValueError]
