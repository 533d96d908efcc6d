"""`StreamLeader`: rank 0's part of a streamed phase. It passes what ranks report to the `Dispatcher`, and the orders
that follow from it to the ranks.

Rank 0 answers in a thread, because its main thread generates and scores itself. What the ranks do is in
`stream_worker`.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Sequence

from transformers.utils import logging

from ..engines.base import Unfinished
from ..planner.dispatcher import Continue, Dispatcher, Order, Release, Score, Withdraw
from ..planner.stream import Stream
from .exchange import CallFailure, Failures
from .leader_link import LeaderLink
from .messages import Messages
from .routes import RESULTS
from .stream_forwards import ForwardSamples
from .stream_messages import (
    End,
    Event,
    Failed,
    Finished,
    GoOn,
    Joined,
    Left,
    Scored,
    Task,
    Withdrawn,
)


logger = logging.get_logger(__name__)
StreamLink = LeaderLink[Event, Task]


class StreamLeader:
    """Begins at once to answer the ranks of a streamed phase.

    Args:
        messages: of rank 0.
        tag: of the events; the orders have `tag + 1`.
        stream: of the phase.
        dispatcher: a new one for the same stream.

    Attributes:
        orders: all that were given, in their order.
        local: the tasks of rank 0 itself.
    """

    def __init__(self, messages: Messages, tag: int, stream: Stream, dispatcher: Dispatcher) -> None:
        self.messages, self.tag, self.stream, self.dispatcher = messages, tag, stream, dispatcher
        self.orders: list[Order] = []
        self.local: queue.SimpleQueue[Task | BaseException] = queue.SimpleQueue()
        self._engines = stream.generation.engines
        self._samples = ForwardSamples(stream)
        self._withdrawn: dict[int, Unfinished] = {}
        self._has_ended = False
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        remote = len(stream.ranks - {RESULTS})
        self._thread = threading.Thread(target=self._receive, args=(remote,), daemon=True, name="stream-leader")
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
                event: Event = pickle.loads(content)  # safe: from another rank of this job
                remote -= isinstance(event, Left)
                self.report(event)
        except BaseException as error:  # raised again by `wait`
            self._error = error

    def report(self, event: Event) -> None:
        """Something has happened on a rank."""
        with self._lock:
            if self._has_ended or isinstance(event, Left):
                return
            if isinstance(event, Failed):
                self._end(event.failures)
                return
            try:
                for order in self._orders_after(event):
                    self.orders.append(order)
                    self._give(order)
            except Exception as error:  # a defect of this package; the ranks wait for orders, so they must learn of it
                logger.exception("the leader of the streams failed")
                problem = (
                    f"rank 0 cannot order what follows from {type(event).__name__}: {type(error).__name__}: {error}"
                )
                self._end((CallFailure(RESULTS, self.stream.generation.name, problem),))
                return
            if self.dispatcher.is_finished:
                self._end(())

    def _end(self, failures: Failures) -> None:
        self._has_ended = True
        for rank in sorted(self.stream.ranks):
            self._send(rank, End(failures))

    def _orders_after(self, event: Event) -> Sequence[Order]:
        match event:
            case Joined(rank):
                return self.dispatcher.join(rank)
            case Finished(engine, tokens, rows):
                self._samples.add(self.stream.generation.name, rows)
                return self.dispatcher.finish(engine, list(tokens.items()))
            case Withdrawn(engine, samples):
                self._withdrawn.update({sample.index: sample for sample in samples})
                return self.dispatcher.withdraw(engine, [sample.index for sample in samples])
            case Scored(number, rows):
                return self.dispatcher.scored(number) if self._samples.scored(number, rows) else []
        raise AssertionError(f"{event} is no event that orders follow from")

    def _give(self, order: Order) -> None:
        match order:
            case Score():
                for rank, forward in self._samples.forwards(order):
                    self._send(rank, forward)
            case Continue(engine, samples):
                begun = tuple(self._withdrawn.pop(index) for index in samples)
                self._send(self._engines[engine][0], GoOn(begun))
            case Withdraw(engine):
                self._send(self._engines[engine][0], order)
            case Release(engine):
                for rank in self._engines[engine]:
                    self._send(rank, order)

    def _send(self, rank: int, task: Task) -> None:
        if rank == RESULTS:
            self.local.put(task)
        else:
            self.messages.send(pickle.dumps(task), rank, self.tag + 1)
