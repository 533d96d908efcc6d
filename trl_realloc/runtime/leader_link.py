"""`LeaderLink`: a rank's connection to rank 0, which orders what the rank does while samples are generated.

What is reported and ordered is in `stream_leader`, and for calls that run ahead of the training in `ahead_leader`.
"""

from __future__ import annotations

import pickle
import queue
import threading
from typing import Any, Generic, Protocol, TypeVar

from .messages import Messages
from .routes import RESULTS


Event = TypeVar("Event", contravariant=True)
Task = TypeVar("Task")


class Leader(Protocol[Event, Task]):
    """Rank 0's side.

    Attributes:
        local: the tasks of rank 0 itself, and what receiving events raised.
    """

    local: queue.SimpleQueue[Task | BaseException]

    def report(self, event: Event) -> None:
        """Something has happened on a rank."""


class LeaderLink(Generic[Event, Task]):
    """Sends events to the leader and receives its tasks. A thread receives them, so that the leader never waits.

    Args:
        messages: of this rank.
        tag: of the events, as the leader's; the tasks have `tag + 1`.
        leader: on rank 0; `None` on the others.
        last: the type of the task after which no other comes.
        takes_tasks: whether this rank gets any.
    """

    def __init__(
        self,
        messages: Messages,
        tag: int,
        leader: Leader[Event, Task] | None,
        last: type[Any],
        *,
        takes_tasks: bool = True,
    ) -> None:
        self.messages, self.tag, self.leader, self._last = messages, tag, leader, last
        self._tasks: queue.SimpleQueue[Task | BaseException] = queue.SimpleQueue()
        if leader is not None:
            self._tasks = leader.local
        elif takes_tasks:
            threading.Thread(target=self._receive, daemon=True, name="leader-tasks").start()

    def _receive(self) -> None:
        try:
            task: Task | BaseException | None = None
            while not isinstance(task, (self._last, BaseException)):
                task = pickle.loads(self.messages.receive(RESULTS, self.tag + 1))  # safe: from a rank of this job
                self._tasks.put(task)
        except BaseException as error:  # raised by `next_task`
            self._tasks.put(error)

    def report(self, event: Event) -> None:
        """Tell the leader. Does not wait."""
        if self.leader is not None:
            self.leader.report(event)
        else:
            self.messages.send(pickle.dumps(event), RESULTS, self.tag)

    def next_task(self, timeout_s: float) -> Task | None:
        """The next task, in the order in which they were given; `None` if none comes in time. Raises what receiving
        raised, here or on rank 0."""
        try:
            task = self._tasks.get(timeout=timeout_s) if timeout_s else self._tasks.get_nowait()
        except queue.Empty:
            return None
        if isinstance(task, BaseException):
            raise task
        return task
