"""Messages between rank 0 and the other ranks during generation: events to rank 0, tasks from it. `Leader` is rank 0's
side of the connection, `LeaderLink` each rank's side.

The contents of the messages are in `stream_leader`, and for calls that run ahead of the training in `ahead_runs`.
"""

from __future__ import annotations

import pickle
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..messages import EVENTS, TASKS, Channels
from ..samples.routes import RESULTS


Event = TypeVar("Event")
Task = TypeVar("Task")


@dataclass(frozen=True)
class Left:
    """A rank has ended its part and sends no more events."""


class Leader(ABC, Generic[Event, Task]):
    """Answers the ranks in a thread, because rank 0's main thread generates and scores itself.

    Args:
        channels: has a channel for events and one for tasks.
        ranks: the ranks that get tasks.

    Attributes:
        local: rank 0's tasks, and errors of the receiving thread.
    """

    def __init__(self, channels: Channels, ranks: Collection[int]) -> None:
        self._events, self._tasks, self.ranks = channels.about(EVENTS), channels.about(TASKS), sorted(ranks)
        self.local: queue.SimpleQueue[Task | BaseException] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def listen(self, remote: int, name: str) -> None:
        """Begin to receive the events of the other ranks, from each until it has `Left`.

        Args:
            remote: number of other ranks that send events.
        """
        self._thread = threading.Thread(target=self._receive, args=(remote,), daemon=True, name=name)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all other ranks have ended their part. Raises errors of the receiving thread."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    @abstractmethod
    def report(self, event: Event) -> None:
        """Handle an event of a rank."""

    def send(self, rank: int, task: Task) -> None:
        """Send a rank a task. Does not wait."""
        if rank == RESULTS:
            self.local.put(task)
        else:
            self._tasks.send(pickle.dumps(task), rank)

    def _receive(self, remote: int) -> None:
        try:
            while remote:
                _, content = self._events.receive_any()
                event: Event = pickle.loads(content)  # safe: from another rank of this job
                remote -= isinstance(event, Left)
                self.report(event)
        except BaseException as error:  # raised again by `wait`, and by the links of the ranks that wait for tasks
            self._error = error
            self.local.put(error)
            problem = RuntimeError(f"rank 0 failed to schedule the next task: {type(error).__name__}: {error}")
            for rank in self.ranks:
                if rank != RESULTS:
                    self._tasks.send(pickle.dumps(problem), rank)


class LeaderLink(Generic[Event, Task]):
    """Sends events to the leader and receives its tasks. A thread receives them, so that the leader never waits.

    Args:
        channels: the channels of the leader.
        leader: the leader, on rank 0; `None` on the others.
        last: type of the last task.
    """

    def __init__(
        self,
        channels: Channels,
        leader: Leader[Event, Task] | None,
        last: type[object],
        *,
        takes_tasks: bool = True,
    ) -> None:
        self._events, self._sent_tasks = channels.about(EVENTS), channels.about(TASKS)
        self.leader, self._last = leader, last
        self._tasks: queue.SimpleQueue[Task | BaseException] = queue.SimpleQueue()
        if leader is not None:
            self._tasks = leader.local
        elif takes_tasks:
            threading.Thread(target=self._receive, daemon=True, name="leader-tasks").start()

    def _receive(self) -> None:
        try:
            task: Task | BaseException | None = None
            while not isinstance(task, (self._last, BaseException)):
                task = pickle.loads(self._sent_tasks.receive(RESULTS))  # safe: from a rank of this job
                self._tasks.put(task)
        except BaseException as error:  # raised by `next_task`
            self._tasks.put(error)

    def report(self, event: Event) -> None:
        """Send an event to the leader. Does not wait."""
        if self.leader is not None:
            self.leader.report(event)
        else:
            self._events.send(pickle.dumps(event), RESULTS)

    def next_task(self, timeout_s: float) -> Task | None:
        """The next task, in the order of sending; `None` at the timeout. Raises errors of the receiving thread, here or
        on rank 0."""
        try:
            task = self._tasks.get(timeout=timeout_s) if timeout_s else self._tasks.get_nowait()
        except queue.Empty:
            return None
        if isinstance(task, BaseException):
            raise task
        return task
