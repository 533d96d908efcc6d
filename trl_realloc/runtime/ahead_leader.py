"""`AheadLeader`: rank 0's part of an iteration in which calls run ahead of the training. It passes what ranks report to
`planner.ahead_order.AheadOrder`, and the orders that follow from it to the ranks. `AheadLink` is a rank's connection
to it.

What the ranks do is in `ahead_runs`.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..planner.ahead_order import AheadOrder, AheadTask, EndIteration, RunCall
from .messages import Messages
from .routes import RESULTS


@dataclass(frozen=True)
class Done:
    """A rank has published its part of a call's outputs, or the call's failure."""

    iteration: int
    call: str
    rank: int
    failed: bool = False


@dataclass(frozen=True)
class Left:
    """A rank has ended its part of the iteration, and reports nothing more."""


class AheadLeader:
    """Answers the ranks during one iteration.

    Args:
        messages: of rank 0.
        tag: of the events; the orders have `tag + 1`.
        order: of the run.
        ranks: those that run ahead, which get orders.
        world: the number of ranks of the job, which all report.
        iteration: that trains.

    Attributes:
        local: the orders of rank 0 itself.
    """

    def __init__(
        self,
        messages: Messages,
        tag: int,
        order: AheadOrder,
        ranks: Collection[int],
        world: int,
        iteration: int,
    ) -> None:
        self.messages, self.tag, self.order, self.ranks = messages, tag, order, sorted(ranks)
        self.local: queue.SimpleQueue[AheadTask | BaseException] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        with self._lock:
            self._give(order.begin(iteration))
        self._thread = threading.Thread(target=self._receive, args=(world - 1,), daemon=True, name="ahead-leader")
        self._thread.start()

    def wait(self) -> None:
        """Wait until all other ranks have ended their part. Raises what receiving their messages raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _receive(self, remote: int) -> None:
        try:
            while remote:
                _, content = self.messages.receive_any(self.tag)
                event: Done | Left = pickle.loads(content)  # safe: from another rank of this job
                remote -= isinstance(event, Left)
                self.report(event)
        except BaseException as error:  # raised again by `wait`, and by the links of the ranks that wait for orders
            self._error = error
            self.local.put(error)
            problem = RuntimeError(f"rank 0 cannot order what is run next: {type(error).__name__}: {error}")
            for rank in self.ranks:
                if rank != RESULTS:
                    self.messages.send(pickle.dumps(problem), rank, self.tag + 1)

    def report(self, event: Done | Left) -> None:
        """Something has happened on a rank."""
        if isinstance(event, Left):
            return
        with self._lock:
            self._give(self.order.done(event.iteration, event.call, event.rank, failed=event.failed))

    def _give(self, orders: Sequence[AheadTask]) -> None:
        for order in orders:
            content = pickle.dumps(order)
            for rank in self._receivers(order):
                if rank == RESULTS:
                    self.local.put(order)
                else:
                    self.messages.send(content, rank, self.tag + 1)

    def _receivers(self, order: AheadTask) -> Sequence[int]:
        return self.order.devices_of(order.call) if isinstance(order, RunCall) else self.ranks


class AheadLink:
    """A rank's connection to the leader during one iteration.

    Args:
        messages: of this rank.
        tag: as the leader's.
        leader: on rank 0; `None` on the others.
        takes_orders: whether this rank runs ahead.
    """

    def __init__(self, messages: Messages, tag: int, leader: AheadLeader | None, *, takes_orders: bool) -> None:
        self.messages, self.tag, self.leader = messages, tag, leader
        self._tasks: queue.SimpleQueue[AheadTask | BaseException] = queue.SimpleQueue()
        if leader is not None:
            self._tasks = leader.local
        elif takes_orders:
            threading.Thread(target=self._receive, daemon=True, name="ahead-tasks").start()

    def _receive(self) -> None:
        try:
            task: AheadTask | BaseException | None = None
            while not isinstance(task, EndIteration | BaseException):
                task = pickle.loads(self.messages.receive(RESULTS, self.tag + 1))  # safe: from a rank of this job
                self._tasks.put(task)
        except BaseException as error:  # raised by `next_task`
            self._tasks.put(error)

    def report(self, event: Done | Left) -> None:
        """Tell the leader. Does not wait."""
        if self.leader is not None:
            self.leader.report(event)
        else:
            self.messages.send(pickle.dumps(event), RESULTS, self.tag)

    def next_task(self, timeout_s: float) -> AheadTask | None:
        """The next order, in the order in which they were given; `None` if none comes in time. Raises what receiving
        raised."""
        try:
            task = self._tasks.get(timeout=timeout_s) if timeout_s else self._tasks.get_nowait()
        except queue.Empty:
            return None
        if isinstance(task, BaseException):
            raise task
        return task
