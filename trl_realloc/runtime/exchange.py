"""Samples along the data edges of the plan, from the ranks that made them to all that read them.

A producer posts its piece and goes on; a consumer waits for the pieces it needs, when it needs them. So calls on
disjoint meshes overlap by themselves, and no rank waits for data that it does not read. Samples travel as ragged
columns over gloo, on the host: a batch of 512 samples of 1,024 tokens is some 15 MB.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..algorithms.rollout import Rollouts
from ..plan.execution_plan import ExecutionPlan
from ..plan.timeline import Span
from .failures.alarm import JobFailed
from .failures.watchdog_client import HOST


@dataclass(frozen=True)
class Failure:
    """In place of a piece: this rank's call could not be done.

    Args:
        is_unharmed: every role is what it was before the iteration, and the engines work: what was to be trained on is
            at fault.
    """

    rank: int
    call: str
    message: str
    is_unharmed: bool = False
    host: str = HOST

    def __str__(self) -> str:
        return f"{self.call} failed on rank {self.rank} (host {self.host}): {self.message}"


def sources(plan: ExecutionPlan, call: str) -> tuple[int, ...]:
    """The ranks that hold a piece of the call's outputs: one of each data-parallel replica, its first."""
    assignment = plan[call]
    return tuple(assignment.mesh.devices)[:: assignment.strategy.tp * assignment.strategy.pp]


@dataclass(frozen=True)
class Piece:
    """One rank's part of a call's outputs, when it made it, and the reallocations that it waited for before."""

    samples: Rollouts
    span: Span
    moves: tuple[Span, ...] = ()


class Exchange:
    """One rank's post office for one plan; everything is posted once per step and call.

    Args:
        plan: whose edges these are.
        rank: this process.
        group: a gloo group over all ranks, `None` for a job of one process.
    """

    def __init__(self, plan: ExecutionPlan, rank: int, group: Any = None) -> None:
        self.plan, self.rank, self.group = plan, rank, group
        self._tags = {name: 2 * at for at, name in enumerate(plan.order)}
        self._whole: dict[str, tuple[Rollouts, tuple[Span, ...]]] = {}
        self._mine: dict[str, Piece | Failure] = {}
        self._sent: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """A new step: the last one's messages have all been taken."""
        self.flush()
        self._whole.clear()
        self._mine.clear()

    def flush(self) -> None:
        """Wait until all that was posted has been taken. Before an exchange is let go: gloo drops what is still on its
        way with it, and the others would wait for it in vain."""
        for work, _buffer in self._sent:
            work.wait()
        self._sent.clear()

    def publish(self, call: str, piece: Piece | Failure) -> None:
        """Post this rank's piece of a call's outputs to every other rank. Does not wait."""
        if self.rank not in sources(self.plan, call):
            return
        self._mine[call] = piece
        payload = torch.frombuffer(bytearray(_pack(piece)), dtype=torch.uint8)
        size = torch.tensor([payload.numel()])
        for other in range(self.plan.cluster.size):
            if other != self.rank:
                for tag, buffer in ((self._tags[call], size), (self._tags[call] + 1, payload)):
                    self._sent.append((dist.isend(buffer, other, group=self.group, tag=tag), buffer))

    def know(self, call: str, samples: Rollouts) -> None:
        """The outputs of a call that need not run: every rank was handed them."""
        self._whole[call] = (samples, ())

    def forget(self, call: str) -> None:
        """Let a call be done again in this step. All ranks together; each has collected what it made before."""
        self._whole.pop(call, None)
        self._mine.pop(call, None)

    def collect(self, call: str) -> Rollouts:
        """The whole of a call's outputs in the order of the global batch; waits for what is not here yet.

        Raises:
            JobFailed: a rank could not do its part of the call (this one included).
        """
        if call not in self._whole:
            pieces = [self._receive(call, rank) for rank in sources(self.plan, call)]
            failures = [piece for piece in pieces if isinstance(piece, Failure)]
            if failures:
                raise JobFailed("; ".join(map(str, failures)), is_unharmed=all(f.is_unharmed for f in failures))
            done = [piece for piece in pieces if isinstance(piece, Piece)]
            samples = Rollouts.cat([piece.samples for piece in done]).sorted()
            self._whole[call] = (samples, tuple(span for piece in done for span in (*piece.moves, piece.span)))
        return self._whole[call][0]

    def has(self, call: str) -> bool:
        """Whether the whole of a call's outputs is here already."""
        return call in self._whole

    def spans(self, call: str) -> tuple[Span, ...]:
        """When each rank was busy with a call of this step, reallocations for it included; after `collect`."""
        return self._whole[call][1]

    def _receive(self, call: str, source: int) -> Piece | Failure:
        if source == self.rank:
            return self._mine[call]
        size = torch.zeros(1, dtype=torch.long)
        dist.recv(size, source, group=self.group, tag=self._tags[call])
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(payload, source, group=self.group, tag=self._tags[call] + 1)
        return _unpack(payload.numpy().tobytes())


def _pack(piece: Piece | Failure) -> bytes:
    return pickle.dumps(piece if isinstance(piece, Failure) else (piece.span, piece.samples.to_bytes(), piece.moves))


def _unpack(data: bytes) -> Piece | Failure:
    content = pickle.loads(data)  # from another rank of this job
    return content if isinstance(content, Failure) else Piece(Rollouts.from_bytes(content[1]), content[0], content[2])
