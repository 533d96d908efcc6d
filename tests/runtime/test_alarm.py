"""Ranks and their watchdogs as processes: whatever ends or stops one of them ends the others, with its cause."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_realloc import Cluster, ReallocationPlugin
from trl_realloc.engines.base import EngineError
from trl_realloc.realloc.transfer import TransferError
from trl_realloc.runtime.failures import watchdog_client
from trl_realloc.runtime.failures.alarm import Alarm, in_words, is_network
from trl_realloc.runtime.failures.coordinator_watchdog import CoordinatorWatchdog
from trl_realloc.runtime.failures.liveness import Verdict
from trl_realloc.runtime.failures.message_socket import MessageSocket
from trl_realloc.runtime.failures.watchdog_client import HOST, WatchdogClient
from trl_realloc.trainer.run.planned_run import PlannedRun


Ranks = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Start two ranks, or another number, that do `what`."""
    started: list[subprocess.Popen[str]] = []

    def start(what: str, size: int = 2) -> list[subprocess.Popen[str]]:
        for rank in range(size):
            script, store = Path(__file__).parent / "rank.py", tmp_path / "store"
            command = [sys.executable, str(script), str(rank), str(size), str(store)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "LOCAL_WORLD_SIZE": "2"}
            started.append(subprocess.Popen([*command, what], text=True, env=environment, **pipes))  # type: ignore[call-overload]
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def outputs(processes: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """stdout and stderr of each; both are complete only when the watchdogs, which hold them too, have ended."""
    return [process.communicate(timeout=90) for process in processes]


def test_an_exception_on_one_rank_ends_those_that_hang_with_its_sentence(ranks: Ranks) -> None:
    """Where Python starts no thread any more, as 3.12 while a process ends."""
    processes = ranks("raise, without new threads")
    (_, hung), (_, failed) = outputs(processes)
    sentence = f"rank 1 on host {HOST} failed in actor.train of update 1: RuntimeError: no memory"
    here = "This rank ends for that reason; it was still in actor.train of update 0."
    assert f"[rank0] trl_realloc: {sentence}. {here}" in hung
    assert "RuntimeError: no memory" in failed and [p.returncode for p in processes] == [1, 1]
    assert "new thread" not in hung + failed


def test_a_killed_rank_ends_the_others_and_its_temporary_files_go(ranks: Ranks, tmp_path: Path) -> None:
    processes = ranks("die")
    (_, hung), _ = outputs(processes)
    pid = processes[1].pid
    assert f"[rank0] trl_realloc: rank 1 on host {HOST} (pid {pid}) was ended by SIGKILL" in hung
    assert "in actor.train of update 1. Resume from runs/checkpoint-7" in hung
    assert [p.returncode for p in processes] == [1, -signal.SIGKILL]
    assert {path.name for path in tmp_path.iterdir()} <= {"store"}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_a_launcher_ends_all_at_once_say_how_and_where(ranks: Ranks, how: signal.Signals) -> None:
    processes = ranks("hang")
    for process in processes:
        assert process.stdout is not None and int(process.stdout.readline()) == process.pid
    for process in processes:
        process.send_signal(how)
    text = "".join(stderr for _, stderr in outputs(processes))
    for_one_of_them = [
        f"rank {r} on host {HOST} (pid {p.pid}) was ended by {how.name} in" for r, p in enumerate(processes)
    ]
    assert any(sentence in text for sentence in for_one_of_them), text
    assert "Resume from runs/checkpoint-7" in text


def test_a_stopped_rank_ends_the_job_within_its_limit(ranks: Ranks) -> None:
    stopped = 0  # whose watchdog the others' listen to
    processes = ranks("hang")
    for process in processes:
        assert process.stdout is not None and int(process.stdout.readline()) == process.pid
    processes[stopped].send_signal(signal.SIGSTOP)
    other = outputs(processes)[1 - stopped][1]
    assert f"rank {stopped} on host {HOST} (pid {processes[stopped].pid}) has been stopped by a signal" in other
    assert f"in actor.train of update {stopped}; heartbeat_timeout is 5 s." in other
    assert processes[stopped].returncode == -signal.SIGKILL and processes[1 - stopped].returncode == 1


def test_of_a_process_alone_that_failed_the_watchdog_says_nothing(ranks: Ranks) -> None:
    """Its own message is there. It knows neither what the process was doing nor its newest checkpoint."""
    (process,) = ranks("fail", 1)
    _, said = outputs([process])[0]
    assert process.returncode == 1 and said.endswith("RuntimeError: a mistake of the user's\n"), said


def test_a_message_has_the_type_of_an_exception_that_is_not_this_packages() -> None:
    assert in_words(KeyError("score")) == "KeyError: 'score'" and in_words(ValueError()) == "ValueError"
    assert in_words(EngineError("no room")) == "no room" and in_words(EngineError()) == "EngineError"


def test_a_failure_that_is_caught_on_all_ranks_leaves_the_next_runtime_alone(ranks: Ranks) -> None:
    processes = ranks("caught twice")
    (first, _), (second, _) = outputs(processes)
    where = f"rank 0 on host {HOST} failed in actor.train of update 0"
    said = [f"{where}: RuntimeError: {word}" for word in ("first", "second")]
    assert first.splitlines()[1:] == ["first", "second"] and second.splitlines()[1:] == said
    assert [p.returncode for p in processes] == [0, 0]


def test_what_gloo_and_nccl_say_of_a_lost_rank_is_told_from_what_a_rank_did_itself() -> None:
    reset = RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:39021")
    error = TransferError("actor.train -> actor.generate: message failed")
    error.__cause__ = reset
    assert is_network(reset) and is_network(error)
    assert is_network(torch.distributed.DistBackendError("NCCL communicator was aborted"))
    assert not is_network(torch.OutOfMemoryError("CUDA out of memory")) and not is_network(ValueError("nan"))


@pytest.mark.parametrize("first", ["acknowledged", "verdict"])
def test_a_rank_that_deals_with_a_failure_by_an_exception_is_not_killed_for_it(first: str) -> None:
    """Its acknowledgement may reach its watchdog before the verdict does."""
    rank_end, watchdog_end = socket.socketpair()
    with rank_end, watchdog_end:
        settings = {"rank": 0, "world_size": 1, "pid": os.getpid(), "launcher": 0, "timeout_s": 5.0}
        watchdog = CoordinatorWatchdog(MessageSocket(watchdog_end), settings)
        steps = {
            "acknowledged": lambda: watchdog.receive_from_rank([{"acknowledged": 2}]),
            "verdict": lambda: watchdog.apply_verdict(Verdict("no memory", fatal=False, generation=2)),
        }
        for step in sorted(steps, key=lambda name: name != first):
            steps[step]()
        assert watchdog.kill_at == float("inf")
        watchdog.apply_verdict(Verdict("of the next runtime", fatal=False, generation=3))
        assert watchdog.kill_at < float("inf")


@pytest.mark.parametrize(
    ("local", "address", "hosts"),
    [
        ("1", "10.1.2.3", ["service", HOST, "10.1.2.3"]),
        ("1", "127.0.0.1", ["service", HOST]),
        ("2", "10.1.2.3", ["127.0.0.1"]),
    ],
)
def test_ranks_look_for_rank_0_by_the_address_that_its_groups_have_too(
    local: str, address: str, hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod's name may have no address elsewhere, and MASTER_ADDR may be a service that forwards one port."""
    client: Any = object.__new__(WatchdogClient)
    client.rank, client._lines, client._send = 0, io.StringIO('{"port": 7}\n'), lambda **message: None
    store: dict[str, str] = {}
    monkeypatch.setenv("MASTER_ADDR", "service")
    monkeypatch.setattr(watchdog_client, "gloo_address", lambda: address)
    client._configure({"everywhere": local == "1"}, SimpleNamespace(set=store.__setitem__))
    (published,) = store.values()
    assert json.loads(published)["addresses"] == [[host, 7] for host in hosts]


def test_a_failure_under_a_changed_plan_is_one_of_the_new_runtime() -> None:
    option: list[tuple[str, int]] = []
    watchdog: Any = SimpleNamespace(
        rank=0,
        activity="actor.train",
        report_error=lambda sentence, generation, network: option.append(("error", generation)),
        acknowledge=lambda generation: option.append(("known", generation)),
        leave=lambda *args: None,
    )
    closed: list[str] = []
    host: Any = SimpleNamespace(trainer=SimpleNamespace(is_in_train=False))
    setup: Any = None
    run: Any = PlannedRun(host, setup, ReallocationPlugin(), 0, Alarm(watchdog))
    plan = SimpleNamespace(cluster=Cluster(1, 2))
    run.placed.placement = SimpleNamespace(plan=plan, close=lambda: closed.append("old"))
    with pytest.raises(ValueError, match="no memory"), run.failing_together():
        run.placed.alarm = Alarm(watchdog)  # as a plan change makes one
        run.placed.placement = SimpleNamespace(plan=plan, close=lambda: closed.append("new"))
        raise ValueError("no memory")
    generation = run.placed.alarm.generation
    assert option == [("error", generation), ("known", generation)] and closed == ["new"]


def test_strangers_do_not_end_the_watchdog_of_rank_0() -> None:
    rank_end, watchdog_end = socket.socketpair()
    settings = {"rank": 0, "world_size": 2, "pid": os.getpid(), "launcher": 0, "timeout_s": 30.0, "token": "abc"}
    with rank_end:
        watchdog = CoordinatorWatchdog(
            MessageSocket(watchdog_end), {**settings, "everywhere": False, "error_file": None}
        )
        port = json.loads(rank_end.recv(1000).splitlines()[0])["port"]
        lines = [b"0\n", b"GET / HTTP/1.1\n", '{"hello": {"token": "é"}}\n'.encode(), b'{"hello": 3}\n', b"\xff\n"]
        lines += [b'{"hello": {"token": "abc", "rank": 7}}\n', b'{"hello": {"token": "abc", "rank": "1"}}\n']
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in lines]
        for stranger, line in zip(strangers, lines, strict=True):
            stranger.sendall(line)
        watchdog.receive_from_watchdogs()
        assert [peer.rank for peer in watchdog.peers if peer.is_open] == []
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.sendall(b'{"hello": {"token": "abc", "rank": 1}}\n')
            watchdog.receive_from_watchdogs()
            assert [peer.rank for peer in watchdog.peers if peer.is_open] == [1]
        for stranger in strangers:
            stranger.close()
