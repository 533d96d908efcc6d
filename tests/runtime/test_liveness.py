"""What a watchdog makes of signs of life: when they are a failure, and of which cause it is."""

from __future__ import annotations

import signal

import pytest

from trl_realloc.engines.child_process import JOB_SIGNALS
from trl_realloc.runtime.failures.liveness import START_S, Liveness, Verdict


LIMIT_S = 30.0


def job(ranks: int = 3) -> Liveness:
    """`ranks` ranks, the first on host a, the others on host b, all heard at 0."""
    made = Liveness(ranks, LIMIT_S, 0.0)
    for rank in range(ranks):
        made.hear(rank, 0.0, host="ab"[rank > 0], pid=100 + rank, activity=f"actor.train of update {rank}")
    return made


def after(made: Liveness, seconds: float, silent: tuple[int, ...] = (), **of_rank_1: object) -> list[Verdict]:
    """Let time pass, a sign of life of every rank but the `silent` each second."""
    verdicts, now = [], made.now
    while made.now < now + seconds:
        at = made.now + 1.0
        for rank in set(range(made.world_size)) - set(silent):
            if not made.ranks[rank].ended:
                made.hear(rank, at, **(of_rank_1 if rank == 1 else {}))
        verdicts += [verdict] if (verdict := made.judge(at)) else []
    return verdicts


def test_ranks_that_are_heard_may_do_one_thing_for_days() -> None:
    assert after(job(), 2 * 24 * 3600) == []


def test_silent_ranks_of_one_host_are_one_sentence_after_the_limit() -> None:
    made = job()
    assert after(made, LIMIT_S, silent=(1, 2)) == []
    (verdict,) = after(made, 3, silent=(1, 2))
    assert verdict.fatal and "ranks 1, 2 on host b for 30 s (heartbeat_timeout)" in verdict.sentence
    assert "last in actor.train of update 1" in verdict.sentence
    assert after(made, 100, silent=(1, 2)) == [], "it is said once"


def test_a_rank_may_begin_minutes_after_the_others() -> None:
    made = Liveness(3, LIMIT_S, 0.0)
    for rank in range(2):
        made.hear(rank, 0.0, host="a", pid=100 + rank)
    assert after(made, START_S - 1, silent=(2,)) == []
    (verdict,) = after(made, 4, silent=(2,))
    assert verdict.fatal and verdict.sentence.startswith("rank 2 did not begin within 600 s after rank 0")
    in_time = Liveness(3, LIMIT_S, 0.0)
    for rank in range(2):
        in_time.hear(rank, 0.0, host="a", pid=100 + rank)
    assert after(in_time, START_S - 1, silent=(2,)) == []
    in_time.hear(2, in_time.now, host="b", pid=102)
    assert after(in_time, 100) == []
    (verdict,) = after(in_time, LIMIT_S + 3, silent=(2,))
    assert "nothing was heard from rank 2 on host b for 30 s" in verdict.sentence


def test_a_silence_of_less_than_the_limit_is_survived() -> None:
    made = job()
    assert after(made, LIMIT_S - 1, silent=(1, 2)) == [] and after(made, 100) == []


def test_a_watchdog_that_was_paused_itself_blames_nobody() -> None:
    made = job()
    assert made.judge(1000.0) is None and after(made, 100) == []


def test_a_stopped_rank_is_named_but_not_a_job_that_was_suspended_whole() -> None:
    (verdict,) = after(job(), 3, stopped_s=31.0)
    assert "rank 1 on host b (pid 101) has been stopped by a signal (SIGSTOP) for 31 s in" in verdict.sentence
    suspended = job()
    for rank in range(3):
        suspended.hear(rank, 0.0, stopped_s=31.0)
    assert suspended.judge(1.0) is None


def test_a_stopped_launcher_is_a_failure() -> None:
    (verdict,) = after(job(), 3, launcher_stopped_s=31.0)
    assert "the launcher of rank 1 on host b has been stopped" in verdict.sentence


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (signal.SIGKILL, "rank 1 on host b (pid 101) was ended by SIGKILL (the kernel's out-of-memory killer sends"),
        (signal.SIGSEGV, "was ended by SIGSEGV in actor.train of update 1."),
        (3 << 8, "ended with exit status 3 in actor.train of update 1."),
        (None, "ended for an unknown reason in actor.train of update 1."),
    ],
)
def test_how_a_rank_ended_is_said_with_its_call(status: int | None, sentence: str) -> None:
    made = job()
    made.end(1, 0.5, status, is_exiting=False)
    (verdict,) = after(made, 3)
    assert verdict.fatal and sentence in verdict.sentence


def test_ranks_that_end_well_are_not_missed() -> None:
    made = job()
    made.end(1, 0.5, 0, is_exiting=True)
    made.end(2, 0.5, None, is_exiting=True)
    made.lose(1, 0.6)
    assert after(made, 100) == []


@pytest.mark.parametrize("ending", JOB_SIGNALS)
def test_the_first_cause_is_preferred_to_what_follows_from_it(ending: signal.Signals) -> None:
    """The launcher ends the other ranks and gloo says "connection reset", perhaps before the cause is heard."""
    made = job()
    made.error(0.1, "rank 0 on host a lost a connection in critic.train: reset by peer", 1, network=True)
    made.end(2, 0.2, ending, is_exiting=False)
    made.end(1, 0.3, signal.SIGKILL, is_exiting=False)
    (verdict,) = after(made, 10)
    assert "rank 1 on host b (pid 101) was ended by SIGKILL" in verdict.sentence


@pytest.mark.parametrize("status", [signal.SIGKILL, None])
def test_a_rank_that_nccl_aborts_has_lost_another_one(status: int | None) -> None:
    """NCCL ends a rank by SIGABRT when a peer is gone, perhaps before that end is heard; the launcher the rest."""
    made = job()
    made.end(2, 0.1, signal.SIGABRT, is_exiting=False)
    made.end(0, 0.2, signal.SIGTERM, is_exiting=False)
    if status is not None:
        made.end(1, 0.4, status, is_exiting=False)
    (verdict,) = after(made, 10)
    cause = "rank 2 on host b (pid 102) was ended by SIGABRT"
    assert (cause if status is None else "rank 1 on host b (pid 101) was ended by SIGKILL") in verdict.sentence


def test_a_lost_connection_is_the_cause_where_no_other_is_found() -> None:
    made = job()
    made.error(0.1, "rank 0 lost a connection", 1, network=True)
    assert [v.sentence for v in after(made, 10)] == ["rank 0 lost a connection"]


def test_an_exception_can_be_caught_on_all_ranks_and_does_not_end_the_next_runtime() -> None:
    made = job()
    made.error(0.1, "rank 1 failed", 1, network=False)
    (verdict,) = after(made, 3)
    assert verdict == Verdict("rank 1 failed", fatal=False, generation=1)
    made.error(made.now, "rank 2 failed for the same reason", 1, network=False)
    assert after(made, 3) == []
    made.error(made.now, "rank 2 failed in another", 2, network=False)
    assert [v.sentence for v in after(made, 3)] == ["rank 2 failed in another"]


def test_when_a_rank_ends_because_of_an_exception_the_rest_ends_with_the_exceptions_sentence() -> None:
    made = job()
    made.error(0.1, "rank 1 failed", 1, network=False)
    assert [v.fatal for v in after(made, 3)] == [False]
    made.end(1, made.now, 1 << 8, is_exiting=True)
    assert [(v.sentence, v.fatal) for v in after(made, 3)] == [("rank 1 failed", True)]


def test_all_are_leaving_when_each_has_ended_or_said_so() -> None:
    made = job()
    made.end(0, 0.1, 0, is_exiting=True)
    made.hear(1, 0.1, leaving=2)
    assert not made.all_leaving(2)
    made.hear(2, 0.1, leaving=2)
    assert made.all_leaving(2) and not made.all_leaving(3)
