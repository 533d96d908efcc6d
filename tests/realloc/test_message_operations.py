"""How a reallocation's messages are cut into sends and receives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llamas import llama

from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.realloc.layout import layout_of
from trl_realloc.realloc.schedule import Message, make_schedule
from trl_realloc.realloc.transfer import Transfer, TransferError, TransferOptions


def _operations(messages: list[Message], *, batched: bool) -> int:
    """Sends of these messages; on a GPU they are one batch for each bucket."""
    transfer = object.__new__(Transfer)  # its constructor connects process groups
    names = {piece.parameter for message in messages for piece in message.pieces}
    transfer._batched, transfer.dtypes = batched, dict.fromkeys(names, torch.float32)
    split = [transfer._split(message) for message in messages]
    return sum(len(large) + bool(small) for large, small in split)


def test_a_batch_has_one_operation_for_each_message_however_many_parameters_it_has() -> None:
    """NCCL may run the operations of a group in another order on each rank when they are hundreds."""
    trains = Assignment(DeviceMesh(0, 8), ParallelStrategy(8, zero_stage=3), "zero")
    scores = Assignment(DeviceMesh(8, 8), ParallelStrategy(8), "zero")
    spec = llama(7)
    schedule = make_schedule(Cluster(2, 8), layout_of(trains, spec), layout_of(scores, spec))
    steps = schedule.steps(0, TransferOptions().bucket_bytes)
    messages = [message for step in steps for message in step.sends]
    assert _operations(messages, batched=True) == len(messages)
    assert _operations(messages, batched=False) > len(messages)


class Work:
    """A message that a device has done after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks, self.waited = looks, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.waited = True


def test_messages_between_gpus_are_looked_for_and_have_a_time_limit() -> None:
    moving: Any = object.__new__(Transfer)
    moving.name, moving.rank, moving.polls, moving.timeout_s = "a -> b", 0, True, 0.05
    message = SimpleNamespace(source=0, target=1, pieces=[SimpleNamespace(parameter="w")])
    done: Any = SimpleNamespace(message=message, work=Work(5))
    work = done.work
    moving.wait(done)
    assert work.waited and done.work is None
    with pytest.raises(TransferError, match=r"message from rank 0 to rank 1 with w failed \(time limit 0.05 s\)"):
        moving.wait(SimpleNamespace(message=message, work=Work(1 << 60)))
