"""The watchdog process of one rank, run by `watchdog_client` as `python -m ….watchdog_process FILE_DESCRIPTOR`.

Messages between the rank and its watchdog, JSON objects with one key each:

| from the rank | to the rank |
| --- | --- |
| `settings`, first of all | `port` (rank 0 only): where its watchdog listens |
| `activity` (what the rank is doing), `checkpoint` (the newest) | `verdict`: the job has failed |
| `error` (an exception of the rank) | `all_leaving`: all ranks have ended or are leaving |
| `acknowledged` (the rank handles a failure by an exception), `leaving`, `exiting` (normal shutdown has begun) | |
| `remove`, `keep` (a temporary folder) | |

The watchdogs are in `rank_watchdog`, `coordinator_watchdog` and `peer_watchdog`.
"""

from __future__ import annotations

import select
import socket
import sys

from .coordinator_watchdog import CoordinatorWatchdog
from .message_socket import JsonMessage, MessageSocket
from .peer_watchdog import PeerWatchdog
from .rank_watchdog import Watchdog


def main() -> None:
    rank_socket = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    messages: list[JsonMessage] = []
    while not messages and rank_socket.is_open:
        select.select([rank_socket.sock], [], [], 5)
        messages = rank_socket.receive()
    if messages:
        settings = messages.pop(0)["settings"]
        kind: type[Watchdog] = CoordinatorWatchdog if settings["rank"] == 0 else PeerWatchdog
        watchdog = kind(rank_socket, settings)
        watchdog.receive_from_rank(messages)
        watchdog.run()


if __name__ == "__main__":
    main()
