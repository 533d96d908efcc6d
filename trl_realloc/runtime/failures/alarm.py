"""One rank's failure, told to all: so every rank ends with the reason, and none waits for a rank that is gone.

The rank's side of its watchdog, a process of its own that exchanges signs of life with the other ranks'
(`watchdog`, which is also where a failure is recognised that no Python code of this process can see).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


HEARTBEAT_TIMEOUT_S = 30.0
HOST = socket.gethostname()
GRACE_S = 10.0  # how long a failed rank stays so that the others can say why; the launcher ends them after it
LEAVE_S = 5.0  # within which a rank leaves by itself what it does; it may be in a collective that never ends
_KEY = "trl_realloc/watchdog"
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
# How gloo, NCCL and the store put it that another process is gone, or did not answer in time.
_NETWORK_WORDS = (
    "gloo/transport",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "socket timeout",
    "recvvalue failed",
    "connection was likely closed",
    "nccl",
)


class JobFailed(RuntimeError):
    """Another rank failed. The message is that rank's.

    Args:
        is_unharmed: of a failure that every rank has heard of at the same place, before any role was trained: the run's
            state is good, and all ranks can save it together.
    """

    def __init__(self, message: str, is_unharmed: bool = False) -> None:
        super().__init__(message)
        self.is_unharmed = is_unharmed


class Watchdog:
    """The process beside this rank. One for the life of the process, made by `watch`.

    Args:
        rank, world_size: of this process in the job.
        store: the job's key-value store, through which rank 0 says where its watchdog listens.
        timeout_s: longest silence of a rank, and longest stop.
    """

    def __init__(self, rank: int, world_size: int, store: Any, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.where = "starting"
        self.verdict: dict[str, Any] | None = None
        self._left = -1
        self._taken = -1
        self._lock = threading.Lock()
        self._news = threading.Condition()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trl_realloc.runtime.failures.watchdog", str(theirs.fileno())],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH")))),
                },
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # neither Ctrl-C nor a launcher's signal to the rank's group is for it
            )
        self._socket, self._owner = ours, os.getpid()
        self._lines = ours.makefile("r", encoding="utf-8")
        launched = bool({"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys())
        settings: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "pid": os.getpid(),
            "launcher": os.getppid() if launched else 0,
            "timeout_s": timeout_s,
            "everywhere": os.environ.get("LOCAL_WORLD_SIZE") != str(world_size),
            "error_file": os.environ.get("TORCHELASTIC_ERROR_FILE") if os.environ.get("LOCAL_RANK") == "0" else None,
        }
        self._meet(settings, world_size, store)
        threading.Thread(target=self._listen, daemon=True, name="watchdog").start()
        atexit.register(self._tell, bye=True)

    def _meet(self, settings: dict[str, Any], world_size: int, store: Any) -> None:
        """Start the watchdog's work: rank 0's opens a port, the others' are told of it."""
        if self.rank == 0:
            settings["token"] = secrets.token_hex(16)
            self._tell(settings=settings)
            if world_size > 1:
                line = self._lines.readline()
                if not line:
                    raise RuntimeError(f"the watchdog of rank 0 did not start on host {HOST}; its reason is above.")
                port = json.loads(line)["port"]
                hosts = [os.environ.get("MASTER_ADDR", ""), HOST]
                if not settings["everywhere"]:
                    hosts = ["127.0.0.1"]
                addresses = [(host, port) for host in dict.fromkeys(hosts) if host]
                store.set(_KEY, json.dumps({"token": settings["token"], "addresses": addresses}))
        else:
            self._tell(settings={**settings, **json.loads(store.get(_KEY))})

    def _tell(self, **message: Any) -> None:
        """Never raises: a watchdog that is gone is no reason to fail by itself."""
        if os.getpid() == self._owner:  # a fork of the trainer, a data loader's for instance, has no say
            with contextlib.suppress(OSError), self._lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")

    # --- what the runtime says --------------------------------------------------------------------------------------

    def at(self, where: str) -> None:
        """What this rank does now, for the message of a failure: "actor.train of update 3"."""
        self.where = where
        self._tell(where=where)

    def error(self, sentence: str, generation: int, *, network: bool) -> None:
        self._tell(error={"sentence": sentence[:20_000], "generation": generation, "network": network})

    def checkpoint(self, folder: str | os.PathLike[str]) -> None:
        """The newest checkpoint, for the message of a failure."""
        self._tell(checkpoint=str(folder))

    def remove_at_end(self, path: str | os.PathLike[str]) -> None:
        """Remove a temporary folder of this rank when the rank ends, however it ends."""
        self._tell(remove=str(path))

    def keep(self, path: str | os.PathLike[str]) -> None:
        self._tell(keep=str(path))

    # --- what it hears ----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        for line in self._lines:
            ((word, value),) = json.loads(line).items()
            with self._news:
                if word == "verdict":
                    self.verdict = value
                    threading.Thread(target=self._leave_in_time, args=(value,), daemon=True).start()
                elif word == "left":
                    self._left = value
                self._news.notify_all()

    def _leave_in_time(self, verdict: dict[str, Any]) -> None:
        """End this process if it does not end by itself, or, where no process is lost, take note of the failure."""
        time.sleep(LEAVE_S)
        if not verdict["fatal"]:
            if verdict["generation"] <= self._taken:
                return
            say(f"[rank{self.rank}] trl_realloc: {verdict['sentence']} This rank was still in {self.where}.")
        os._exit(1)

    def take(self, generation: int) -> None:
        """This rank knows of a failure of the given generation, and is not to be ended for it."""
        self._taken = max(self._taken, generation)
        self._tell(taken=generation)

    def await_verdict(self, generation: int, seconds: float) -> str | None:
        """The failure of this generation, or a fatal one, when it is known; `None` after so many seconds."""
        with self._news:
            self._news.wait_for(lambda: self.failure(generation) is not None, seconds)
        return self.failure(generation)

    def failure(self, generation: int) -> str | None:
        verdict = self.verdict
        if verdict is None or (not verdict["fatal"] and verdict["generation"] < generation):
            return None
        return str(verdict["sentence"])

    def leave(self, generation: int, seconds: float) -> None:
        """Return when all ranks have ended or are leaving too, or after so many seconds."""
        self._tell(leaving=generation)
        with self._news:
            self._news.wait_for(lambda: self._left >= generation, seconds)


_watchdog: Watchdog | None = None
_generations = itertools.count(1)


def watch(timeout_s: float = HEARTBEAT_TIMEOUT_S) -> Watchdog:
    """This process's watchdog, started now if it has none yet. All ranks of the job call this together, first."""
    global _watchdog
    if _watchdog is None or _watchdog._owner != os.getpid():
        parallel = dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if parallel else (0, 1)
        store = dist.distributed_c10d._get_default_store() if parallel else None
        _watchdog = Watchdog(rank, size, store, timeout_s)
    return _watchdog


def current_watchdog() -> Watchdog | None:
    """This process's, if it has one."""
    return _watchdog if _watchdog is not None and _watchdog._owner == os.getpid() else None


class Alarm:
    """Tells the other ranks of a failure in one runtime (an executor and its engines) and hears of theirs.

    Runtimes are counted, on every rank alike, because they are made together: a failure that has ended one does not
    end the next.

    Args:
        watchdog: this process's; `None` for a job that has none.
    """

    def __init__(self, watchdog: Watchdog | None = None) -> None:
        self.watchdog = watchdog
        self.generation = next(_generations)
        self._stays = False

    def at(self, where: str) -> None:
        """What this rank does now."""
        if self.watchdog is not None:
            self.watchdog.at(where)

    def checkpoint(self, folder: str | os.PathLike[str] | None) -> None:
        """The newest checkpoint, for the message of a failure."""
        if self.watchdog is not None and folder is not None:
            self.watchdog.checkpoint(folder)

    def check(self) -> None:
        """Raise `JobFailed` if another rank has failed."""
        sentence = None if self.watchdog is None else self.watchdog.failure(self.generation)
        if sentence is not None:
            raise JobFailed(sentence)

    def ring(self, error: BaseException) -> Exception | None:
        """Tell all ranks of an exception here. Returns what to raise instead: the failure of another rank that caused
        it, where it is of a collective or a message. Never raises: the failure itself is what matters.
        """
        watchdog = self.watchdog
        if watchdog is None:
            return None
        network = is_network(error)
        message = str(error) or type(error).__name__
        if not isinstance(error, JobFailed):
            what = "lost a connection" if network else "failed"
            message = f"rank {watchdog.rank} on host {HOST} {what} in {watchdog.where}: {message}"
        watchdog.error(message, self.generation, network=network)
        reason = None
        if network:  # the watchdogs may have to wait for their limit to know who is lost
            reason = watchdog.await_verdict(self.generation, watchdog.timeout_s + GRACE_S)
        return None if reason is None else JobFailed(reason)

    @contextlib.contextmanager
    def covers(self, close: Callable[[], None] = lambda: None) -> Iterator[None]:
        """A failure in the block is told to every rank, and ends this one's engines.

        Args:
            close: ends the engines.
        """
        try:
            yield
        except Exception as error:
            first = not isinstance(error, JobFailed) or error.__cause__ is not None  # this rank's own
            reason = self.ring(error) if first else None
            self.take()
            close()
            self.stay()
            if reason is not None:
                raise reason from error
            raise
        except BaseException:
            close()
            raise

    def take(self) -> None:
        """A failure is known here, and dealt with by exceptions."""
        if self.watchdog is not None:
            self.watchdog.take(self.generation)

    def stay(self) -> None:
        """Have this process, which fails too, not end before the others' have printed their reason, or `GRACE_S`: with
        the first that ends the launcher ends all."""
        if self.watchdog is not None and not self._stays:
            self._stays = True
            atexit.register(self.watchdog.leave, self.generation, GRACE_S)  # the exception is printed before this


def is_network(error: BaseException) -> bool:
    """Whether an exception says that a message or a collective failed, and so that its cause may be another rank's."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError):
            return False
        if isinstance(seen, (dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError)):
            return True
        if isinstance(seen, RuntimeError) and any(word in str(seen).lower() for word in _NETWORK_WORDS):
            return True
        seen = seen.__cause__
    return False


def say(sentence: str) -> None:
    """On stderr, whatever the state of Python's own stream."""
    with contextlib.suppress(OSError):
        os.write(2, f"{sentence}\n".encode())
