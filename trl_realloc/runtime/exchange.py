"""`Exchange`: sends each call's output columns to all ranks, and waits for those that a call reads.

A rank sends its part of a call's outputs without waiting, and waits for the outputs of other calls only when it reads
them. So calls on disjoint meshes overlap. Samples are sent as ragged columns over gloo from host memory: a batch of 512
samples of 1,024 tokens is some 15 MB. Parameters are moved by `reallocation`.
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
class CallFailure:
    """Sent instead of a `CallOutput` where a rank's call failed.

    Args:
        is_unharmed: every role is what it was before the iteration, and the engines work. The samples or their scores
            are at fault.
    """

    rank: int
    call: str
    message: str
    is_unharmed: bool = False
    host: str = HOST

    def __str__(self) -> str:
        return f"{self.call} failed on rank {self.rank} (host {self.host}): {self.message}"


def sources(plan: ExecutionPlan, call: str) -> tuple[int, ...]:
    """The ranks that send the call's outputs: the first of each data-parallel replica."""
    assignment = plan[call]
    return tuple(assignment.mesh.devices)[:: assignment.strategy.tp * assignment.strategy.pp]


@dataclass(frozen=True)
class CallOutput:
    """One rank's part of a call's outputs.

    Args:
        samples: the call's output columns, and `index`.
        span: when the rank ran the call.
        reallocations: when the rank took part in reallocations for the call before.
    """

    samples: Rollouts
    span: Span
    reallocations: tuple[Span, ...] = ()


class Exchange:
    """One rank's sends and receives of samples under one plan. Each output is sent once per step and call.

    Args:
        rank: this process.
        group: a gloo group over all ranks; `None` in a job of one process.
    """

    def __init__(self, plan: ExecutionPlan, rank: int, group: Any = None) -> None:
        self.plan, self.rank, self.group = plan, rank, group
        self._tags = {name: 2 * at for at, name in enumerate(plan.order)}
        self._collected: dict[str, tuple[Rollouts, tuple[Span, ...]]] = {}
        self._own_outputs: dict[str, CallOutput | CallFailure] = {}
        self._sends: list[tuple[Any, Any]] = []  # handles, and buffers that must live until these are done

    def begin(self) -> None:
        """Begin a new step. Waits until the last step's messages have been received."""
        self.flush()
        self._collected.clear()
        self._own_outputs.clear()

    def flush(self) -> None:
        """Wait until all messages have been received. Must be called before an exchange is deleted, because gloo then
        drops messages that are in flight, and other ranks would wait for them."""
        for work, _buffer in self._sends:
            work.wait()
        self._sends.clear()

    def publish(self, call: str, output: CallOutput | CallFailure) -> None:
        """Send this rank's part of a call's outputs to every other rank. Does not wait."""
        if self.rank not in sources(self.plan, call):
            return
        self._own_outputs[call] = output
        payload = torch.frombuffer(bytearray(_pack(output)), dtype=torch.uint8)
        size = torch.tensor([payload.numel()])
        for other in range(self.plan.cluster.size):
            if other != self.rank:
                for tag, buffer in ((self._tags[call], size), (self._tags[call] + 1, payload)):
                    self._sends.append((dist.isend(buffer, other, group=self.group, tag=tag), buffer))

    def know(self, call: str, samples: Rollouts) -> None:
        """Set the outputs of a call that is not run. Every rank calls this with the same samples."""
        self._collected[call] = (samples, ())

    def forget(self, call: str) -> None:
        """Allow a call to be run again in this step. All ranks together, after each has collected the call's
        outputs."""
        self._collected.pop(call, None)
        self._own_outputs.pop(call, None)

    def collect(self, call: str) -> Rollouts:
        """A call's outputs from all ranks, in the order of the global batch. Waits for those that have not arrived.

        Raises:
            JobFailed: the call failed on some rank, this one included.
        """
        if call not in self._collected:
            received = [self._receive(call, rank) for rank in sources(self.plan, call)]
            failures = [output for output in received if isinstance(output, CallFailure)]
            if failures:
                raise JobFailed("; ".join(map(str, failures)), is_unharmed=all(f.is_unharmed for f in failures))
            outputs = [output for output in received if isinstance(output, CallOutput)]
            samples = Rollouts.cat([output.samples for output in outputs]).sorted()
            self._collected[call] = (
                samples,
                tuple(span for output in outputs for span in (*output.reallocations, output.span)),
            )
        return self._collected[call][0]

    def has(self, call: str) -> bool:
        """Whether a call's outputs have been collected or set."""
        return call in self._collected

    def spans(self, call: str) -> tuple[Span, ...]:
        """When each rank ran a call of this step and reallocated for it. Valid after `collect`."""
        return self._collected[call][1]

    def _receive(self, call: str, source: int) -> CallOutput | CallFailure:
        if source == self.rank:
            return self._own_outputs[call]
        size = torch.zeros(1, dtype=torch.long)
        dist.recv(size, source, group=self.group, tag=self._tags[call])
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(payload, source, group=self.group, tag=self._tags[call] + 1)
        return _unpack(payload.numpy().tobytes())


def _pack(output: CallOutput | CallFailure) -> bytes:
    if isinstance(output, CallFailure):
        return pickle.dumps(output)
    return pickle.dumps((output.span, output.samples.to_bytes(), output.reallocations))


def _unpack(data: bytes) -> CallOutput | CallFailure:
    content = pickle.loads(data)  # safe: from another rank of this job
    return (
        content
        if isinstance(content, CallFailure)
        else CallOutput(Rollouts.from_bytes(content[1]), content[0], content[2])
    )
