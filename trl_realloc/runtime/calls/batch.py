"""`Batch`: the samples of one iteration on one rank. It sends and receives the samples of each call, and divides them
among the call's ranks.

A rank sends its part of a call's outputs without waiting, and waits for the samples of a call only when it runs it. So
calls on disjoint meshes overlap. Every message that a rank waits for is sent, as samples or as a failure. Which ranks
send to which, and the arithmetic of the division, are in `samples.routes`.

Samples are sent as ragged columns over gloo from host memory: a batch of 512 samples of 1,024 tokens is some 15 MB.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from transformers.utils import logging

from ...algorithms.algorithm import Algorithm
from ...algorithms.nonfinite import NonFiniteError, problem_of, with_text
from ...algorithms.rewards import RewardError
from ...algorithms.rollout import Rollouts
from ...plan.dataflow import Call
from ...plan.execution_plan import ExecutionPlan
from ...plan.spans import Span
from ..failures.alarm import Alarm, JobFailed
from ..failures.watchdog_client import HOST
from ..messages import Channels
from ..samples.routes import (
    RESULTS,
    PrefixAffinity,
    Share,
    columns_read,
    receivers,
    replica,
    replica_ranks,
    shares_of_samples,
    shares_of_training,
    sources,
)
from .generate_and_score import CallSettings, Step
from .training_calls import GRAD_NORM


logger = logging.get_logger(__name__)
_SAMPLES, _FAILURE = b"s", b"f"  # begin a message with a rank's part of a call's outputs


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

    def of_training(self) -> JobFailed | NonFiniteError:
        """`of_job` of a call that trains. Only a refusal of samples that are not finite leaves the roles unchanged."""
        first = self.failures[0]
        if all(failure.is_recoverable for failure in self.failures):
            return NonFiniteError(first.message, first.sample)
        return self.of_job()


@dataclass(frozen=True)
class CallOutput:
    """One rank's part of a call's outputs.

    Args:
        samples: the call's output columns, and `index`.
        spans: times of the call on this rank, and of the reallocations before it.
    """

    samples: Rollouts
    spans: tuple[Span, ...] = ()


class Batch:
    """One rank's part of a global batch.

    Args:
        settings, algorithm: those of the run, in this iteration.
        affinity: prefix affinity of each call that generates, on the leader of its mesh.
        shares_tokens: returns the argument `shares_tokens` of `shares_of_samples` for a call of this rank.
        samples: the columns that are here from the start. Without `sizes` those of the global batch, on every rank.
        sizes: number of samples of each rank, not all 0, if each rank has its own.
        running: the calls whose outputs are sent to their readers. Other calls' outputs are sent only to rank 0.

    Attributes:
        failure: the latest exception of a call on this rank.
        skips_training: the batch is not finite, and the run skips it (`skip_nonfinite`).
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        channels: Channels,
        step: Step,
        algorithm: Algorithm,
        settings: CallSettings,
        alarm: Alarm,
        affinity: Mapping[str, PrefixAffinity],
        shares_tokens: Callable[[str], bool],
        samples: Rollouts,
        *,
        sizes: Sequence[int] | None = None,
        running: Collection[str] = (),
    ) -> None:
        self.plan, self.rank, self.channels, self.step = plan, channels.rank, channels, step
        self.algorithm, self.settings, self.alarm = algorithm, settings, alarm
        self.samples, self.sizes = samples, sizes
        self.failure: BaseException | None = None
        self.skips_training = False
        self._affinity, self._shares_tokens, self._running = affinity, shares_tokens, frozenset(running)
        self._outputs_here: dict[str, CallOutput | Failures] = {}  # this rank's parts
        self._outputs: dict[str, CallOutput | Failures] = {}  # of all ranks
        self._prepared: Rollouts | None = None

    # --- the outputs of a call ----------------------------------------------------------------------------------------

    def put(self, call: str, output: CallOutput | Failures) -> None:
        """Send this rank's part of a call's outputs to the ranks that read them. Does not wait."""
        if self.rank not in sources(self.plan, call):
            return
        self._outputs_here[call] = output
        others = [rank for rank in receivers(self.plan, call, self._running) if rank != self.rank]
        content = _pack(output) if others else b""
        for other in others:
            self.channels.outputs(call).send(content, other)

    def put_failure(self, calls: Sequence[str], error: Exception, *, is_collective: bool) -> None:
        """Send a failure as the output of calls. Raises `error` as `failure_of` does."""
        self.failure = error
        failure = failure_of(error, self.rank, " and ".join(calls), is_collective=is_collective)
        for call in calls:
            self.put(call, (failure,))

    def know(self, call: str, samples: Rollouts) -> None:
        """Set the outputs of a call that is not run. Every rank calls this with the same samples."""
        self._outputs[call] = CallOutput(samples)

    def outputs(self, call: str) -> CallOutput:
        """A call's outputs from all ranks, in the order of the global batch. Waits for them. Only on a rank that
        receives them.

        Raises:
            CallsFailed: the call, or a call whose outputs it reads, failed on some rank.
        """
        if call not in self._outputs:
            self.alarm.set_activity(f"waiting for the samples of {call} of {self.step.name}")
            self._outputs[call] = _joined([self._output_of(call, rank) for rank in sources(self.plan, call)])
        output = self._outputs[call]
        if isinstance(output, tuple):
            raise CallsFailed(output)
        return output

    def _output_of(self, call: str, source: int) -> CallOutput | Failures:
        if source == self.rank:
            return self._outputs_here[call]
        return _unpack(self.channels.outputs(call).receive(source))

    # --- the inputs of a call -----------------------------------------------------------------------------------------

    def send_samples(self, call: str) -> None:
        """Send this rank's own samples to the leader of the call's mesh. Does not wait."""
        leader = self.plan.mesh(call).leader
        if self.rank != leader and len(self.samples):
            self.channels.inputs(call).send(self.samples.to_bytes(), leader)

    def inputs(self, call: Call) -> Share | CallsFailed:
        """This rank's share of the samples that a call reads, or the failures of the calls that make them. Waits for
        them. Only on a rank of the call's mesh."""
        try:
            if self.sizes is None and set(columns_read(self.plan, call.name)) <= set(self.samples):
                return self._divided(call, self.samples, [replica(self.plan, call.name, self.rank)])[0]
            if self.rank == self.plan.mesh(call.name).leader:
                return self._distributed(call)
            self.alarm.set_activity(f"waiting for its samples of {call.name} of {self.step.name}")
            share = self._received_share(call.name)
            return share if self.sizes is not None else share.with_columns_of(self.samples)
        except CallsFailed as failed:
            return failed

    def _distributed(self, call: Call) -> Share:
        """Divide the samples that a call reads, on the leader of its mesh, and send each share to the first rank of its
        replica, which forwards it. Columns that every rank has are not sent."""
        firsts = sources(self.plan, call.name)
        try:
            shares = self._divided(call, self._of_all_ranks(call) if self.sizes is not None else self._read(call))
        except CallsFailed as failed:
            for first in firsts:
                self._send_share(call.name, first, failed.failures)
            raise
        sent = set[str]() if self.sizes is not None else set(self.samples) - {"index"}
        for first, share in zip(firsts, shares, strict=True):
            self._send_share(call.name, first, share.without(sent).packed())
        return shares[replica(self.plan, call.name, self.rank)]

    def _read(self, call: Call) -> Rollouts:
        """The global batch with every column that the call reads, after all calls that make them have ended."""
        failures, samples = list[CallFailure](), self.samples
        for producer in dict.fromkeys(map(self.plan.graph.producer, columns_read(self.plan, call.name))):
            if producer is not None:
                try:
                    samples = samples.plus(**self.outputs(producer).samples)
                except CallsFailed as failed:
                    failures += failed.failures
        if failures:
            raise CallsFailed(tuple(dict.fromkeys(failures)))
        return samples

    def _of_all_ranks(self, call: Call) -> Rollouts:
        """The samples that each rank has of its own, in rank order, numbered by `index`."""
        assert self.sizes is not None
        channel = self.channels.inputs(call.name)
        parts = [
            self.samples if rank == self.rank else Rollouts.from_bytes(channel.receive(rank))
            for rank, size in enumerate(self.sizes)
            if size
        ]
        return Rollouts.cat(parts).plus(index=torch.arange(sum(self.sizes)))

    def _send_share(self, call: str, first: int, packed: tuple[object, ...]) -> None:
        content = pickle.dumps(packed)
        if first == self.rank:
            self._forward_share(call, content)
        else:
            self.channels.inputs(call).send(content, first)

    def _received_share(self, call: str) -> Share:
        first = replica_ranks(self.plan, call, self.rank)[0]
        is_first = self.rank == first
        content = self.channels.inputs(call).receive(self.plan.mesh(call).leader if is_first else first)
        if is_first:
            self._forward_share(call, content)
        packed: Any = pickle.loads(content)  # safe: from another rank of this job
        if _are_failures(packed):
            raise CallsFailed(packed)
        return Share.of(packed)

    def _forward_share(self, call: str, content: bytes) -> None:
        for rank in replica_ranks(self.plan, call, self.rank)[1:]:
            self.channels.inputs(call).send(content, rank)

    def _divided(self, call: Call, samples: Rollouts, replicas: Collection[int] | None = None) -> list[Share]:
        """The shares of a call's replicas.

        Args:
            samples: the global batch with every column that the call reads.
            replicas: replicas to return; by default all.

        Raises:
            CallsFailed: the call trains, and a number of the samples is not finite.
        """
        attention_at = self.settings.attention_at.get(call.role, math.inf)
        shares_tokens = self._shares_tokens(call.name)
        if not self.step.trains(call):
            # a rank that divides by itself does not know the earlier prompts
            answered = self._affinity.get(call.name) if replicas is None else None
            return shares_of_samples(
                self.plan,
                call,
                samples,
                replicas,
                attention_at=attention_at,
                shares_tokens=shares_tokens,
                answered=answered,
            )
        try:
            prepared = self.prepare(samples)
        except NonFiniteError as error:  # rank 0 raises it on every rank
            raise CallsFailed((CallFailure(self.rank, call.name, str(error), True, error.sample),)) from error
        if self.skips_training:
            count = self.plan[call.name].strategy.dp if replicas is None else len(replicas)
            return [Share(Rollouts(), is_skipped=True)] * count
        return shares_of_training(
            self.plan,
            call,
            self.algorithm,
            prepared,
            self.step.number,
            replicas,
            attention_at=attention_at,
            shares_tokens=shares_tokens,
        )

    def prepare(self, samples: Rollouts) -> Rollouts:
        """The samples with the columns that the algorithm computes before training. Rank 0 and the leaders of meshes
        that train compute them from the same data, once for all training calls of the iteration.

        Raises:
            NonFiniteError: a number of a sample is not finite, or too large to be trained on.
        """
        if self._prepared is None:
            self._prepared = self.algorithm.prepare(samples)
            error = problem_of(self._prepared)
            if error is not None:
                error = with_text(error, self._prepared, self.settings.processing_class)
                if not self.settings.skip_nonfinite:
                    self._prepared = None
                    raise NonFiniteError(f"{error}. Nothing was trained on this batch.", error.sample)
                self.skips_training = True
                # of ranks with samples of their own, only the leader of the mesh that trains sees them all
                if self.rank == RESULTS or self.sizes is not None:
                    logger.warning(f"{error}. Nothing is trained on this batch.")
        return self._prepared

    # --- results for every rank ---------------------------------------------------------------------------------------

    def results(self, call: Call) -> tuple[Rollouts, tuple[Span, ...]]:
        """(outputs, spans) of a call, after it has been run. All ranks together.

        Returns:
            The outputs for the samples of this rank, in their order. For a call that trains, where each rank has its
            own samples: a row for each step, on every rank. And on rank 0 the times of the call on all ranks.

        Raises:
            JobFailed: the call failed here or on another rank.
            NonFiniteError: the call trains, and a number of the samples is not finite.
        """
        trains, spans = self.step.trains(call), tuple[Span, ...]()
        outcome: Rollouts | Exception | None = None
        if self.rank == RESULTS:
            try:
                output = self.outputs(call.name)
                spans = output.spans
                outcome = _of_steps(output.samples) if trains and self.sizes is not None else output.samples
            except CallsFailed as failed:
                outcome = failed.of_training() if trains else failed.of_job()
        if self.sizes is None or trains:
            return self.from_first_rank(outcome), spans
        self.alarm.set_activity(f"waiting for the results of {self.step.name}")
        return self._raised(self._scattered(call.name, outcome, self.sizes)), spans

    def from_first_rank(self, outcome: object) -> Any:
        """Rank 0's result, on every rank. If it is an exception, every rank raises it. All ranks together."""
        self.alarm.set_activity(f"waiting for the results of {self.step.name}")
        return self._raised(self.channels.broadcast(outcome))

    def _raised(self, outcome: object) -> Any:
        if isinstance(outcome, Exception):
            raise outcome from self.failure
        return outcome

    def _scattered(self, call: str, outputs: Rollouts | Exception | None, sizes: Sequence[int]) -> Any:
        """This rank's rows of rank 0's outputs, or its exception."""
        channel = self.channels.outputs(call)
        if self.rank != RESULTS:
            content = channel.receive(RESULTS)
            # safe: from another rank of this job
            return Rollouts.from_bytes(content[1:]) if content[:1] == _SAMPLES else pickle.loads(content[1:])
        assert outputs is not None, "rank 0 has collected them"
        for rank, stop in enumerate(accumulate(sizes)):
            if rank == RESULTS:
                continue
            if isinstance(outputs, Rollouts):
                channel.send(_SAMPLES + outputs.select(range(stop - sizes[rank], stop)).to_bytes(), rank)
            else:
                channel.send(_FAILURE + pickle.dumps(outputs), rank)
        return outputs.select(range(sizes[RESULTS])) if isinstance(outputs, Rollouts) else outputs


def _joined(parts: Sequence[CallOutput | Failures]) -> CallOutput | Failures:
    """The outputs of all ranks as one, or their failures."""
    if failures := tuple(dict.fromkeys(failure for part in parts if isinstance(part, tuple) for failure in part)):
        return failures
    outputs = [part for part in parts if isinstance(part, CallOutput)]
    samples = Rollouts.cat([output.samples for output in outputs]) if outputs else Rollouts()
    spans = tuple(span for output in outputs for span in output.spans)
    return CallOutput(samples.sorted() if "index" in samples else samples, spans)  # no rank may have any


def _of_steps(statistics: Rollouts) -> Rollouts:
    """One row per optimizer step, with the columns that are equal in all of its rows."""
    if not len(statistics):
        return Rollouts()
    steps = statistics.tensor("update").tolist()
    return statistics.only(["update", GRAD_NORM]).select([steps.index(step) for step in dict.fromkeys(steps)])


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
