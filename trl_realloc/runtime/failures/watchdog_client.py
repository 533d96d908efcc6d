"""`WatchdogClient`: a rank's side of its watchdog. It starts the watchdog process and exchanges messages with it.

The watchdog process itself is in `watchdog_process`, which lists the messages.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...engines.child_process import job_signals_blocked
from ..launch.network_interfaces import NetworkError, gloo_address, is_loopback
from .message_socket import JsonMessage


HEARTBEAT_TIMEOUT_S = 30.0
HOST = socket.gethostname()
GRACE_S = 10.0  # time that a failed rank stays, so that others print the reason before the launcher ends them
LEAVE_S = 5.0  # time that a rank has to end by itself after a verdict; it may be in a collective that never ends
_STORE_KEY = "trl_realloc/watchdog"
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])


class WatchdogClient:
    """The connection to this rank's watchdog process. One for the life of the process, made by `watch`.

    Args:
        store: the job's key-value store, in which rank 0 publishes its watchdog's address; `None` in a job of one
            process.
        timeout_s: longest silence of a rank, and longest stop by a signal, before the job fails.

    Raises:
        RuntimeError: the watchdog of rank 0 did not start.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store | None, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.activity = "starting"
        self.verdict: JsonMessage | None = None
        self._verdicts = queue.SimpleQueue[tuple[float, dict[str, Any]]]()  # (time of arrival, verdict)
        self._all_leaving = -1  # the newest generation whose failure all ranks are leaving for
        self._acknowledged = -1  # the newest generation whose failure this rank handles by an exception
        self._send_lock = threading.Lock()
        self._received = threading.Condition()
        parent_socket, child_socket = socket.socketpair()
        with child_socket, job_signals_blocked():  # a cluster's scheduler sends them to all processes
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "trl_realloc.runtime.failures.watchdog_process",
                    str(child_socket.fileno()),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH")))),
                },
                stdin=subprocess.DEVNULL,
                pass_fds=[child_socket.fileno()],
                start_new_session=True,  # Ctrl-C and a launcher's signal to the rank's group must not reach it
            )
        self._socket, self._owner_pid = parent_socket, os.getpid()
        self._lines = parent_socket.makefile("r", encoding="utf-8")
        is_launched = bool({"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys())
        settings: JsonMessage = {
            "rank": rank,
            "world_size": world_size,
            "pid": os.getpid(),
            "launcher": os.getppid() if is_launched else 0,
            "timeout_s": timeout_s,
            "everywhere": os.environ.get("LOCAL_WORLD_SIZE") != str(world_size),
            "error_file": os.environ.get("TORCHELASTIC_ERROR_FILE") if os.environ.get("LOCAL_RANK") == "0" else None,
        }
        self._configure(settings, store if world_size > 1 else None)
        # started here, because Python 3.12 starts no threads during the interpreter's shutdown
        for target in (self._listen, self._exit_if_late):
            threading.Thread(target=target, daemon=True, name="watchdog").start()
        atexit.register(self._send, exiting=True)

    def _configure(self, settings: JsonMessage, store: dist.Store | None) -> None:
        """Send the watchdog its settings. Rank 0's watchdog opens a port, which the other ranks read from `store`."""
        if self.rank == 0:
            settings["token"] = secrets.token_hex(16)
            self._send(settings=settings)
            if store is not None:
                line = self._lines.readline()
                if not line:
                    raise RuntimeError(f"the watchdog of rank 0 did not start on host {HOST}; its reason is above.")
                port = json.loads(line)["port"]
                hosts = ["127.0.0.1"]
                if settings["everywhere"]:
                    # the first may be a service's address, and the second may not resolve on other hosts
                    hosts = [os.environ.get("MASTER_ADDR", ""), HOST]
                    with contextlib.suppress(NetworkError):
                        hosts += [address for address in [gloo_address()] if not is_loopback(address)]
                addresses = [(host, port) for host in dict.fromkeys(hosts) if host]
                store.set(_STORE_KEY, json.dumps({"token": settings["token"], "addresses": addresses}))
        elif store is not None:
            self._send(settings={**settings, **json.loads(store.get(_STORE_KEY))})

    def _send(self, **message: object) -> None:
        """Never raises, because a lost watchdog alone is no reason to fail."""
        if os.getpid() == self._owner_pid:  # a fork of the trainer, such as a data loader's worker, sends nothing
            with contextlib.suppress(OSError), self._send_lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")

    # --- from the rank to the watchdog ------------------------------------------------------------------------------

    def set_activity(self, activity: str) -> None:
        """Set this rank's activity for failure messages, such as "actor.train of update 3"."""
        if activity != self.activity:
            self.activity = activity
            self._send(activity=activity)

    def report_error(self, sentence: str, generation: int, *, network: bool) -> None:
        """Report an exception of this rank.

        Args:
            generation: number of the runtime that raised it (`Alarm`).
            network: a collective or a message raised it, so another rank is the likely cause.
        """
        self._send(error={"sentence": sentence[:20_000], "generation": generation, "network": network})

    def set_checkpoint(self, folder: str | os.PathLike[str]) -> None:
        """Set the newest checkpoint, for failure messages."""
        self._send(checkpoint=str(folder))

    def remove_at_end(self, path: str | os.PathLike[str]) -> None:
        """Remove a temporary folder when this rank ends, even if it is killed."""
        self._send(remove=str(path))

    def keep(self, path: str | os.PathLike[str]) -> None:
        """Undo `remove_at_end`."""
        self._send(keep=str(path))

    def acknowledge(self, generation: int) -> None:
        """Report that this rank handles a failure of the given generation by an exception, and must not be killed."""
        self._acknowledged = max(self._acknowledged, generation)
        self._send(acknowledged=generation)

    def leave(self, generation: int, seconds: float) -> None:
        """Report that this rank is about to end. Returns when all ranks end, or after `seconds`."""
        self._send(leaving=generation)
        with self._received:
            self._received.wait_for(lambda: self._all_leaving >= generation, seconds)

    # --- from the watchdog to the rank ------------------------------------------------------------------------------

    def _listen(self) -> None:
        for line in self._lines:
            ((key, value),) = json.loads(line).items()
            with self._received:
                if key == "verdict":
                    self.verdict = value
                    self._verdicts.put((time.monotonic(), value))
                elif key == "all_leaving":
                    self._all_leaving = value
                self._received.notify_all()

    def _exit_if_late(self) -> None:
        """Exit this process `LEAVE_S` after a verdict, unless no process is lost and this rank has acknowledged the
        failure."""
        while True:
            came, verdict = self._verdicts.get()
            time.sleep(max(0.0, came + LEAVE_S - time.monotonic()))
            if not verdict["fatal"]:
                if verdict["generation"] <= self._acknowledged:
                    continue
                here = f"This rank ends for that reason; it was still in {self.activity}."
                write_stderr(f"[rank{self.rank}] trl_realloc: {_ended(verdict['sentence'])} {here}")
            os._exit(1)

    def await_verdict(self, generation: int, seconds: float) -> str | None:
        """Wait for `failure(generation)`; `None` after `seconds`."""
        with self._received:
            self._received.wait_for(lambda: self.failure(generation) is not None, seconds)
        return self.failure(generation)

    def failure(self, generation: int) -> str | None:
        """The sentence of a known failure of this generation or a later one, or of a fatal one; else `None`."""
        verdict = self.verdict
        if verdict is None or (not verdict["fatal"] and verdict["generation"] < generation):
            return None
        return str(verdict["sentence"])


_client: WatchdogClient | None = None


def watch(timeout_s: float = HEARTBEAT_TIMEOUT_S) -> WatchdogClient:
    """This process's watchdog client; starts the watchdog at the first call. All ranks of the job call this together,
    before anything that may fail."""
    global _client
    if _client is None or _client._owner_pid != os.getpid():
        is_parallel = dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if is_parallel else (0, 1)
        store = dist.distributed_c10d._get_default_store() if is_parallel else None
        _client = WatchdogClient(rank, size, store, timeout_s)
    return _client


def current_watchdog() -> WatchdogClient | None:
    """This process's watchdog client, `None` if it has no watchdog."""
    return _client if _client is not None and _client._owner_pid == os.getpid() else None


def _ended(sentence: str) -> str:
    """A sentence with a full stop, which an exception's message may lack."""
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def write_stderr(sentence: str) -> None:
    """Write a line to file descriptor 2, which works even if `sys.stderr` is closed or replaced."""
    with contextlib.suppress(OSError):
        os.write(2, f"{sentence}\n".encode())
