"""A child process that cannot outlive its parent, and leaves nothing behind: how it is started, watched and ended.

Knows nothing of what the child does. Linux only: it rests on PR_SET_PDEATHSIG and /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any


# What a launcher (torchrun, accelerate, DeepSpeed) tells its ranks. A child that reads these believes it is a rank:
# with TORCHELASTIC_USE_AGENT_STORE alone, vLLM waits for a store that never comes.
_LAUNCHER_NAMES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"})
_LAUNCHER_PREFIXES = ("ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_", "OMP_", "GOMP_", "KMP_")
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends; exit at once if it already has.

    Args:
        parent_pid: who should be the parent. It may have ended before this call, and then no signal would come.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def die_with_launcher() -> None:
    """Tie this rank to `torchrun` or `accelerate launch`, if one started it: killed with -9, a launcher ends nobody,
    and its ranks would train on with nobody to stop them."""
    if os.path.exists("/proc/self") and {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys():
        die_with_parent(os.getppid())


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment less what a launcher told this rank, its OpenMP threads included."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }


def spawn(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes], keep_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, stdout and stderr to `log`, with only `keep_fds` open besides.

    A thread that lives as long as the child starts it: PR_SET_PDEATHSIG fires when the *thread* that forked ends, so a
    child started from a short-lived thread would die with that.
    """
    started: list[subprocess.Popen[bytes] | BaseException] = []
    ready = threading.Event()

    def keep() -> None:
        try:
            child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=keep_fds,
                start_new_session=True,
            )
        except BaseException as error:
            started.append(error)
            ready.set()
            return
        started.append(child)
        ready.set()
        child.wait()

    threading.Thread(target=keep, name=f"keeper of {command[0]}", daemon=True).start()
    ready.wait()
    if isinstance(started[0], BaseException):
        raise started[0]
    return started[0]


def session_members(session: int) -> list[int]:
    """The living processes of a session (that of a spawned child is its pid); zombies have ended and do not count."""
    members = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        state, sid = _state_and_session(pid)
        if sid == session and state not in "ZX":
            members.append(pid)
    return members


def stopped(session: int) -> list[int]:
    """The processes of a session that are stopped by a signal (SIGSTOP)."""
    return [pid for pid in session_members(session) if _state_and_session(pid)[0] == "T"]


def _state_and_session(pid: int) -> tuple[str, int]:
    """A process's state by its letter in /proc, and its session; `("X", 0)` of one that has ended."""
    with contextlib.suppress(OSError):
        # pid (name, which may hold anything) state ppid pgrp session ...
        state, _, _, sid = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[:4]
        return state, int(sid)
    return "X", 0


# What the kernel lists under /dev/shm of an engine: Python's shared memory and semaphores, vLLM's own segments on the
# CPU. Of other names nothing is ours: an environment, a compiler's cache, a model that a user staged there.
_SHARED_NAMES = re.compile(r"psm_[0-9a-f]+|sem\.[\w.-]+|[^/]*-cpushm[_\d]*|torch_\d+_\d+_\d+")


def shared_memory(pids: Iterable[int], since: float) -> set[Path]:
    """The files in /dev/shm, not in its folders, that these processes have mapped to share with each other: named as
    Python, torch or vLLM name such, not executable, and made after `since` (seconds since the epoch).
    """
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path("/proc", str(pid), "maps").read_text().splitlines():
                _, permissions, *_, name = line.split(maxsplit=5) if line.count(" ") > 4 else ("", "", "")
                path = Path(name)
                ours = path.parent == Path("/dev/shm") and _SHARED_NAMES.fullmatch(path.name)
                if not ours or not permissions.endswith("s") or "x" in permissions:
                    continue
                with contextlib.suppress(OSError):  # "... (deleted)" among them
                    status = path.stat()
                    if status.st_ctime >= since - 1 and status.st_uid == os.getuid():
                        found.add(path)
    return found


def started_at(pid: int) -> float:
    """When a process was started, in seconds since the epoch."""
    try:
        # field 22, in ticks since the machine's start
        ticks = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def unlink_shared_memory(pids: Iterable[int], since: float) -> None:
    """Remove the names of the shared memory that these processes made; the mappings themselves stay valid."""
    for path in shared_memory(pids, since):
        with contextlib.suppress(OSError):
            path.unlink()


def end(child: subprocess.Popen[bytes], grace_s: float = 3.0, patience_s: float = 10.0) -> None:
    """Kill a spawned child and all of its session, and unlink the shared memory they had.

    First the child alone: what it started dies with it, but for Python's resource tracker, which then unlinks the
    semaphores and segments it knows of. After `grace_s` seconds, whatever is left. A process that the kernel does not
    let go (in state D, in a driver) ends when that returns; after `patience_s` more it is not waited for.
    """
    unlink_shared_memory(session_members(child.pid), started_at(child.pid))  # a dead process has no maps to read
    child.kill()
    begun = time.monotonic()
    killed = False
    while session_members(child.pid):
        if not killed and time.monotonic() - begun > grace_s:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            killed = True
        if time.monotonic() - begun > grace_s + patience_s:
            return
        time.sleep(0.02)
    child.wait()


def how_it_ended(child: subprocess.Popen[Any]) -> str:
    """For an error message: "was ended by SIGKILL", "ended with exit status 1", "is still running"."""
    code = child.poll()
    if code is None:
        return "is still running"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def tail(log: IO[bytes], lines: int = 30) -> str:
    """The last lines of a log that another process writes through the same descriptor."""
    size = os.fstat(log.fileno()).st_size
    start = max(0, size - 16384)
    text = os.pread(log.fileno(), size - start, start).decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
