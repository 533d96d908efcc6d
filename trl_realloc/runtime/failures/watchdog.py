"""The watchdog of one rank, started by `alarm` as `python -m trl_realloc.runtime.failures.watchdog FD`.

It tells the others that the rank lives and what it does, hears of them the same, and ends the rank when the job has
failed. It is a process and not a thread, because a thread is as silent as its process where native code holds the
interpreter (a reward function's extension, a large file being written), and is stopped and killed with it. It outlives
the rank by moments, says how that ended, and removes the temporary files that the rank named.

The watchdog of rank 0 listens; the others connect to it. What counts as a failure is `liveness`'s business.

| from the rank | to the rank |
| --- | --- |
| first of all the settings | `port`, rank 0's only |
| `where` (what it does now), `checkpoint` (the newest) | `verdict`: the job has failed |
| `error` (its exception) | `left`: all ranks have ended or are leaving |
| `taken` (it has heard the verdict and goes on), `leaving`, `bye` | |
| `remove`, `keep` (a temporary file or folder) | |
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import resource
import select
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .liveness import Liveness, RankState, Verdict


TICK_S = 0.2
LEAVE_S = 12.0  # a rank that has not left so long after a verdict is killed
LAST_WORDS_S = 2.0  # a watchdog whose rank ended badly waits so long for the reason
FATAL = 1 << 30  # in place of a generation: all of them
LAUNCHER_ENDS_S = 0.3
LAUNCHER_S = 40.0  # torchrun gives its ranks 30 s to end


class Wire:
    """JSON objects, a line each, over a stream socket that never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock, self.open = sock, True
        self.rank: int | None = None  # at the hub: whose it is, once it has said so with the right token
        self._in, self._out = b"", bytearray()

    def send(self, **message: Any) -> None:
        if self.open:
            self._out += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self.open = False

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come. Sets `open` to False at the end of the stream."""
        if not self.open:
            return []
        try:
            while data := self.sock.recv(1 << 16):
                self._in += data
            self.open = False
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        *lines, self._in = self._in.split(b"\n")
        return [json.loads(line) for line in lines]


def process_state(pid: int) -> str:
    """The letter of /proc (`T`: stopped by a signal), or an empty string where there is no such process."""
    return (_stat(pid) or [""])[0]


def _stat(pid: int) -> list[str] | None:
    try:  # pid (name, which may hold anything) state ...
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


class Watchdog:
    """Args:
    rank_wire: to the rank.
    settings: `rank`, `world_size`, `pid`, `launcher` (its pid, 0 without one), `timeout_s`, `token`, `addresses` of
        rank 0's watchdog (none for rank 0's own), `everywhere` (rank 0 listens on all interfaces).
    """

    def __init__(self, rank_wire: Wire, settings: dict[str, Any]) -> None:
        self.rank_wire, self.settings = rank_wire, settings
        self.rank, self.pid, self.launcher = settings["rank"], settings["pid"], settings["launcher"]
        self.timeout_s, self.host = settings["timeout_s"], socket.gethostname()
        self.interval_s = min(1.0, self.timeout_s / 5)
        now = time.monotonic()
        self.state = RankState(self.rank, now, self.host, self.pid)
        self.selector = selectors.DefaultSelector()
        self.selector.register(rank_wire.sock, selectors.EVENT_READ)
        self.pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1
        if self.pidfd >= 0:
            self.selector.register(self.pidfd, selectors.EVENT_READ)
        self.verdict: Verdict | None = None
        self.kill_at = float("inf")
        self.taken = -1  # the newest generation whose failure the rank deals with by itself
        self.checkpoint: str | None = None
        self.status: int | None = None
        self.ended_at = now
        self.said_bye = self.rank_ended = self.closing = False
        self.temporary: set[str] = set()
        self._stopped: dict[int, float] = {}
        self._beat, self._beat_where = 0.0, ""

    # --- what the two kinds do each in their way ------------------------------------------------------------------

    def tell(self, **message: Any) -> None:
        """Pass a message of this rank on to rank 0's watchdog."""
        raise NotImplementedError

    def listen(self) -> None:
        """Take what the other watchdogs have sent."""
        raise NotImplementedError

    def watch(self, now: float) -> None:
        """Look for failures of others."""
        raise NotImplementedError

    def finished(self) -> bool:
        """The rank has ended; whether nobody needs this watchdog any more."""
        raise NotImplementedError

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            self.selector.select(TICK_S)
            now = time.monotonic()
            self.hear_rank(self.rank_wire.receive())
            self.listen()
            if not self.rank_ended and process_state(self.pid) in ("", "Z", "X"):
                self._end_of_rank(now)
            elsewhere = self.state.where != self._beat_where  # told at once, for a link may be lost the next moment
            if now - self._beat >= (TICK_S if elsewhere else self.interval_s):
                self._beat, self._beat_where = now, self.state.where
                self.state.stopped_s = self._stopped_for(self.pid, now)
                self.state.launcher_stopped_s = self._stopped_for(self.launcher, now)
                self.tell(beat={**asdict(self.state), "rank": self.rank})
            self.watch(now)
            if not self.rank_ended and now > self.kill_at:
                self._kill()
            if self.rank_ended and self.finished():
                break
        self.tidy()

    def _stopped_for(self, pid: int, now: float) -> float:
        if pid and process_state(pid) == "T":
            return now - self._stopped.setdefault(pid, now)
        self._stopped.pop(pid, None)
        return 0.0

    def hear_rank(self, messages: list[dict[str, Any]]) -> None:
        """Take what the rank has said."""
        for message in messages:
            ((word, value),) = message.items()
            if word == "where":
                self.state.where = value
            elif word == "checkpoint":
                self.checkpoint = value
            elif word == "error":
                self.tell(error=value)
            elif word == "taken":
                self.taken = max(self.taken, value)
                if self.verdict is not None and self._is_taken(self.verdict):
                    self.kill_at = float("inf")
            elif word == "leaving":
                self.state.leaving = value
                self._beat = 0.0
            elif word == "bye":
                self.said_bye = True
            elif word == "remove":
                self.temporary.add(value)
            elif word == "keep":
                self.temporary.discard(value)
        if not self.rank_wire.open and self.rank_wire.sock.fileno() >= 0:
            self.selector.unregister(self.rank_wire.sock)
            self.rank_wire.sock.close()

    def _end_of_rank(self, now: float) -> None:
        if self.pidfd >= 0:
            self.selector.unregister(self.pidfd)
        fields = _stat(self.pid)
        status = int(fields[49]) if fields and len(fields) > 49 and fields[0] in "ZX" else None
        launcher = ""
        if status != 0 and not self.said_bye and self._launcher_ends():
            launcher = f"the launcher on host {self.host} (pid {self.launcher}) ended, and its ranks with it."
        self.rank_ended, self.ended_at, self.status = True, now, status
        self.tell(beat={**asdict(self.state), "rank": self.rank})  # what it did last
        self.tell(ended={"status": status, "bye": self.said_bye, "launcher": launcher})

    def _launcher_ends(self) -> bool:
        """Whether the launcher has ended. Its ranks get their signal before the kernel shows it as ended."""
        deadline = time.monotonic() + LAUNCHER_ENDS_S
        while self.launcher and time.monotonic() < deadline:
            if process_state(self.launcher) in ("", "Z", "X"):
                return True
            time.sleep(0.02)
        return False

    def _is_taken(self, verdict: Verdict) -> bool:
        """The rank deals with that failure by an exception; of its own it says so before the verdict comes."""
        return not verdict.fatal and verdict.generation <= self.taken

    def take_verdict(self, verdict: Verdict) -> None:
        """The job has failed. The rank is told, and killed if it does not leave."""
        news = self.verdict is None or not verdict.sentence.startswith(self.verdict.sentence)
        self.verdict = verdict
        now = time.monotonic()
        if verdict.fatal and news:
            self.say(verdict.sentence)
        self.rank_wire.send(verdict=asdict(verdict))
        if not self._is_taken(verdict):
            self.kill_at = min(self.kill_at, now + LEAVE_S)
        if verdict.fatal and self.launcher and process_state(self.launcher) == "T":
            with contextlib.suppress(OSError):
                os.kill(self.launcher, signal.SIGCONT)  # so that it sees its ranks end, and ends
        if verdict.fatal and process_state(self.pid) == "T":
            self._kill()

    def _kill(self) -> None:
        self.kill_at = float("inf")
        if process_state(self.pid) != "T":
            self.say(f"rank {self.rank} did not end by itself and is killed in {self.state.where}.")
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def say(self, sentence: str) -> None:
        with contextlib.suppress(OSError):  # a log that is full or closed
            os.write(2, f"[rank{self.rank}] trl_realloc: {sentence}\n".encode())

    def with_remedy(self, verdict: Verdict) -> Verdict:
        if not verdict.fatal:
            return verdict
        remedy = (
            f"Resume from {self.checkpoint} (resume_from_checkpoint)."
            if self.checkpoint
            else "No checkpoint has been written; the run begins again."
        )
        return Verdict(f"{verdict.sentence} {remedy}", verdict.fatal, verdict.generation)

    def tidy(self) -> None:
        """Remove the rank's temporary files and, after the launcher, its empty folder of logs."""
        for path in self.temporary:
            shutil.rmtree(path, ignore_errors=True)
        folder = launcher_folder(self.settings.get("error_file"))
        if folder is None:
            return
        deadline = time.monotonic() + LAUNCHER_S
        while process_state(self.launcher) not in ("", "Z", "X") and time.monotonic() < deadline:
            time.sleep(TICK_S)
        if process_state(self.launcher) in ("", "Z", "X"):
            remove_empty(folder)


class Spoke(Watchdog):
    """The watchdog of any rank but the first."""

    def __init__(self, rank_wire: Wire, settings: dict[str, Any]) -> None:
        super().__init__(rank_wire, settings)
        self.hub: Wire | None = None
        self.heard = self._now = time.monotonic()
        self.hub_host, self.hub_where = settings["addresses"][0][0], "starting"
        self._problem = ""
        self._connect(self.heard + self.timeout_s)

    def _connect(self, deadline: float) -> None:
        while self.hub is None and time.monotonic() < deadline and process_state(self.pid) not in ("", "Z", "X"):
            for host, port in self.settings["addresses"]:
                with contextlib.suppress(OSError):
                    sock = socket.create_connection((host, port), timeout=5)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self.hub = Wire(sock)
                    self.selector.register(sock, selectors.EVENT_READ)
                    self.tell(hello={"rank": self.rank, "token": self.settings["token"]})
                    self.heard = time.monotonic()
                    return
            time.sleep(0.5)
        if self.hub is None:
            where = ", ".join(f"{host}:{port}" for host, port in self.settings["addresses"])
            self._problem = f"rank {self.rank} on host {self.host} cannot reach rank 0 at {where}: a firewall?"

    def tell(self, **message: Any) -> None:
        if self.hub is not None:
            self.hub.send(**message)

    def listen(self) -> None:
        if self.hub is None or not self.hub.open:
            return
        for message in self.hub.receive():
            self.heard = time.monotonic()
            if "beat" in message:
                self.hub_host, self.hub_where = message["beat"]["host"], message["beat"]["where"]
            elif "verdict" in message:
                self.take_verdict(Verdict(**message["verdict"]))
            elif "left" in message:
                self.rank_wire.send(left=message["left"])
            elif "closing" in message:
                self.closing = True
        if not self.hub.open:
            self.selector.unregister(self.hub.sock)
            self.heard = min(self.heard, time.monotonic() - self.timeout_s + 1.0)  # a second for a verdict elsewhere

    def watch(self, now: float) -> None:
        if now - self._now > 5.0:
            self.heard += now - self._now  # this process was paused itself
        self._now = now
        if self.hub is not None:
            self.hub.flush()
        if self.verdict is not None or self.closing:
            return
        lost = self.hub is not None and not self.hub.open
        if self._problem or now - self.heard > self.timeout_s:
            first = f"rank 0 on host {self.hub_host}"
            if lost:
                self._problem = f"{first} ended at once with its watchdog (killed, or the host went down)"
            elif not self._problem:
                self._problem = f"nothing was heard from {first} for {self.timeout_s:g} s (heartbeat_timeout)"
                self._problem += ". The host is down or stopped, or the network to it is"
            here = f"rank {self.rank} on host {self.host} was in {self.state.where}"
            sentence = f"{self._problem}; it was last in {self.hub_where}, {here}."
            self.take_verdict(self.with_remedy(Verdict(sentence, fatal=True)))

    def finished(self) -> bool:
        if self.status == 0 or self.verdict is not None or self.hub is None or not self.hub.open:
            return True
        return time.monotonic() - self.ended_at > (0.0 if self.said_bye else LAST_WORDS_S)


class Hub(Watchdog):
    """The watchdog of rank 0: knows of all, and judges."""

    def __init__(self, rank_wire: Wire, settings: dict[str, Any]) -> None:
        super().__init__(rank_wire, settings)
        self.liveness = Liveness(settings["world_size"], self.timeout_s, time.monotonic())
        self.wires: list[Wire] = []
        self._left = -1
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection for each rank
        if settings["world_size"] > 1:
            both = settings["everywhere"] and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            address = ("" if settings["everywhere"] else "127.0.0.1", 0)
            self.door = socket.create_server(address, family=family, backlog=4096, dualstack_ipv6=both)
            self.door.setblocking(False)
            self.selector.register(self.door, selectors.EVENT_READ)
            rank_wire.send(port=self.door.getsockname()[1])

    def tell(self, **message: Any) -> None:
        self._take(self.rank, message)
        if "beat" in message:
            self._send_all(**message)

    def listen(self) -> None:
        if self.settings["world_size"] == 1:
            return
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.door.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.wires.append(Wire(sock))
                self.selector.register(sock, selectors.EVENT_READ)
        for wire in self.wires:
            for message in self._messages(wire):
                if wire.rank is None:
                    hello = message.get("hello", {})
                    if not hmac.compare_digest(str(hello.get("token", "")), self.settings["token"]):
                        wire.open = False
                        break
                    wire.rank = int(hello["rank"])
                    if self.verdict is not None:
                        wire.send(verdict=asdict(self.verdict))
                else:
                    self._take(wire.rank, message)
            if not wire.open:
                self.selector.unregister(wire.sock)
                wire.sock.close()
                if wire.rank is not None and not self.closing:
                    self.liveness.lose(wire.rank, time.monotonic())
        self.wires = [wire for wire in self.wires if wire.open]

    def _messages(self, wire: Wire) -> Iterator[dict[str, Any]]:
        try:
            yield from wire.receive()
        except ValueError:  # a stranger at the door
            wire.open = False

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if "beat" in message:
            beat = message["beat"]
            names = ("host", "pid", "where", "stopped_s", "launcher_stopped_s", "leaving")
            self.liveness.hear(rank, now, **{name: beat[name] for name in names})
        elif "error" in message:
            error = message["error"]
            self.liveness.error(now, error["sentence"], error["generation"], network=error["network"])
        elif "ended" in message:
            ended = message["ended"]
            self.liveness.end(rank, now, ended["status"], ended["bye"], ended["launcher"])

    def watch(self, now: float) -> None:
        verdict = self.liveness.judge(now)
        if verdict is not None:
            verdict = self.with_remedy(verdict)
            self._send_all(verdict=asdict(verdict))
            self.take_verdict(verdict)
        known = self.liveness.verdict
        of = FATAL if known is not None and known.fatal else known.generation if known is not None else -1
        if self._left < of and self.liveness.all_leaving(0 if of == FATAL else of):
            self._left = of
            self._send_all(left=of)
            self.rank_wire.send(left=of)
        for wire in self.wires:
            wire.flush()

    def _send_all(self, **message: Any) -> None:
        for wire in self.wires:
            if wire.rank is not None:
                wire.send(**message)

    def finished(self) -> bool:
        if self.liveness.is_undecided:
            return False
        now = time.monotonic()
        well = self.liveness.ranks[self.rank].ended and self.verdict is None and not self.liveness.verdict
        others_ended = all(state.ended for state in self.liveness.ranks.values())
        patience = LAST_WORDS_S if well and not others_ended else LEAVE_S + LAST_WORDS_S
        if others_ended or now - self.ended_at > patience:
            self.closing = True
            self._send_all(closing=True)
            return True
        return False


def launcher_folder(error_file: str | None) -> Path | None:
    """torchrun's temporary folder, if the rank's error file is in one that torchrun made for itself."""
    base = Path(tempfile.gettempdir())
    for folder in Path(error_file).parents if error_file else ():
        if folder.parent == base and folder.name.startswith("torchelastic_"):
            return folder
    return None


def remove_empty(folder: Path) -> None:
    """Remove a folder of empty folders, empty logs and torchrun's error files; what holds anything else stays."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            path = Path(parent, name)
            with contextlib.suppress(OSError):
                if name == "error.json" or path.stat().st_size == 0:
                    path.unlink()
        with contextlib.suppress(OSError):
            os.rmdir(parent)


def main() -> None:
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    messages: list[dict[str, Any]] = []
    while not messages and wire.open:
        select.select([wire.sock], [], [], 5)
        messages = wire.receive()
    if messages:
        settings = messages.pop(0)["settings"]
        watchdog = (Hub if settings["rank"] == 0 else Spoke)(wire, settings)
        watchdog.hear_rank(messages)
        watchdog.run()


if __name__ == "__main__":
    main()
