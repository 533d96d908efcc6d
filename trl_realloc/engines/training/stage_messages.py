"""Tensors between neighbouring stages of a pipeline: a `StageLink` sends and receives those of two stages. The names
and the order of the messages follow from the stages' tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class StageTask(NamedTuple):
    """One forward or backward on a stage, and the message that it sends to the neighbour whose task has the same name:
    hidden states to the stage after, their gradient to the stage before.

    Args:
        model: 0, or 1 for the second of two fused models.
        micro_batch: number within the model's pipeline.
    """

    model: int
    micro_batch: int
    is_backward: bool

    @property
    def channel(self) -> tuple[int, bool]:
        """Key shared by all tasks that send in one direction along the line for a model."""
        return self.model, self.is_backward


Channels = Collection[tuple[int, bool]]


def message_order(
    first: Sequence[StageTask], second: Sequence[StageTask], sends: Channels, receives: Channels
) -> list[StageTask]:
    """The order in which two neighbours reach their messages without tags: the order in which the first stage sends and
    takes them. A message that the second sends earlier than the first takes it comes before the next taken one.

    Args:
        first, second: tasks of both stages, in the order in which they run.
        sends, receives: channels that the first sends to the second and receives from it.
    """
    order, arrived = list[StageTask](), set[StageTask]()
    sent = (task for task in second if task.channel in receives)
    for task in first:
        if task.channel in sends:
            order.append(task)
        while task.channel in receives and task not in arrived:
            order.append(next(sent))
            arrived.add(order[-1])
    return order


class StageLink:
    """The messages between this rank and one neighbour. A send does not wait for its receive.

    gloo distinguishes messages by their tags, and a stage receives the next message while it computes. NCCL has no
    tags: the messages of two ranks run one after the other, each when both ranks have reached it, and a receive
    occupies the device. So both ranks reach them in one order, and a message is received when it is taken, or when a
    message that follows it in the order is sent. Then no order of tasks deadlocks, even if every message blocks its
    rank until the other has reached it: of two neighbours that wait for different messages, both have reached the
    earlier one, and a line of stages has no other cycle.

    Args:
        group: a process group with both ranks.
        peer: global rank of the neighbour.
        order: result of `message_order`.
        sends: channels that this rank sends.
        empty: makes the tensor that a message is received in.
        has_tags: whether the group's backend distinguishes messages by their tags.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        peer: int,
        order: Sequence[StageTask],
        sends: Channels,
        empty: Callable[[StageTask], Tensor],
        *,
        has_tags: bool,
    ) -> None:
        self.group, self.peer, self.empty, self.has_tags = group, peer, empty, has_tags
        self._numbers = {task: number for number, task in enumerate(order)}
        self._expected = deque(task for task in order if task.channel not in sends)
        self._arriving: dict[StageTask, tuple[dist.Work, Tensor]] = {}
        # a tensor's memory must stay until it has been sent
        self._sending: dict[StageTask, tuple[dist.Work, Tensor]] = {}
        if has_tags:
            self._receive_next()

    def send(self, task: StageTask, tensor: Tensor) -> None:
        for earlier in [sent for sent, (work, _) in self._sending.items() if work.is_completed()]:
            self.wait(earlier)
        number, tensor = self._numbers[task], tensor.contiguous()
        if not self.has_tags:
            self._receive_before(number)
        work = dist.isend(tensor, self.peer, group=self.group, tag=number)
        assert work is not None, "both ranks are in the group"
        self._sending[task] = work, tensor

    def wait(self, task: StageTask) -> None:
        """Wait until this message has been sent, if it has not."""
        if task in self._sending:
            work, _ = self._sending.pop(task)
            work.wait()

    def wait_all(self) -> None:
        for task in list(self._sending):
            self.wait(task)

    def take(self, task: StageTask) -> Tensor:
        """The tensor of a message. Messages that the neighbour sends before it are received too."""
        self._receive_before(self._numbers[task] + 1)
        work, tensor = self._arriving.pop(task)
        work.wait()
        if self.has_tags and not self._arriving:
            self._receive_next()
        return tensor

    def _receive_before(self, number: int) -> None:
        while self._expected and self._numbers[self._expected[0]] < number:
            self._receive_next()

    def _receive_next(self) -> None:
        if self._expected:
            task = self._expected.popleft()
            tensor = self.empty(task)
            work = dist.irecv(tensor, self.peer, group=self.group, tag=self._numbers[task])
            assert work is not None, "both ranks are in the group"
            self._arriving[task] = (work, tensor)
