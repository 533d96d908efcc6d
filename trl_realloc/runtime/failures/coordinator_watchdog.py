"""`CoordinatorWatchdog`: the watchdog of rank 0, to which all others connect. It decides when the job has failed, by
the rules of `liveness`.
"""

from __future__ import annotations

import contextlib
import hmac
import resource
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict

from .liveness import Liveness
from .message_socket import JsonMessage, MessageSocket
from .rank_watchdog import KILL_S, LAST_WORDS_S, Watchdog


ALL_GENERATIONS = 1 << 30  # the generation of a fatal failure, which ends every runtime


class CoordinatorWatchdog(Watchdog):
    """Collects heartbeats, errors and ends of all ranks, and sends verdicts to all watchdogs."""

    def __init__(self, rank_socket: MessageSocket, settings: JsonMessage) -> None:
        super().__init__(rank_socket, settings)
        self.liveness = Liveness(settings["world_size"], self.timeout_s, time.monotonic())
        self.peers: list[MessageSocket] = []
        self._all_leaving = -1  # the newest generation whose `all_leaving` was sent to the ranks
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # a connection for each rank
        if settings["world_size"] > 1:
            is_dual_stack = settings["everywhere"] and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if is_dual_stack else socket.AF_INET
            address = ("" if settings["everywhere"] else "127.0.0.1", 0)
            self.server = socket.create_server(address, family=family, backlog=4096, dualstack_ipv6=is_dual_stack)
            self.server.setblocking(False)
            self.selector.register(self.server, selectors.EVENT_READ)
            rank_socket.send(port=self.server.getsockname()[1])

    def send_to_coordinator(self, **message: object) -> None:
        self._record(self.rank, message)
        if "heartbeat" in message:
            self._send_to_peers(**message)

    def receive_from_watchdogs(self) -> None:
        if self.settings["world_size"] == 1:
            return
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.server.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.peers.append(MessageSocket(sock))
                self.selector.register(sock, selectors.EVENT_READ)
        for peer in self.peers:
            for message in self._messages(peer):
                if peer.rank is None:
                    peer.rank = self._rank_of(message.get("hello"))
                    if peer.rank is None:  # a stranger
                        peer.is_open = False
                        break
                    if self.verdict is not None:
                        peer.send(verdict=asdict(self.verdict))
                else:
                    self._record(peer.rank, message)
            if not peer.is_open:
                self.selector.unregister(peer.sock)
                peer.sock.close()
                if peer.rank is not None and not self.is_closing:
                    self.liveness.lose(peer.rank, time.monotonic())
        self.peers = [peer for peer in self.peers if peer.is_open]

    def _messages(self, peer: MessageSocket) -> Iterator[JsonMessage]:
        try:
            yield from peer.receive()
        except ValueError:  # the peer is not a watchdog of this job
            peer.is_open = False

    def _record(self, rank: int, message: JsonMessage) -> None:
        now = time.monotonic()
        if "heartbeat" in message:
            heartbeat = message["heartbeat"]
            names = ("host", "pid", "activity", "stopped_s", "launcher_stopped_s", "leaving")
            self.liveness.hear(rank, now, **{name: heartbeat[name] for name in names})
        elif "error" in message:
            error = message["error"]
            self.liveness.error(now, error["sentence"], error["generation"], network=error["network"])
        elif "ended" in message:
            ended = message["ended"]
            self.liveness.end(rank, now, ended["status"], ended["exiting"], ended["launcher"])

    def look_for_failures(self, now: float) -> None:
        verdict = self.liveness.judge(now)
        if verdict is not None:
            verdict = self.with_remedy(verdict)
            self._send_to_peers(verdict=asdict(verdict))
            self.apply_verdict(verdict)
        current = self.liveness.verdict
        generation = -1 if current is None else ALL_GENERATIONS if current.fatal else current.generation
        if self._all_leaving < generation and self.liveness.all_leaving(
            0 if generation == ALL_GENERATIONS else generation
        ):
            self._all_leaving = generation
            self._send_to_peers(all_leaving=generation)
            self.rank_socket.send(all_leaving=generation)
        for peer in self.peers:
            peer.flush()

    def _rank_of(self, hello: object) -> int | None:
        """The rank of a watchdog's greeting; `None` if the peer is not a watchdog of this job."""
        fields = hello if isinstance(hello, dict) else {}
        token, rank = str(fields.get("token", "")).encode(), fields.get("rank")
        is_known = hmac.compare_digest(token, self.settings["token"].encode())
        return rank if is_known and isinstance(rank, int) and 0 <= rank < self.settings["world_size"] else None

    def _send_to_peers(self, **message: object) -> None:
        for peer in self.peers:
            if peer.rank is not None:
                peer.send(**message)

    def is_finished(self) -> bool:
        if self.liveness.is_undecided:
            return False
        now = time.monotonic()
        ended_well = self.liveness.ranks[self.rank].ended and self.verdict is None and not self.liveness.verdict
        all_ended = all(state.ended for state in self.liveness.ranks.values())
        patience = LAST_WORDS_S if ended_well and not all_ended else KILL_S + LAST_WORDS_S
        if all_ended or now - self.ended_at > patience:
            self.is_closing = True
            self._send_to_peers(closing=True)
            return True
        return False
