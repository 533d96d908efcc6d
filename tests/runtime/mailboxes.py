"""`runtime.messages.Messages` in memory, between threads that play the ranks of a job, with the number and the bytes of
what each has sent, and the bytes that each has received."""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any


def on_ranks(ranks: Iterable[int], work: Callable[[int], Any], timeout_s: float = 60.0) -> list[Any]:
    """What `work(rank)` returns, or the exception that it raises, on threads that play the ranks of a job."""
    outcomes: dict[int, Any] = {}

    def play(rank: int) -> None:
        try:
            outcomes[rank] = work(rank)
        except Exception as error:
            outcomes[rank] = error

    threads = {rank: threading.Thread(target=play, args=(rank,), daemon=True) for rank in ranks}
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads.values()), "a rank waits for ever"
    return [outcomes[rank] for rank in threads]


class Mailboxes:
    """The messages of all ranks.

    Args:
        timeout_s: of waiting for one message; `None` to wait for ever.
        new_queue: makes a queue like `queue.SimpleQueue`.
    """

    def __init__(self, timeout_s: float | None = 60.0, new_queue: Callable[[], Any] = queue.SimpleQueue) -> None:
        self.timeout_s = timeout_s
        self.sent, self.bytes = Counter[int](), Counter[int]()  # a rank's are counted by its own thread alone
        self.received = Counter[int]()  # bytes
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue[bytes]] = defaultdict(new_queue)
        self._sources: dict[tuple[int, int], queue.SimpleQueue[int]] = defaultdict(new_queue)
        self._lock = threading.Lock()

    def of(self, rank: int) -> Mailbox:
        return Mailbox(self, rank)

    def box(self, source: int, target: int, tag: int) -> queue.SimpleQueue[bytes]:
        with self._lock:
            return self._boxes[source, target, tag]

    def sources(self, target: int, tag: int) -> queue.SimpleQueue[int]:
        """The sender of each message to a rank under a tag, in the order in which they were sent. Read for tags alone
        whose messages are received from any rank."""
        with self._lock:
            return self._sources[target, tag]


class Mailbox:
    """The `Messages` of one rank."""

    def __init__(self, boxes: Mailboxes, rank: int) -> None:
        self.boxes, self.rank = boxes, rank

    def send(self, content: bytes, rank: int, tag: int) -> None:
        self.boxes.sent[self.rank] += 1
        self.boxes.bytes[self.rank] += len(content)
        self.boxes.box(self.rank, rank, tag).put(content)
        self.boxes.sources(rank, tag).put(self.rank)

    def receive(self, rank: int, tag: int) -> bytes:
        content = self.boxes.box(rank, self.rank, tag).get(timeout=self.boxes.timeout_s)
        self.boxes.received[self.rank] += len(content)
        return content

    def receive_any(self, tag: int) -> tuple[int, bytes]:
        source = self.boxes.sources(self.rank, tag).get(timeout=self.boxes.timeout_s)
        return source, self.receive(source, tag)

    def flush(self) -> None:
        pass

    def twin(self) -> Mailbox:
        return Mailbox(self.boxes, self.rank)
