"""How a reallocation's messages are cut into sends and receives."""

from __future__ import annotations

import torch
from llamas import llama

from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.realloc.layout import layout_of
from trl_realloc.realloc.schedule import Message, make_schedule
from trl_realloc.realloc.transfer import Transfer, TransferOptions


def _operations(messages: list[Message], *, batched: bool) -> int:
    """Sends of these messages; on a GPU they are one batch for each bucket."""
    transfer = object.__new__(Transfer)  # its constructor connects process groups
    names = {piece.parameter for message in messages for piece in message.pieces}
    transfer.checksum, transfer._batched, transfer.dtypes = False, batched, dict.fromkeys(names, torch.float32)
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
