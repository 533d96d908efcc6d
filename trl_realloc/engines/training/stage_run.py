"""The forwards and backwards of a mini-batch on one stage, in any order that the other stages can follow.

`run_pipeline` runs one model, by 1F1B or forward only. `fused_training` orders two models that train at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...algorithms.rollout import Ragged
from ...plan.batching import one_f_one_b
from ..device import is_accelerator
from ..mesh_group import MeshGroup
from .micro_batches import model_inputs
from .pipeline import PackedSamples, StagePipeline
from .stage_messages import StageLink, StageTask, message_order


Orders = Sequence[Sequence[StageTask]]  # tasks of each stage of a line, in the order in which they run


class _WithLoss(torch.autograd.Function):
    """Passes a stage's hidden states. Their backward is also that of the stage's part of the loss, 0-dimensional."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)


@dataclass(frozen=True)
class StageWork:
    """One model's micro-batches on one stage.

    Args:
        micros: micro-batches, the same on every rank of the pipeline.
        finish: called on the last stage with the index of a micro-batch and the head's outputs; returns the loss, a
            0-dimensional tensor. Also called on other stages that have outputs (`RoleHead.hidden`), with these; returns
            the stage's part of the loss.
        call: runs a stage's forward in its context, such as autocast.
    """

    pipeline: StagePipeline
    micros: Sequence[PackedSamples]
    finish: Callable[[int, Mapping[str, Ragged]], Tensor]
    call: Callable[[Callable[[], Any]], Any]

    def empty(self, micro_batch: int) -> Tensor:
        """Memory for the hidden states of a micro-batch, (1, tokens, width), or for their gradient."""
        pipeline, tokens = self.pipeline, self.micros[micro_batch].tokens
        return torch.empty((1, tokens, pipeline.hidden), dtype=pipeline.dtype, device=pipeline.device)

    def forward(self, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """The stage's hidden states, (1, tokens, width), or on the last stage the loss."""
        head, micro = self.pipeline.head, self.micros[micro_batch]
        samples, row = model_inputs(micro.samples), micro.row
        if self.pipeline.is_last:
            return self.finish(micro_batch, self.call(lambda: head(samples, row, received=hidden)))
        computed, outputs = self.call(lambda: head(samples, row, received=hidden, returns_hidden=True))
        computed = computed.to(self.pipeline.dtype)
        return _WithLoss.apply(computed, self.finish(micro_batch, outputs)) if outputs else computed


def run_pipeline(work: StageWork, *, trains: bool) -> None:
    """Run all micro-batches of one model forward, and backward if `trains`. Collective over the pipeline.

    With a backward, a stage has the activations of at most as many micro-batches as there are stages from it to the
    last one. Without, it holds at most as many sent hidden states as there are stages.
    """
    group, count = work.pipeline.group, len(work.micros)
    orders = [
        [StageTask(0, *task) for task in one_f_one_b(count, group.size, stage)]
        if trains
        else [StageTask(0, number, False) for number in range(count)]
        for stage in range(group.size)
    ]
    StageRun([work], orders, group).run()


def _unmeasured(model: int, is_backward: bool, tokens: int) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


class StageRun:
    """Runs the tasks of one stage and exchanges messages with its neighbours.

    Args:
        works: micro-batches of each model, by `StageTask.model`.
        orders: tasks of every stage of the line. A forward whose backward is not in it computes without a graph.
        line: ranks of the stages. A model may have several pipelines there, in either direction.
        measured: context that measures a forward or backward; its arguments are model, `is_backward` and number of
            tokens.
    """

    def __init__(
        self,
        works: Sequence[StageWork],
        orders: Orders,
        line: MeshGroup,
        measured: Callable[[int, bool, int], AbstractContextManager[None]] = _unmeasured,
    ) -> None:
        self.works, self.orders, self.line, self.measured = works, orders, line, measured
        self._trained = {task for task in orders[line.index] if task.is_backward}
        self._links: dict[int | None, StageLink] = {}
        for index in (line.index - 1, line.index + 1):
            if 0 <= index < line.size:
                self._connect(index)
        # task -> the stage's input and output between a forward and its backward
        self._activations: dict[StageTask, tuple[Tensor | None, Tensor]] = {}

    def _connect(self, index: int) -> None:
        line, peer = self.line, self.line.ranks[index]
        sends, receives = list[tuple[int, bool]](), list[tuple[int, bool]]()
        for model, work in enumerate(self.works):
            for is_backward, source, target in (
                (False, work.pipeline.before, work.pipeline.after),
                (True, work.pipeline.after, work.pipeline.before),
            ):
                sends += [(model, is_backward)] * (target == peer)
                receives += [(model, is_backward)] * (source == peer)
        own_tasks, other = self.orders[line.index], self.orders[index]
        if line.index < index:
            order = message_order(own_tasks, other, sends, receives)
        else:
            order = message_order(other, own_tasks, receives, sends)

        def empty(task: StageTask) -> Tensor:
            return self.works[task.model].empty(task.micro_batch)

        self._links[peer] = StageLink(line.group, peer, order, sends, empty, has_tags=not is_accelerator(line.device))

    def run(self) -> None:
        """Run the stage's tasks, and wait until everything has been sent."""
        for task in self.orders[self.line.index]:
            work = self.works[task.model]
            neighbours = self._links.get(work.pipeline.before), self._links.get(work.pipeline.after)
            (self._backward if task.is_backward else self._forward)(task, work, *neighbours)
        for link in self._links.values():
            link.wait_all()

    def _forward(self, task: StageTask, work: StageWork, before: StageLink | None, after: StageLink | None) -> None:
        backward = task._replace(is_backward=True)
        trains = backward in self._trained
        hidden = before.take(task).requires_grad_(trains) if before is not None else None
        with torch.set_grad_enabled(trains), self.measured(task.model, False, work.micros[task.micro_batch].tokens):
            computed = work.forward(task.micro_batch, hidden)
        if trains:
            self._activations[backward] = hidden, computed
        if after is not None:
            after.send(task, computed.detach())
            if not trains:
                after.wait(task._replace(micro_batch=task.micro_batch - work.pipeline.group.size))

    def _backward(self, task: StageTask, work: StageWork, before: StageLink | None, after: StageLink | None) -> None:
        gradient = None
        if after is not None:
            gradient = after.take(task)
            after.wait(task._replace(is_backward=False))  # its gradient is here, so it has arrived
        hidden, computed = self._activations.pop(task)
        with self.measured(task.model, True, work.micros[task.micro_batch].tokens):
            if computed.requires_grad:  # not in the first stage if it has no trained parameter
                torch.autograd.backward(computed, gradient)
        if before is not None:
            assert hidden is not None, "a stage that sends gradients has received hidden states"
            before.send(task, torch.zeros_like(hidden) if hidden.grad is None else hidden.grad)
