"""`PeerWatchdog`: the watchdog of every rank but rank 0. It is connected to rank 0's watchdog."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time

from .liveness import Verdict
from .message_socket import JsonMessage, MessageSocket
from .process_state import has_ended
from .rank_watchdog import LAST_WORDS_S, Watchdog


class PeerWatchdog(Watchdog):
    """Sends its rank's heartbeats, errors and end to rank 0's watchdog, and receives the verdicts."""

    def __init__(self, rank_socket: MessageSocket, settings: JsonMessage) -> None:
        super().__init__(rank_socket, settings)
        self.coordinator: MessageSocket | None = None
        self.last_heard = self._last_check = time.monotonic()
        self.coordinator_host, self.coordinator_activity = settings["addresses"][0][0], "starting"
        self._problem = ""
        self._connect(self.last_heard + self.timeout_s)

    def _connect(self, deadline: float) -> None:
        while self.coordinator is None and time.monotonic() < deadline and not has_ended(self.pid):
            for host, port in self.settings["addresses"]:
                with contextlib.suppress(OSError):
                    sock = socket.create_connection((host, port), timeout=5)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self.coordinator = MessageSocket(sock)
                    self.selector.register(sock, selectors.EVENT_READ)
                    self.send_to_coordinator(hello={"rank": self.rank, "token": self.settings["token"]})
                    self.last_heard = time.monotonic()
                    return
            time.sleep(0.5)
        if self.coordinator is None:
            where = ", ".join(f"{host}:{port}" for host, port in self.settings["addresses"])
            self._problem = f"rank {self.rank} on host {self.host} cannot reach rank 0 at {where}: a firewall?"

    def send_to_coordinator(self, **message: object) -> None:
        if self.coordinator is not None:
            self.coordinator.send(**message)

    def receive_from_watchdogs(self) -> None:
        if self.coordinator is None or not self.coordinator.is_open:
            return
        for message in self.coordinator.receive():
            self.last_heard = time.monotonic()
            if "heartbeat" in message:
                self.coordinator_host = message["heartbeat"]["host"]
                self.coordinator_activity = message["heartbeat"]["activity"]
            elif "verdict" in message:
                self.apply_verdict(Verdict(**message["verdict"]))
            elif "all_leaving" in message:
                self.rank_socket.send(all_leaving=message["all_leaving"])
            elif "closing" in message:
                self.is_closing = True
        if not self.coordinator.is_open:
            self.selector.unregister(self.coordinator.sock)
            # leaves a second for a verdict in transit
            self.last_heard = min(self.last_heard, time.monotonic() - self.timeout_s + 1.0)

    def look_for_failures(self, now: float) -> None:
        if now - self._last_check > 5.0:
            self.last_heard += now - self._last_check  # this process was paused
        self._last_check = now
        if self.coordinator is not None:
            self.coordinator.flush()
        if self.verdict is not None or self.is_closing:
            return
        is_lost = self.coordinator is not None and not self.coordinator.is_open
        if self._problem or now - self.last_heard > self.timeout_s:
            rank_0 = f"rank 0 on host {self.coordinator_host}"
            if is_lost:
                self._problem = f"{rank_0} ended at once with its watchdog (killed, or the host went down)"
            elif not self._problem:
                self._problem = f"nothing was heard from {rank_0} for {self.timeout_s:g} s (heartbeat_timeout)"
                self._problem += ". The host or its network is down, or the host is stopped"
            here = f"rank {self.rank} on host {self.host} was in {self.state.activity}"
            sentence = f"{self._problem}; it was last in {self.coordinator_activity}, {here}."
            self.apply_verdict(self.with_remedy(Verdict(sentence, fatal=True)))

    def is_finished(self) -> bool:
        if self.status == 0 or self.verdict is not None or self.coordinator is None or not self.coordinator.is_open:
            return True
        return time.monotonic() - self.ended_at > (0.0 if self.is_exiting else LAST_WORDS_S)
