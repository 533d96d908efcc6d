"""`Watchdog`: base class of the watchdog processes of all ranks.

A watchdog sends heartbeats of its rank to rank 0's watchdog, and ends the rank when the job has failed. It is a process
and not a thread: a thread does not run while native code holds the GIL (a reward function's extension, the writing of a
large file), and it is stopped and killed with its process. It outlives the rank briefly, reports how the rank ended,
and removes the rank's temporary folders.

The subclasses are in `coordinator_watchdog` (rank 0) and `peer_watchdog`, the rules for failures in `liveness`, the
messages in `watchdog_process`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from .liveness import RankState, Verdict
from .message_socket import JsonMessage, MessageSocket
from .process_state import exit_status, has_ended, process_state


TICK_S = 0.2
KILL_S = 12.0  # time after a verdict at which a rank that has not ended is killed
LAUNCHER_ENDS_S = 0.3  # wait for the launcher's end in /proc; its ranks get their signal earlier
LAST_WORDS_S = 2.0  # time that the watchdog of a failed rank waits for the reason
LAUNCHER_S = 40.0  # wait for the launcher before its folder is removed; torchrun gives its ranks 30 s to end
LAUNCHER_POLL_S = 0.2


class Watchdog:
    """Watches one rank and reports to rank 0's watchdog.

    Args:
        settings: `rank`, `world_size`, `pid`, `launcher` (its pid, 0 without one), `timeout_s`, `token`, `addresses` of
            rank 0's watchdog (absent on rank 0), `everywhere` (rank 0 listens on all interfaces), `error_file`
            (torchrun's).
    """

    def __init__(self, rank_socket: MessageSocket, settings: JsonMessage) -> None:
        self.rank_socket, self.settings = rank_socket, settings
        self.rank, self.pid, self.launcher = settings["rank"], settings["pid"], settings["launcher"]
        self.timeout_s, self.host = settings["timeout_s"], socket.gethostname()
        self.interval_s = min(1.0, self.timeout_s / 5)
        now = time.monotonic()
        self.state = RankState(self.rank, now, self.host, self.pid)
        self.selector = selectors.DefaultSelector()
        self.selector.register(rank_socket.sock, selectors.EVENT_READ)
        self.pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1
        if self.pidfd >= 0:
            self.selector.register(self.pidfd, selectors.EVENT_READ)
        self.verdict: Verdict | None = None
        self.kill_at = float("inf")
        self.acknowledged = -1  # the newest generation whose failure the rank handles by an exception
        self.checkpoint: str | None = None
        self.status: int | None = None
        self.ended_at = now
        self.is_exiting = self.rank_ended = self.is_closing = False
        self.temporary_folders: set[str] = set()
        self._stopped_since: dict[int, float] = {}
        self._heartbeat_at, self._heartbeat_activity = 0.0, ""

    # --- what the two kinds of watchdog do differently --------------------------------------------------------------

    def send_to_coordinator(self, **message: object) -> None:
        """Send a message of this rank to rank 0's watchdog."""
        raise NotImplementedError

    def receive_from_watchdogs(self) -> None:
        """Process the messages of other watchdogs."""
        raise NotImplementedError

    def look_for_failures(self, now: float) -> None:
        """Look for failures of other ranks. `now` is in seconds of the monotonic clock."""
        raise NotImplementedError

    def is_finished(self) -> bool:
        """True if no other watchdog needs this one. Called after the rank has ended."""
        raise NotImplementedError

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Watch the rank until it has ended and no other watchdog needs this one."""
        while True:
            self.selector.select(TICK_S)
            now = time.monotonic()
            self.receive_from_rank(self.rank_socket.receive())
            self.receive_from_watchdogs()
            if not self.rank_ended and has_ended(self.pid):
                self._report_end(now)
            # a new activity is sent at once, because the connection may be lost at any moment
            is_new = self.state.activity != self._heartbeat_activity
            if now - self._heartbeat_at >= (TICK_S if is_new else self.interval_s):
                self._heartbeat_at, self._heartbeat_activity = now, self.state.activity
                self.state.stopped_s = self._stopped_for(self.pid, now)
                self.state.launcher_stopped_s = self._stopped_for(self.launcher, now)
                self.send_to_coordinator(heartbeat={**asdict(self.state), "rank": self.rank})
            self.look_for_failures(now)
            if not self.rank_ended and now > self.kill_at:
                self._kill()
            if self.rank_ended and self.is_finished():
                break
        _clean_up(self.temporary_folders, self.settings.get("error_file"), self.launcher)

    def _stopped_for(self, pid: int, now: float) -> float:
        """Seconds since the process was first seen stopped by a signal; 0 if it runs."""
        if pid and process_state(pid) == "T":
            return now - self._stopped_since.setdefault(pid, now)
        self._stopped_since.pop(pid, None)
        return 0.0

    def receive_from_rank(self, messages: list[JsonMessage]) -> None:
        """Process the rank's messages."""
        for message in messages:
            ((key, value),) = message.items()
            if key == "activity":
                self.state.activity = value
            elif key == "checkpoint":
                self.checkpoint = value
            elif key == "error":
                self.send_to_coordinator(error=value)
            elif key == "acknowledged":
                self.acknowledged = max(self.acknowledged, value)
                if self.verdict is not None and self._is_acknowledged(self.verdict):
                    self.kill_at = float("inf")
            elif key == "leaving":
                self.state.leaving = value
                self._heartbeat_at = 0.0
            elif key == "exiting":
                self.is_exiting = True
            elif key == "remove":
                self.temporary_folders.add(value)
            elif key == "keep":
                self.temporary_folders.discard(value)
        if not self.rank_socket.is_open and self.rank_socket.sock.fileno() >= 0:
            self.selector.unregister(self.rank_socket.sock)
            self.rank_socket.sock.close()

    def _report_end(self, now: float) -> None:
        if self.pidfd >= 0:
            self.selector.unregister(self.pidfd)
        status = exit_status(self.pid)
        launcher = ""
        if status != 0 and not self.is_exiting and self._launcher_has_ended():
            launcher = f"the launcher on host {self.host} (pid {self.launcher}) ended, and its ranks with it."
        self.rank_ended, self.ended_at, self.status = True, now, status
        self.send_to_coordinator(heartbeat={**asdict(self.state), "rank": self.rank})  # with its last activity
        self.send_to_coordinator(ended={"status": status, "exiting": self.is_exiting, "launcher": launcher})

    def _launcher_has_ended(self) -> bool:
        """Wait up to `LAUNCHER_ENDS_S` for the launcher's end."""
        deadline = time.monotonic() + LAUNCHER_ENDS_S
        while self.launcher and time.monotonic() < deadline:
            if has_ended(self.launcher):
                return True
            time.sleep(0.02)
        return False

    def _is_acknowledged(self, verdict: Verdict) -> bool:
        """True if the rank handles this failure by an exception. Its message may arrive before the verdict."""
        return not verdict.fatal and verdict.generation <= self.acknowledged

    def apply_verdict(self, verdict: Verdict) -> None:
        """Report the job's failure to the rank, and schedule its kill in case it does not end."""
        is_news = self.verdict is None or not verdict.sentence.startswith(self.verdict.sentence)
        self.verdict = verdict
        now = time.monotonic()
        if verdict.fatal and is_news:
            self.log(verdict.sentence)
        self.rank_socket.send(verdict=asdict(verdict))
        if not self._is_acknowledged(verdict):
            self.kill_at = min(self.kill_at, now + KILL_S)
        if verdict.fatal and self.launcher and process_state(self.launcher) == "T":
            with contextlib.suppress(OSError):
                os.kill(self.launcher, signal.SIGCONT)  # so that it notices its ranks' end, and ends
        if verdict.fatal and process_state(self.pid) == "T":
            self._kill()

    def _kill(self) -> None:
        self.kill_at = float("inf")
        if process_state(self.pid) != "T":
            self.log(f"rank {self.rank} did not end by itself and is killed in {self.state.activity}.")
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def log(self, sentence: str) -> None:
        """Write a line to stderr, which may be full or closed."""
        with contextlib.suppress(OSError):
            os.write(2, f"[rank{self.rank}] trl_realloc: {sentence}\n".encode())

    def with_remedy(self, verdict: Verdict) -> Verdict:
        """A fatal verdict with the checkpoint to resume from added; any other unchanged."""
        if not verdict.fatal:
            return verdict
        remedy = (
            f"Resume from {self.checkpoint} (resume_from_checkpoint)."
            if self.checkpoint
            else "No checkpoint has been written; the run begins again."
        )
        return Verdict(f"{verdict.sentence} {remedy}", verdict.fatal, verdict.generation)


def _clean_up(temporary_folders: Iterable[str], error_file: str | None, launcher_pid: int) -> None:
    """Remove the rank's temporary folders. When the launcher has ended, remove its log folder if it is empty.

    Args:
        error_file: torchrun's error file of this rank, if the rank is the first of its host.
    """
    for path in temporary_folders:
        shutil.rmtree(path, ignore_errors=True)
    folder = _launcher_folder(error_file)
    if folder is None:
        return
    deadline = time.monotonic() + LAUNCHER_S
    while not has_ended(launcher_pid) and time.monotonic() < deadline:
        time.sleep(LAUNCHER_POLL_S)
    if has_ended(launcher_pid):
        _remove_empty(folder)


def _launcher_folder(error_file: str | None) -> Path | None:
    """torchrun's temporary folder, if it contains the rank's error file."""
    base = Path(tempfile.gettempdir())
    for folder in Path(error_file).parents if error_file else ():
        if folder.parent == base and folder.name.startswith("torchelastic_"):
            return folder
    return None


def _remove_empty(folder: Path) -> None:
    """Remove empty logs, torchrun's error files, and folders that become empty. Other files stay."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            path = Path(parent, name)
            with contextlib.suppress(OSError):
                if name == "error.json" or path.stat().st_size == 0:
                    path.unlink()
        with contextlib.suppress(OSError):
            os.rmdir(parent)
