"""`MessageSocket`: JSON messages between a rank and its watchdog, and between watchdogs. What they mean is in
`watchdog_process`."""

from __future__ import annotations

import json
import socket
from typing import Any


JsonMessage = dict[str, Any]


class MessageSocket:
    """JSON objects, one per line, over a stream socket that never blocks.

    Attributes:
        is_open: False after an error or the end of the stream.
        rank: in rank 0's watchdog, whose watchdog is at the other end, once it has sent the right token.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock, self.is_open = sock, True
        self.rank: int | None = None
        self._received, self._unsent = b"", bytearray()

    def send(self, **message: object) -> None:
        """Send a message, or queue what the socket does not take now."""
        if self.is_open:
            self._unsent += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
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
