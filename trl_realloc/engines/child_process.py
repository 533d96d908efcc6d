"""Starts, watches and ends a child process that does not outlive its parent and leaves no shared memory behind.

What the child runs is in `generation/vllm_host`. Linux only: uses PR_SET_PDEATHSIG and /proc.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any


Message = tuple[Any, ...]  # between a process and its child: a word, and its values

# The variables that a launcher (torchrun, accelerate, DeepSpeed) sets for its ranks. A child that reads them behaves as
# a rank: with TORCHELASTIC_USE_AGENT_STORE alone, vLLM waits forever for a store.
_LAUNCHER_NAMES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"})
_LAUNCHER_PREFIXES = ("ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_", "OMP_", "GOMP_", "KMP_")
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
# Signals with which a cluster, a launcher or a terminal ends or warns a job. Clusters send them to every process.
JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel kill this process when its parent ends; exit at once if the parent has already ended.

    Args:
        parent_pid: the expected parent. If it ended before this call, the kernel would send no signal.
        number: the signal that the kernel sends.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


@contextlib.contextmanager
def job_signals_blocked() -> Iterator[None]:
    """Block `JOB_SIGNALS` in this thread. A child that is started inside has them blocked from its first instruction,
    so it ends with its rank and not before: the rank may save a checkpoint first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_job_signals() -> None:
    """Ignore and block `JOB_SIGNALS` in this process and its children. To be called by the main thread.

    Neither is enough alone: vLLM's workers install handlers, Python's `multiprocessing` unblocks SIGTERM and SIGINT.
    """
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)


def obey_sigterm_of_parent(begin: Callable[[int], object] | None, worker: int) -> None:
    """The `worker_init_fn` of a data loader whose workers end at SIGTERM only if their parent sends it. A cluster sends
    it to all processes, and `torchrun` to the process groups of its ranks; `multiprocessing` does at a rank's exit, and
    waits for the end of the worker.

    Args:
        begin: the loader's other `worker_init_fn`, if it has one.
        worker: the worker's number.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def obey() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=obey, name="SIGTERM of the parent", daemon=True).start()
    if begin is not None:
        begin(worker)


def let_open_memory(pid: int) -> None:
    """Allow a child to take this process's file descriptors (`pidfd_getfd`), even if Linux allows that only to the
    parents of a process (Yama's `ptrace_scope` 1). With them it opens CUDA memory of torch's expandable segments."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)  # fails where there is no such rule


def die_with_launcher() -> None:
    """Make this rank end with `torchrun` or `accelerate launch`, if one started it. A launcher that is killed with
    SIGKILL does not end its ranks, which would continue training.

    A rank with a handler of SIGTERM gets that signal instead of SIGKILL: `accelerate launch` of one process ends
    at once when a cluster sends SIGTERM to all processes. It is killed after the time that torchrun would give it.
    """
    is_launched = {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys()
    if not os.path.exists("/proc/self") or not is_launched:
        return
    launcher = os.getppid()
    if not callable(signal.getsignal(signal.SIGTERM)):
        die_with_parent(launcher)
        return
    die_with_parent(launcher, signal.SIGTERM)

    def end_later() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        time.sleep(float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_later, name="end after the launcher", daemon=True).start()


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that a launcher set for this rank, including OpenMP's."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }


def spawn(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes], keep_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start `command` in a new session with `JOB_SIGNALS` blocked, stdout and stderr to `log`, and no other open file
    descriptors than `keep_fds`.

    A thread that lives as long as the child starts it: PR_SET_PDEATHSIG fires when the *thread* that forked ends, so a
    child started from a short-lived thread would die with that thread.
    """
    started: list[subprocess.Popen[bytes] | BaseException] = []
    ready = threading.Event()

    def keep() -> None:
        try:
            with job_signals_blocked():
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
    """The running processes of a session, without zombies. The session of a spawned child is its pid."""
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
    """A process's state (the letter in /proc) and its session; `("X", 0)` if it has ended."""
    with contextlib.suppress(OSError):
        # pid (name, which may hold anything) state ppid pgrp session ...
        state, _, _, sid = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[:4]
        return state, int(sid)
    return "X", 0


# Names of an engine's files in /dev/shm: shared memory and semaphores of Python, segments of torch and of vLLM on the
# CPU. Other files there may be an environment, a compiler's cache, or a user's model.
_SHARED_NAMES = re.compile(r"psm_[0-9a-f]+|sem\.[\w.-]+|[^/]*-cpushm[_\d]*|torch_\d+_\d+_\d+")


def shared_memory(pids: Iterable[int], since: float) -> set[Path]:
    """The shared memory of these processes: files in /dev/shm (not in its folders) that they have mapped as shared,
    named by Python, torch or vLLM, not executable, and created after `since` (seconds since the epoch).
    """
    paths = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path("/proc", str(pid), "maps").read_text().splitlines():
                _, permissions, *_, name = line.split(maxsplit=5) if line.count(" ") > 4 else ("", "", "")
                path = Path(name)
                is_engine_file = path.parent == Path("/dev/shm") and _SHARED_NAMES.fullmatch(path.name)
                if not is_engine_file or not permissions.endswith("s") or "x" in permissions:
                    continue
                with contextlib.suppress(OSError):  # "... (deleted)" among them
                    status = path.stat()
                    if status.st_ctime >= since - 1 and status.st_uid == os.getuid():
                        paths.add(path)
    return paths


def started_at(pid: int) -> float:
    """The start time of a process, in seconds since the epoch; now, if it has ended."""
    try:
        # field 22: the start in clock ticks since the machine booted
        ticks = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def remove_shared_memory_names(pids: Iterable[int], since: float) -> None:
    """Unlink the files of the shared memory of these processes (`shared_memory`). Their mappings stay valid."""
    for path in shared_memory(pids, since):
        with contextlib.suppress(OSError):
            path.unlink()


def end(child: subprocess.Popen[bytes], grace_s: float = 3.0, patience_s: float = 10.0) -> None:
    """Kill a spawned child and all processes of its session, and remove the names of their shared memory.

    The child is killed first. Its children die with it, except Python's resource tracker, which then unlinks the
    semaphores and segments that it tracks. The processes left after `grace_s` seconds are killed too. A process in
    uninterruptible sleep (state D, in a driver) ends when the driver returns; it is waited for `patience_s` seconds
    more.
    """
    # before the kill: an ended process has no maps
    remove_shared_memory_names(session_members(child.pid), started_at(child.pid))
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
    """The end of a process as a predicate: "was ended by SIGKILL", "ended with exit status 1", "is still running"."""
    code = child.poll()
    if code is None:
        return "is still running"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def tail(log: IO[bytes], lines: int = 30) -> str:
    """The last lines of a log that another process writes to through the same descriptor."""
    size = os.fstat(log.fileno()).st_size
    start = max(0, size - 16384)
    text = os.pread(log.fileno(), size - start, start).decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
