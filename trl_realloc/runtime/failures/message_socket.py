"""`MessageSocket`: JSON messages between a rank and its watchdog, and between watchdogs. `watchdog_process` lists the
messages."""

from __future__ import annotations

import json
import socket
from typing import Any


JsonMessage = dict[str, Any]


class MessageSocket:
    """JSON objects, one per line, over a stream socket that never blocks.

    Attributes:
        is_open: False after an error or the end of the stream.
        rank: rank of the watchdog at the other end, after it has sent the right token; only in rank 0's watchdog.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock, self.is_open = sock, True
        self.rank: int | None = None
        self._received, self._unsent = b"", bytearray()

    def send(self, **message: object) -> None:
        """Send a message, or queue it if the socket would block."""
        if self.is_open:
            self._unsent += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        """Send the queued bytes until the socket would block."""
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def receive(self) -> list[JsonMessage]:
        """The messages that have arrived. Raises `ValueError` for a line that is not a JSON object."""
        if not self.is_open:
            return []
        try:
            while data := self.sock.recv(1 << 16):
                self._received += data
            self.is_open = False
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *lines, self._received = self._received.split(b"\n")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a line is not a JSON object")
        return messages
