"""A child process's end: what of it is removed, and what is not its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trl_realloc.engines import child_process as process
from trl_realloc.engines.child_process import (
    JOB_SIGNALS,
    end,
    remove_shared_memory_names,
    session_members,
    started_at,
    stopped,
)


SHARES = """
    import mmap, sys, time
    from multiprocessing import shared_memory
    held = []
    for path in sys.argv[1:]:
        file = open(path, "r+b")
        held.append(mmap.mmap(file.fileno(), 0))
    memory = shared_memory.SharedMemory(create=True, size=4096)
    print(memory.name, flush=True)
    time.sleep(60)
    """


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[Path], Path]]:
    """A process with shared memory of its own, and files in /dev/shm that it has only mapped; the latter of a user's
    model, an environment's folder, and another program's shared memory from before."""
    mine = Path("/dev/shm", f"trl_realloc_test_{os.getpid()}")
    mine.mkdir()
    theirs = [mine / "libuser.so", Path(f"{mine}.safetensors"), Path("/dev/shm", f"psm_{os.getpid():08x}")]
    for path in theirs:
        path.write_bytes(b"x" * 4096)
    time.sleep(1.2)
    command = [sys.executable, "-c", textwrap.dedent(SHARES), *map(str, theirs)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert started.stdout is not None
    yield started, theirs, Path("/dev/shm", started.stdout.readline().decode().strip())
    started.kill()
    started.wait()
    started.stdout.close()
    for path in theirs:
        path.unlink(missing_ok=True)
    mine.rmdir()


def test_only_shared_memory_of_the_process_is_unlinked(child: tuple[subprocess.Popen[bytes], list[Path], Path]) -> None:
    started, theirs, shared = child
    assert shared.exists()
    remove_shared_memory_names(session_members(started.pid), started_at(started.pid))
    assert not shared.exists() and all(path.exists() for path in theirs)


def test_the_start_of_a_process_is_not_when_it_was_first_looked_at() -> None:
    begun = time.time()
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    existed = time.time()
    time.sleep(1.5)
    assert begun - 0.1 < started_at(started.pid) < existed + 0.1, "the kernel counts hundredths of a second"
    started.kill()
    started.wait()


def test_a_stopped_process_of_a_session_is_found(child: tuple[subprocess.Popen[bytes], list[Path], Path]) -> None:
    pid = child[0].pid
    assert not stopped(pid)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    assert stopped(pid) == [pid]
    os.kill(pid, signal.SIGCONT)


def test_a_process_that_the_kernel_does_not_let_go_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    monkeypatch.setattr(process, "session_members", lambda session: [session])
    begun = time.monotonic()
    end(started, grace_s=0.1, patience_s=0.2)
    assert time.monotonic() - begun < 30
    started.wait()


def test_a_child_outlives_the_signals_of_its_job_from_its_first_instruction(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        started = process.spawn([sys.executable, "-c", "import time; time.sleep(60)"], {**os.environ}, log, [])
        for _ in range(5):
            for number in JOB_SIGNALS:
                os.kill(started.pid, number)
            time.sleep(0.05)
        assert started.poll() is None
        end(started)


RANK = """
    import os, signal, sys, time
    from trl_realloc.engines.child_process import die_with_launcher
    if sys.argv[1] == "handles":
        signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(0)))
    die_with_launcher()
    print("ready", flush=True)
    time.sleep(60)
    """


@pytest.mark.parametrize("handles", [True, False])
def test_a_rank_that_handles_sigterm_gets_it_when_its_launcher_ends(tmp_path: Path, handles: bool) -> None:
    """As `accelerate launch` of one process, which SIGTERM ends at once. Other ranks are killed."""
    rank = [sys.executable, "-c", textwrap.dedent(RANK), "handles" if handles else ""]
    launch = f"import subprocess; subprocess.Popen({rank!r}).wait()"
    environment = {**os.environ, "ACCELERATE_MIXED_PRECISION": "no"}
    launcher = subprocess.Popen([sys.executable, "-c", launch], env=environment, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"ready\n"
    launcher.kill()
    assert launcher.stdout.read().decode().strip() == ("saved" if handles else ""), "until the rank has ended"
    launcher.wait()
    launcher.stdout.close()
