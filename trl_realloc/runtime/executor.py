"""`Executor`: runs an iteration on one rank. First the streamed calls, if the plan has streams; then the other calls,
one after the other. For each of them it waits for the inputs, runs the call and publishes its outputs.

Every rank runs the loop. A rank runs the calls whose mesh contains it, in plan order, so calls on disjoint meshes
overlap. What a call does on one rank is in `calls`, what it reads in `call_inputs`, the streamed calls in
`stream_worker`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..algorithms.base import Algorithm, training_inputs
from ..algorithms.nonfinite import NonFiniteError, with_text
from ..algorithms.prompt_batches import PromptBatch
from ..algorithms.rollout import Rollouts
from ..engines.base import EngineError, Rate, Sampling
from ..plan.dataflow import Call, CallKind, Role
from ..plan.execution_plan import ExecutionPlan
from ..plan.streams import early_call
from ..plan.timeline import Span
from ..planner.dispatcher import Dispatcher, Order
from ..planner.stream import Stream, stream_of
from . import calls
from .call_inputs import CallInputs
from .calls import CallSettings, Step
from .early_generation import EarlyGeneration
from .exchange import CallFailure, CallOutput, CallsFailed, Exchange, Failures, failure_of
from .failures.alarm import Alarm, JobFailed
from .failures.watchdog_client import current_watchdog
from .placement import Placement
from .reallocation import Moved
from .results import Iteration, Statistics, add_statistics, observed, sample_metrics, update_metrics
from .routes import RESULTS, replica
from .shares import Share
from .stream_leader import StreamLeader, StreamLink
from .stream_worker import StreamWorker


class Executor:
    """Runs whole iterations (`run`), or one call at a time in any order that the data allow (`begin`, `perform`).

    Args:
        placement: this rank's engines.
        exchange: sends and receives samples.
        algorithm: what is computed between the calls, losses and metrics.
        settings: sampling and rewards.
        alarm: reports a failure here to the other ranks, and raises theirs here.

    Attributes:
        orders: of the latest iteration's streams; on rank 0.
    """

    def __init__(
        self, placement: Placement, exchange: Exchange, algorithm: Algorithm, settings: CallSettings, alarm: Alarm
    ) -> None:
        self.placement, self.exchange, self.algorithm = placement, exchange, algorithm
        self.settings, self.alarm = settings, alarm
        self.plan, self.rank = placement.plan, placement.rank
        self.orders: Sequence[Order] = ()
        self._failure: BaseException | None = None
        self._early: EarlyGeneration | None = None

    def run(
        self,
        batch: PromptBatch,
        step: int,
        learning_rates: Mapping[Role, Rate],
        *,
        known: Mapping[str, Rollouts] | None = None,
        only: Collection[str] | None = None,
        sampling: Sampling | None = None,
        following: PromptBatch | None = None,
    ) -> Iteration:
        """Run one iteration.

        Args:
            batch: the global batch's prompts, the same on every rank.
            step: the number of the iteration, which seeds sampling and mini-batches.
            learning_rates: of each trained role in this iteration.
            known: by call name, outputs of calls that are not run (replayed rollouts).
            only: the calls to run; by default all. An evaluation leaves out the training.
            sampling: replaces the run's sampling.
            following: the next iteration's batch, if its generation may begin before this iteration has ended. If
                another iteration is run next, what has been generated is dropped.

        Raises:
            JobFailed: a call failed here or on another rank. If it was a call before the training, nothing was trained
                on the batch.
        """
        known = known or {}
        names = [n for n in self.plan.order if n not in known and (only is None or n in only)]
        streamed = self.plan.streamed if set(self.plan.streamed) <= set(names) else ()
        whole = [name for name in names if name not in streamed]
        this_step = Step(step, batch.rows, learning_rates, sampling)
        if self._early is not None and not (self._early.is_of(this_step, batch) and self._early.call in names):
            self.cancel_early()
        self.begin(this_step, whole)
        for name, samples in known.items():
            self.exchange.know(name, samples)
        leader = self._run_streamed(batch) if streamed else None
        of_rank = [name for name in whole if self.placement.takes_part(name)]
        for name, next_name in zip_longest(of_rank, of_rank[1:]):
            call = self.plan.graph.call(name)
            share = self.inputs.share(call, batch.prompts) if self.placement.has(name) else None
            if next_name is not None:
                self.placement.prefetch(next_name)  # while this call runs
            self._execute(call, share)
        self._early = None
        if following is not None:
            self._begin_early(following)
        if leader is not None:
            leader.wait()
        return self._finish(batch, names, known)

    def _run_streamed(self, batch: PromptBatch) -> StreamLeader | None:
        """Run the streamed calls of this rank, and publish their outputs. Returns the leader, on rank 0."""
        stream, tag, messages = self._stream(batch), self.exchange.stream_tag, self.exchange.messages
        leader, streams = None, self.plan.streams
        assert streams is not None, "the plan has streamed calls"
        if self.rank == RESULTS:
            dispatcher = Dispatcher(stream, streams.migration, deterministic=streams.deterministic)
            leader = StreamLeader(messages, tag, stream, dispatcher)
            self.orders = leader.orders
        if any(self.placement.takes_part(name) for name in self.plan.streamed):
            link = StreamLink(messages, tag, leader) if self.rank in stream.ranks else None
            worker = StreamWorker(
                self.placement,
                self.settings,
                self.alarm,
                messages,
                self.exchange.stream_tag + 2,
                link,
                stream,
                self._step,
                batch,
                self._early,
            )
            for name, output in worker.run().items():
                self.exchange.publish(name, output)
            self._failure = worker.error
        return leader

    def _stream(self, batch: PromptBatch) -> Stream:
        forwards = [n for n in self.plan.streamed if self.plan.graph.call(n).kind is CallKind.FORWARD]
        generate = self.plan.graph.call(self.plan.streamed[0])
        lengths = batch.prompts.ragged(generate.inputs[0]).lengths.tolist()
        limit = calls.sampling_of(self.settings, generate, self._step).max_tokens
        return stream_of(self.plan, lengths, limit, {name: self.placement.budget(name) for name in forwards})

    def _begin_early(self, batch: PromptBatch) -> None:
        """Begin the next iteration's generation on this rank, if the plan allows it."""
        if self.plan.barrier or self.plan.cluster.size == 1:  # a single device has nothing else to do meanwhile
            return
        name = early_call(self.plan.graph, self.plan.assignments)
        if name is not None and self.placement.takes_part(name):
            step = Step(self._step.number + 1, batch.rows, {})
            self.alarm.at(f"{name} of {step.name} (its parameters)")
            self._early = EarlyGeneration(self.placement, self.settings, name, step, batch)

    def cancel_early(self) -> None:
        """End a generation that has been begun for an iteration that is not run next."""
        if self._early is not None:
            self._early.close()
            self._early = None

    def follow(self, plan: ExecutionPlan) -> None:
        """Run the next iterations by another plan, which differs in how calls overlap alone. All ranks together."""
        self.cancel_early()
        self.exchange.flush()
        self.plan = self.placement.plan = self.exchange.plan = plan

    # --- one call at a time -----------------------------------------------------------------------------------------

    def begin(self, step: Step, running: Collection[str] = ()) -> None:
        """Begin an iteration. All ranks together, after the messages of the last iteration have been received.

        Args:
            running: the calls that read each other's outputs; none where each is run by `perform`.
        """
        self._step = step
        self.exchange.begin(running)
        self.inputs = self._new_inputs()
        self._failure = None

    def _new_inputs(self) -> CallInputs:
        return CallInputs(self.exchange, self.algorithm, self.settings, self.alarm, self._step.number, self._step.name)

    def perform(self, name: str, samples: Rollouts) -> Rollouts:
        """Run one call of the iteration that has begun, on any samples, and wait for its outputs. All ranks call this
        together with the same samples. A call may be performed several times.

        Args:
            samples: with every column that the call reads, and `index`, each sample's number, which seeds its draws.
                For a call that trains: the global batch.

        Returns:
            The call's outputs in ascending order of `index`. For a call that trains: the statistics of its steps.

        Raises:
            JobFailed: the call failed here or on another rank.
            NonFiniteError: the call trains, and a number of the samples is not finite.
        """
        self.cancel_early()
        call = self.plan.graph.call(name)
        self.exchange.forget(name)
        self.inputs = self._new_inputs()
        of_rank = [replica(self.plan, name, self.rank)] if self.placement.has(name) else []
        shares = self.inputs.divide(call, samples, of_rank)
        if self.placement.takes_part(name):
            self._execute(call, shares[0] if shares else None)
        outcome: Rollouts | JobFailed | None = None
        if self.rank == RESULTS:
            try:
                outcome = self.inputs.collect(name).samples
            except CallsFailed as failed:
                outcome = JobFailed(str(failed), is_unharmed=all(f.is_unharmed for f in failed.failures))
        return self._from_results(outcome)

    # --- running a call ---------------------------------------------------------------------------------------------

    def _run_call(self, call: Call, share: Share) -> Rollouts:
        """Run a call of any kind on this rank's share."""
        placement, settings, step = self.placement, self.settings, self._step
        match call.kind:
            case CallKind.GENERATE:
                early = self._early_of(call.name)
                begun = early.generation if early is not None else None
                return calls.generate(placement, settings, call, share.samples, step, self.alarm.check, begun)
            case CallKind.FORWARD:
                return calls.forward(placement, settings, call, share.samples, step)
            case CallKind.TRAIN:
                loss = self.algorithm.loss(call.name).of_tokens
                return calls.train(placement, settings, loss, call, share.mini_batches(), step)

    def _early_of(self, name: str) -> EarlyGeneration | None:
        return self._early if self._early is not None and self._early.call == name else None

    def _refresh(self, name: str) -> Moved | None:
        """Update the parameters that a call uses, unless this was done before the iteration began."""
        early = self._early_of(name)
        return self.placement.refresh(name) if early is None else early.refreshed()

    def _execute(self, call: Call, share: Share | CallsFailed | None) -> None:
        """Run a call, and publish its outputs or its failure. A call whose inputs have failed publishes their failures,
        so that every rank gets the messages that it waits for, and learns of the failure at the iteration's end.

        A failure inside a call with collectives is raised at once. The other ranks of its mesh wait in one of them, and
        the next collective of this rank on the same process group would be taken for it.

        Args:
            share: `None` on a rank that only sends parameters.
        """
        output: CallOutput | Failures
        name, step = call.name, self._step.number
        is_collective = True  # the code that runs now contains collectives
        try:
            self.alarm.at(f"{name} of {self._step.name} (its parameters)")
            try:
                moved = self._refresh(name)
            # an engine refused the parameters; every rank knows it, and the collectives are complete
            except EngineError:
                is_collective = False
                raise
            is_collective = self.placement.has_collectives(name)
            self.alarm.at(f"{name} of {self._step.name}")
            spans = (Span(moved.name, self.rank, moved.start, moved.end, step, bytes=moved.bytes),) if moved else ()
            early, start = self._early_of(name), time.time()
            if share is None:
                return
            if isinstance(share, CallsFailed) or share.is_skipped:
                output = share.failures if isinstance(share, CallsFailed) else CallOutput(Rollouts(), spans)
            else:
                self.placement.check_fresh(name)
                with self.placement.resident(name):
                    outputs = self._run_call(call, share)
                has_tokens = call.kind is CallKind.GENERATE and len(outputs) > 0
                tokens = int(outputs.ragged(call.outputs[0]).lengths.sum()) if has_tokens else 0
                end = max(start, time.time())
                if early is not None and early.generation is not None:
                    start, end = early.start, max(early.start, early.generation.ended_at)
                samples = 0 if call.trains else len(outputs)
                output = CallOutput(outputs, (*spans, Span(name, self.rank, start, end, step, tokens, samples=samples)))
        except JobFailed:
            raise
        except Exception as error:
            self._failure = error
            output = (failure_of(error, self.rank, name, is_collective=is_collective),)
        self.exchange.publish(name, output)

    # --- the results of an iteration ----------------------------------------------------------------------------------

    def _finish(self, batch: PromptBatch, names: Sequence[str], known: Collection[str]) -> Iteration:
        """The iteration's results, which rank 0 computes and sends to all ranks."""
        outcome: Iteration | JobFailed | NonFiniteError | None = None
        if self.rank == RESULTS:
            try:
                outcome = self._results(batch, names, known)
            except (JobFailed, NonFiniteError) as error:
                outcome = error
        sent = outcome.for_other_ranks() if isinstance(outcome, Iteration) else outcome
        received: Iteration = self._from_results(sent)
        return outcome if isinstance(outcome, Iteration) else received

    def _from_results(self, outcome: Any) -> Any:
        """What rank 0 has computed, on every rank. Raises it there if it is an exception."""
        self.alarm.at(f"waiting for the results of {self._step.name}")
        outcome = self.exchange.spread(outcome)
        if isinstance(outcome, Exception):
            raise outcome from self._failure
        return outcome

    def _results(self, batch: PromptBatch, names: Sequence[str], known: Collection[str]) -> Iteration:
        """Collect the outputs of all calls. Only on rank 0.

        Raises:
            JobFailed: a call failed; after the outputs or the failures of all calls have arrived.
            NonFiniteError: a number of the samples is not finite.
        """
        samples, spans, failures = batch.prompts, list[Span](), list[CallFailure]()
        refused: NonFiniteError | None = None
        statistics: Statistics = {}
        has_trained = False
        for name in (*known, *names):
            trains = self.plan.graph.call(name).trains
            if trains and not failures and refused is None:
                try:
                    self.inputs.prepare(samples)  # also where rank 0 trains nothing: a batch may be refused or skipped
                except NonFiniteError as error:
                    refused = error
            try:
                output = self.inputs.collect(name)
            except CallsFailed as failed:
                failures += failed.failures
                continue
            spans += output.spans
            if trains:
                has_trained |= len(output.samples) > 0
                add_statistics(output.samples, len(batch), statistics)
            else:
                samples = samples.plus(**output.samples)
        if refused is not None:
            raise refused
        if failures:
            raise self._job_failed(failures, samples, has_trained)
        metrics: dict[str, float] = {}
        if training_inputs(self.algorithm.graph) <= set(samples):
            samples = samples.plus(**self.inputs.prepare(samples))  # a training call may have read fewer columns
            metrics = sample_metrics(self.algorithm, samples, only_finite=self.inputs.skips_training)
        trainings = [name for name in names if self.plan.graph.call(name).trains]
        if trainings:
            counts, step = self.settings.skip_nonfinite, self._step.number
            metrics |= update_metrics(self.algorithm, trainings, samples, step, statistics, counts_skipped=counts)
        tokens = samples.tokens if "responses" in samples else 0
        return Iteration(metrics, observed(samples, spans), tokens, samples, tuple(spans))

    def _job_failed(self, failures: Sequence[CallFailure], samples: Rollouts, has_trained: bool) -> JobFailed:
        """The exception for failed calls, with the text of the samples at fault. Of ranks that say the same of a call,
        it names the first."""
        texts, first = [], dict[tuple[str, str], CallFailure]()
        for failure in failures:
            first.setdefault((failure.call, failure.message), failure)
        for failure in first.values():
            error = NonFiniteError(str(failure), failure.sample)
            has_text = failure.sample >= 0 and "responses" in samples
            texts.append(str(with_text(error, samples, self.settings.processing_class) if has_text else error))
        return JobFailed(
            "; ".join(texts), is_unharmed=not has_trained and all(f.is_unharmed for f in failures), is_shared=True
        )


def make_executor(placement: Placement, algorithm: Algorithm, settings: CallSettings) -> Executor:
    """The executor of a placement, with a new exchange and a new alarm. All ranks call this together."""
    exchange = Exchange(placement.plan, placement.rank, placement.control)
    alarm = Alarm(current_watchdog() if placement.plan.cluster.size > 1 else None)
    return Executor(placement, exchange, algorithm, settings, alarm)
