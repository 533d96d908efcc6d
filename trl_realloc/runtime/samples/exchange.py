"""`Exchange`: one rank's sends and receives of samples under one plan.

A rank sends its part of a call's outputs without waiting, and waits for the samples of a call only when it runs it. So
calls on disjoint meshes overlap. Which ranks send to which is in `routes`, how samples are divided in `shares`.
Samples are sent as ragged columns over gloo from host memory: a batch of 512 samples of 1,024 tokens is some 15 MB.
Parameters are moved by `reallocation`.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...algorithms.nonfinite import NonFiniteError
from ...algorithms.rewards import RewardError
from ...algorithms.rollout import Rollouts
from ...plan.execution_plan import ExecutionPlan
from ...plan.timeline import Span
from ..failures.alarm import JobFailed
from ..failures.watchdog_client import HOST
from ..messages import GlooMessages, Messages, all_reduce, broadcast
from .routes import RESULTS, receivers, replica_ranks, sources
from .shares import Share


T = TypeVar("T")


_SAMPLES, _FAILURE = b"s", b"f"  # begin a message of `Exchange.scatter`


@dataclass(frozen=True)
class CallFailure:
    """Sent instead of samples if a rank's call failed. A call whose inputs have failed is not run, and forwards their
    failures.

    Args:
        is_recoverable: no role has changed in the iteration, and the engines work. The samples or their scores are at
            fault.
        sample: position in the global batch of the sample at fault; -1 if it is not a single sample.
    """

    rank: int
    call: str
    message: str
    is_recoverable: bool = False
    sample: int = -1
    host: str = HOST

    def __str__(self) -> str:
        return f"{self.call} failed on rank {self.rank} (host {self.host}): {self.message}"


Failures = tuple[CallFailure, ...]


def failure_of(error: Exception, rank: int, call: str, *, is_collective: bool) -> CallFailure:
    """Record of a call's exception, which is sent in place of the call's samples.

    Args:
        is_collective: the code that raised the error contains collectives.

    Raises:
        Exception: `error` itself, if other ranks wait for this one in a collective. A `RewardError` or a
            `NonFiniteError` is raised after a call's last collective, the latter on every rank of its mesh.
    """
    if is_collective and not isinstance(error, RewardError | NonFiniteError):
        raise error
    is_recoverable = isinstance(error, RewardError)  # no role has been trained yet
    sample = error.sample if isinstance(error, NonFiniteError) else -1
    return CallFailure(rank, call, str(error) or type(error).__name__, is_recoverable, sample)


class CallsFailed(RuntimeError):
    """Expected samples do not exist, because calls have failed."""

    def __init__(self, failures: Failures) -> None:
        super().__init__("; ".join(map(str, failures)))
        self.failures = failures

    def of_job(self) -> JobFailed:
        """The exception that every rank raises for these failures."""
        return JobFailed(str(self), is_recoverable=all(failure.is_recoverable for failure in self.failures))


@dataclass(frozen=True)
class CallOutput:
    """One rank's part of a call's outputs.

    Args:
        samples: the call's output columns, and `index`.
        spans: times of the call on this rank, and of the reallocations before it.
    """

    samples: Rollouts
    spans: tuple[Span, ...] = ()


class Exchange:
    """Sends and receives samples. Each call's outputs are sent once per step. Every message that a rank waits for is
    sent, as samples or as a failure.

    Args:
        group: a gloo group over all ranks; `None` in a job of one process.
        messages: transport; by default `GlooMessages` over `group`.
        first_tag: first tag of the messages. Exchanges that are used at the same time need disjoint tags.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        rank: int,
        group: dist.ProcessGroup | None = None,
        messages: Messages | None = None,
        first_tag: int = 0,
    ) -> None:
        self.plan, self.rank, self.first_tag = plan, rank, first_tag
        self.messages = GlooMessages(group) if messages is None else messages
        self._tags = {name: first_tag + number for number, name in enumerate(plan.order)}
        self._collected: dict[str, CallOutput | Failures] = {}
        self._own_outputs: dict[str, CallOutput | Failures] = {}
        self._running: frozenset[str] = frozenset()

    def begin(self, running: Collection[str] = ()) -> None:
        """Begin a new step. Waits until the last step's messages have been received.

        Args:
            running: the calls whose outputs are sent to their readers. Other calls' outputs are sent only to rank 0.
        """
        self.flush()
        self._running = frozenset(running)
        self._collected.clear()
        self._own_outputs.clear()

    def flush(self) -> None:
        """Wait until all messages have been received. Must be called before an exchange is deleted, because gloo drops
        messages in flight on deletion, and other ranks would wait for them."""
        self.messages.flush()

    # --- the outputs of a call --------------------------------------------------------------------------------------

    def publish(self, call: str, output: CallOutput | Failures) -> None:
        """Send this rank's part of a call's outputs to the ranks that receive them. Does not wait."""
        if self.rank not in sources(self.plan, call):
            return
        self._own_outputs[call] = output
        others = [rank for rank in receivers(self.plan, call, self._running) if rank != self.rank]
        content = _pack(output) if others else b""
        for other in others:
            self.messages.send(content, other, self._tags[call])

    def know(self, call: str, samples: Rollouts) -> None:
        """Set the outputs of a call that is not run. Every rank calls this with the same samples."""
        self._collected[call] = CallOutput(samples)

    def forget(self, call: str) -> None:
        """Allow a call to be run again in this step. All ranks together, after the call's outputs have been
        collected."""
        self._collected.pop(call, None)
        self._own_outputs.pop(call, None)

    def has(self, call: str) -> bool:
        """True if a call's outputs have been collected or set."""
        return call in self._collected

    def collect(self, call: str) -> CallOutput:
        """A call's outputs from all ranks, in the order of the global batch. Waits for them. Only on a rank that
        receives them.

        Raises:
            CallsFailed: the call, or a call whose outputs it reads, failed on some rank.
        """
        if call not in self._collected:
            received = [self._receive_output(call, rank) for rank in sources(self.plan, call)]
            failures = tuple(dict.fromkeys(f for output in received if isinstance(output, tuple) for f in output))
            outputs = [output for output in received if isinstance(output, CallOutput)]
            samples = Rollouts.cat([output.samples for output in outputs]) if outputs else Rollouts()
            self._collected[call] = failures or CallOutput(
                samples.sorted() if "index" in samples else samples,  # no rank has any
                tuple(span for output in outputs for span in output.spans),
            )
        collected = self._collected[call]
        if isinstance(collected, tuple):
            raise CallsFailed(collected)
        return collected

    def _receive_output(self, call: str, source: int) -> CallOutput | Failures:
        if source == self.rank:
            return self._own_outputs[call]
        return _unpack(self.messages.receive(source, self._tags[call]))

    # --- the inputs of a call ---------------------------------------------------------------------------------------

    def distribute(self, call: str, shares: Sequence[Share] | CallsFailed) -> None:
        """Send each share to the first rank of its data-parallel replica, which forwards it. Only on the leader of the
        call's mesh. Does not wait.

        Args:
            shares: one share per replica, or the failures of the call's inputs.
        """
        for number, first in enumerate(sources(self.plan, call)):
            packed = shares.failures if isinstance(shares, CallsFailed) else shares[number].packed()
            if first == self.rank:
                self._pass_on(call, pickle.dumps(packed))
            else:
                self.messages.send(pickle.dumps(packed), first, self._share_tag(call))

    def receive_share(self, call: str) -> Share:
        """This rank's share of a call's inputs. Waits for it.

        Raises:
            CallsFailed: a call whose outputs this call reads has failed.
        """
        first = replica_ranks(self.plan, call, self.rank)[0]
        source = self.plan.mesh(call).leader if first == self.rank else first
        content = self.messages.receive(source, self._share_tag(call))
        if first == self.rank:
            self._pass_on(call, content)
        share = pickle.loads(content)  # safe: from another rank of this job
        if _are_failures(share):
            raise CallsFailed(share)
        return Share.of(share)

    def _pass_on(self, call: str, content: bytes) -> None:
        for rank in replica_ranks(self.plan, call, self.rank)[1:]:
            self.messages.send(content, rank, self._share_tag(call))

    def _share_tag(self, call: str) -> int:
        return len(self._tags) + self._tags[call]  # above the outputs' tags

    @property
    def stream_tag(self) -> int:
        """The first of three tags of the messages of streamed calls."""
        # `broadcast` uses the tags before and after this one
        return self.first_tag + 2 * len(self._tags) + 2

    @property
    def free_tag(self) -> int:
        """The first tag that this exchange does not use."""
        return self.stream_tag + 3

    def of_iteration(self, running: Collection[str], first_tag: int) -> Exchange:
        """An exchange for one of several concurrent iterations. Messages with the same tag arrive in the order of
        sending, so each rank must publish and collect a call's outputs iteration by iteration.

        Args:
            running: the calls whose outputs are sent to their readers.
        """
        exchange = Exchange(self.plan, self.rank, messages=self.messages.twin(), first_tag=first_tag)
        exchange._running = frozenset(running)
        return exchange

    # --- local samples of each rank ---------------------------------------------------------------------------------

    def sizes(self, size: int) -> list[int]:
        """All-gather of the ranks' numbers of samples (`size`). All ranks call this together."""
        ranks = range(self.plan.cluster.size)
        rank_sizes: dict[int, int] = all_reduce(
            self.messages, ranks, self.rank, {self.rank: size}, lambda a, b: {**a, **b}, self.stream_tag - 2
        )
        return [rank_sizes[rank] for rank in ranks]

    def gather(self, call: str, local_samples: Rollouts, sizes: Sequence[int]) -> Rollouts | None:
        """The samples of all ranks in rank order, numbered by `index`, on the leader of the call's mesh; `None` on the
        others. All ranks together.

        Args:
            sizes: number of samples of each rank, not all 0.
        """
        leader = self.plan.mesh(call).leader
        if self.rank != leader:
            if len(local_samples):
                self.messages.send(local_samples.to_bytes(), leader, self._share_tag(call))
            return None
        parts = [
            local_samples if rank == leader else Rollouts.from_bytes(self.messages.receive(rank, self._share_tag(call)))
            for rank, size in enumerate(sizes)
            if size
        ]
        return Rollouts.cat(parts).plus(index=torch.arange(sum(sizes)))

    def scatter(self, call: str, outputs: Rollouts | Exception | None, sizes: Sequence[int]) -> Rollouts | Exception:
        """This rank's part of a call's outputs. All ranks together.

        Args:
            outputs: all samples' outputs in ascending order of `index`, or an exception for every rank; on rank 0 only.
        """
        if self.rank != RESULTS:
            content = self.messages.receive(RESULTS, self._tags[call])
            # safe: from another rank of this job
            return Rollouts.from_bytes(content[1:]) if content[:1] == _SAMPLES else pickle.loads(content[1:])
        assert outputs is not None, "rank 0 has collected them"
        local_part: Rollouts | Exception = outputs
        for rank, stop in enumerate(accumulate(sizes)):
            part = outputs.select(range(stop - sizes[rank], stop)) if isinstance(outputs, Rollouts) else outputs
            if rank == RESULTS:
                local_part = part
            elif isinstance(part, Rollouts):
                self.messages.send(_SAMPLES + part.to_bytes(), rank, self._tags[call])
            else:
                self.messages.send(_FAILURE + pickle.dumps(part), rank, self._tags[call])
        return local_part

    # --- results ----------------------------------------------------------------------------------------------------

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank. All ranks together."""
        assert RESULTS == 0, "the first of the ranks"
        return broadcast(self.messages, range(self.plan.cluster.size), self.rank, value, self.stream_tag - 2)


def _pack(output: CallOutput | Failures) -> bytes:
    if isinstance(output, tuple):
        return pickle.dumps(output)
    return pickle.dumps((output.samples.to_bytes(), output.spans))


def _unpack(data: bytes) -> CallOutput | Failures:
    content: Any = pickle.loads(data)  # safe: from another rank of this job
    if _are_failures(content):
        failures: Failures = content
        return failures
    return CallOutput(Rollouts.from_bytes(content[0]), content[1])


def _are_failures(content: tuple[object, ...]) -> bool:
    return isinstance(content[0], CallFailure)
