"""Tensors between neighbouring stages of a pipeline: `Outbox` sends them, `Inbox` receives them.

Neither blocks the computation: a send does not wait for its receive, and the next tensor is received while a stage
computes. Each direction of each pair of stages has messages of its own, so that they cannot be taken for others: with
gloo by their tags, with NCCL, which has no tags and runs the messages of a group one after the other, by a group in
which a rank has no other messages (`runtime/process_groups.make_fused_groups`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Route:
    """One direction between two neighbouring stages.

    Args:
        group: a process group that both ranks are in.
        peer: the global rank of the other.
        tag: of the first micro-batch's message. That of micro-batch `k` has `tag + k`.
    """

    group: Any
    peer: int
    tag: int


class Outbox:
    """Sends the tensors of micro-batches to one neighbour."""

    def __init__(self, route: Route) -> None:
        self.route = route
        # by micro-batch; a tensor's memory must stay until it has been sent
        self._sending: dict[int, tuple[Any, Tensor]] = {}

    def send(self, micro_batch: int, tensor: Tensor) -> None:
        for earlier in [at for at, (work, _) in self._sending.items() if work.is_completed()]:
            self.wait(earlier)
        tensor, route = tensor.contiguous(), self.route
        work = dist.isend(tensor, route.peer, group=route.group, tag=route.tag + micro_batch)
        self._sending[micro_batch] = (work, tensor)

    def wait(self, micro_batch: int) -> None:
        """Wait until this tensor has been sent, if it has not."""
        if micro_batch in self._sending:
            work, _ = self._sending.pop(micro_batch)
            work.wait()

    def wait_all(self) -> None:
        for micro_batch in list(self._sending):
            self.wait(micro_batch)


class Inbox:
    """Receives the tensors of micro-batches from one neighbour, one ahead of what has been taken.

    Args:
        order: the micro-batches in the order in which the neighbour sends them.
        empty: makes the tensor that a micro-batch's is received in.
        ahead: otherwise a tensor is received only when it is taken.
    """

    def __init__(
        self, route: Route, order: Sequence[int], empty: Callable[[int], Tensor], *, ahead: bool = True
    ) -> None:
        self.route, self.empty, self.ahead = route, empty, ahead
        self._expected = deque(order)
        self._arriving: dict[int, tuple[Any, Tensor]] = {}
        if ahead:
            self._receive_next()

    def _receive_next(self) -> None:
        if self._expected:
            micro_batch, route = self._expected.popleft(), self.route
            tensor = self.empty(micro_batch)
            work = dist.irecv(tensor, route.peer, group=route.group, tag=route.tag + micro_batch)
            assert work is not None, "both ranks are in the group"
            self._arriving[micro_batch] = (work, tensor)

    def take(self, micro_batch: int) -> Tensor:
        """The tensor of this micro-batch. Those that the neighbour sends before it are received too."""
        while micro_batch not in self._arriving:
            self._receive_next()
        work, tensor = self._arriving.pop(micro_batch)
        work.wait()
        if self.ahead and not self._arriving:
            self._receive_next()
        return tensor
