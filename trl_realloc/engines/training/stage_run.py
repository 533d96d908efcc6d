"""`StageRun`: the forwards and backwards of one mini-batch on one stage of a pipeline, in any order that the other
stages can follow.

The order is given by the caller (`fused_training`). Cutting a model to a stage is in `pipeline`, messages in
`stage_messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .pipeline import MiniBatch, Pipeline
from .stage_messages import Inbox, Outbox, Route


@dataclass(frozen=True)
class Neighbours:
    """The messages of a stage. `None` where there is no stage before or after it.

    Args:
        hidden_from, hidden_to: hidden states, from the stage before and to the stage after.
        gradient_from, gradient_to: their gradients, from the stage after and to the stage before.
        forwards_before: micro-batches in the order of their forwards on the stage before.
        backwards_after: micro-batches in the order of their backwards on the stage after.
    """

    hidden_from: Route | None
    hidden_to: Route | None
    gradient_from: Route | None
    gradient_to: Route | None
    forwards_before: Sequence[int]
    backwards_after: Sequence[int]


class StageRun:
    """Args:
    batch: the mini-batch; its statistics are filled on the last stage.
    call: runs a stage's forward in its context, such as autocast.
    measured: a context that measures a forward or backward (`is_backward`) of so many tokens.
    ahead: receive a tensor before it is taken.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        batch: MiniBatch,
        neighbours: Neighbours,
        call: Callable[[Callable[[], Any]], Any],
        measured: Callable[[bool, int], AbstractContextManager[None]],
        *,
        ahead: bool = True,
    ) -> None:
        self.pipeline, self.batch, self.call, self.measured = pipeline, batch, call, measured
        self._inputs = [micro.only(("index", "prompts", "responses")) for micro in batch.micros]
        n = neighbours

        def inbox(route: Route | None, order: Sequence[int]) -> Inbox | None:
            return None if route is None else Inbox(route, order, self._empty, ahead=ahead)

        self._hidden_in = inbox(n.hidden_from, n.forwards_before)
        self._gradients_in = inbox(n.gradient_from, n.backwards_after)
        self._hidden_out = None if n.hidden_to is None else Outbox(n.hidden_to)
        self._gradients_out = None if n.gradient_to is None else Outbox(n.gradient_to)
        # by micro-batch between its forward and its backward: the stage's input and output
        self._activations: dict[int, tuple[Tensor | None, Tensor]] = {}

    def _empty(self, micro_batch: int) -> Tensor:
        """Memory for the hidden states of a micro-batch, (1, tokens, width), or for their gradient."""
        pipeline, tokens = self.pipeline, self.batch.micros[micro_batch].tokens
        return torch.empty((1, tokens, pipeline.hidden), dtype=pipeline.dtype, device=pipeline.device)

    def forward(self, micro_batch: int) -> None:
        hidden = self._hidden_in.take(micro_batch).requires_grad_() if self._hidden_in else None
        with self.measured(False, self.batch.micros[micro_batch].tokens):
            computed = self._computed(micro_batch, hidden)
        self._activations[micro_batch] = hidden, computed
        if self._hidden_out is not None:
            self._hidden_out.send(micro_batch, computed.detach())

    def _computed(self, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """The stage's hidden states, (1, tokens, width), or on the last stage the loss."""
        samples, head = self._inputs[micro_batch], self.pipeline.head
        if self.pipeline.is_last:
            return self.batch.finish(micro_batch, self.call(lambda: head(samples, received=hidden)))
        computed: Tensor = self.call(lambda: head(samples, received=hidden, returns_hidden=True))
        return computed.to(self.pipeline.dtype)

    def backward(self, micro_batch: int) -> None:
        gradient = self._gradients_in.take(micro_batch) if self._gradients_in else None
        hidden, computed = self._activations.pop(micro_batch)
        if self._hidden_out is not None:  # its gradient is here, so it has arrived
            self._hidden_out.wait(micro_batch)
        with self.measured(True, self.batch.micros[micro_batch].tokens):
            if computed.requires_grad:  # not in the first stage if nothing of it is trained
                torch.autograd.backward(computed, gradient)
        if self._gradients_out is not None:
            assert hidden is not None, "a stage that sends gradients has received hidden states"
            self._gradients_out.send(micro_batch, torch.zeros_like(hidden) if hidden.grad is None else hidden.grad)

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for outbox in (self._hidden_out, self._gradients_out):
            if outbox is not None:
                outbox.wait_all()
