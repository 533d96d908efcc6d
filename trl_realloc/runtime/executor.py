"""`Executor`: the loop over the plan's calls. For each call it waits for the inputs, runs the call and publishes its
outputs.

Every rank runs the loop. A rank runs the calls whose mesh contains it, in plan order, so calls on disjoint meshes
overlap. What a call does on one rank is in `calls`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from transformers.utils import logging

from ..algorithms.base import Algorithm, training_inputs
from ..algorithms.nonfinite import NonFiniteError, problem_of, with_text
from ..algorithms.prompt_batches import PromptBatch
from ..algorithms.rewards import RewardError
from ..algorithms.rollout import Rollouts
from ..engines.base import EngineError, Rate, Sampling
from ..plan.dataflow import Call, CallKind, Role
from ..plan.timeline import Span
from . import calls
from .calls import CallSettings, Step
from .exchange import CallFailure, CallOutput, CallsFailed, Exchange, Failures
from .failures.alarm import Alarm, JobFailed
from .failures.watchdog_client import current_watchdog
from .placement import Placement
from .results import Iteration, Statistics, add_statistics, observed, sample_metrics, update_metrics
from .routes import RESULTS, columns_read, is_divided_by_each, replica
from .shares import Share, shares_of_samples, shares_of_training


logger = logging.get_logger(__name__)
EVALUATION_STEP = 1 << 40  # steps from here on are evaluations, which draw from seeds of their own


class Executor:
    """Runs whole iterations (`run`), or one call at a time in any order that the data allow (`begin`, `perform`).

    Args:
        placement: this rank's engines.
        exchange: sends and receives samples.
        algorithm: what is computed between the calls, losses and metrics.
        settings: sampling and rewards.
        alarm: reports a failure here to the other ranks, and raises theirs here.
    """

    def __init__(
        self, placement: Placement, exchange: Exchange, algorithm: Algorithm, settings: CallSettings, alarm: Alarm
    ) -> None:
        self.placement, self.exchange, self.algorithm = placement, exchange, algorithm
        self.settings, self.alarm = settings, alarm
        self.plan, self.rank = placement.plan, placement.rank
        self._step, self._step_name = Step(0), ""
        self._failure: Exception | None = None
        self._prepared: Rollouts | None = None
        # the batch is not finite, and the run goes on without training on it (`skip_nonfinite`)
        self._skips_training = False

    def run(
        self,
        batch: PromptBatch,
        step: int,
        learning_rates: Mapping[Role, Rate],
        *,
        known: Mapping[str, Rollouts] | None = None,
        only: Collection[str] | None = None,
        sampling: Sampling | None = None,
    ) -> Iteration:
        """Run one iteration.

        Args:
            batch: the global batch's prompts, the same on every rank.
            step: the number of the iteration, which seeds sampling and mini-batches.
            learning_rates: of each trained role in this iteration.
            known: by call name, outputs of calls that are not run (replayed rollouts).
            only: the calls to run; by default all. An evaluation leaves out the training.
            sampling: replaces the run's sampling.

        Raises:
            JobFailed: a call failed here or on another rank. If it was a call before the training, nothing was trained
                on the batch.
        """
        known = known or {}
        names = [n for n in self.plan.order if n not in known and (only is None or n in only)]
        self.begin(Step(step, batch.rows, learning_rates, sampling), names)
        for name, samples in known.items():
            self.exchange.know(name, samples)
        of_rank = [name for name in names if self.placement.takes_part(name)]
        for name, following in zip_longest(of_rank, of_rank[1:]):
            call = self.plan.graph.call(name)
            share = self._share(call, batch.prompts) if self.placement.has(name) else None
            if following is not None:
                self.placement.prefetch(following)  # while this call runs
            self._execute(call, share)
        return self._finish(batch, names, known)

    # --- one call at a time -----------------------------------------------------------------------------------------

    def begin(self, step: Step, running: Collection[str] = ()) -> None:
        """Begin an iteration. All ranks together, after the messages of the last iteration have been received.

        Args:
            running: the calls that read each other's outputs; none where each is run by `perform`.
        """
        self._step = step
        self._step_name = f"update {step.number + 1}" if step.number < EVALUATION_STEP else "an evaluation"
        self.exchange.begin(running)
        self._failure = self._prepared = None
        self._skips_training = False

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
        call = self.plan.graph.call(name)
        self.exchange.forget(name)
        self._prepared = None
        of_rank = [replica(self.plan, name, self.rank)] if self.placement.has(name) else []
        shares = self._divide(call, samples, of_rank)
        if self.placement.takes_part(name):
            self._execute(call, shares[0] if shares else None)
        outcome: Rollouts | JobFailed | None = None
        if self.rank == RESULTS:
            try:
                outcome = self._collect(name).samples
            except CallsFailed as failed:
                outcome = JobFailed(str(failed), is_unharmed=all(f.is_unharmed for f in failed.failures))
        return self._from_results(outcome)

    # --- the inputs of a call ---------------------------------------------------------------------------------------

    def _share(self, call: Call, batch: Rollouts) -> Share | CallsFailed:
        """This rank's share of a call's inputs; why there is none, if a call that it needs has failed.

        Args:
            batch: the data set's columns of the global batch.
        """
        if is_divided_by_each(self.plan, call.name):
            own = replica(self.plan, call.name, self.rank)
            return shares_of_samples(self.plan, call, batch, [own])[0]
        if self.rank != self.plan.mesh(call.name).leader:
            self.alarm.at(f"waiting for its samples of {call.name} of {self._step_name}")
            try:
                return self.exchange.receive_share(call.name).with_columns_of(batch)
            except CallsFailed as failed:
                return failed
        try:
            shares = self._divide(call, self._inputs(call, batch))
        except CallsFailed as failed:
            self.exchange.distribute(call.name, failed)
            return failed
        except NonFiniteError as error:  # rank 0 has the same samples, and raises the same on every rank
            refused = CallsFailed((CallFailure(self.rank, call.name, str(error), True, error.sample),))
            self.exchange.distribute(call.name, refused)
            return refused
        self.exchange.distribute(call.name, [share.without(self.plan.graph.sources) for share in shares])
        return shares[replica(self.plan, call.name, self.rank)]

    def _inputs(self, call: Call, samples: Rollouts) -> Rollouts:
        """The global batch with every column that the call reads. Only on the leader of the call's mesh.

        Raises:
            CallsFailed: a call whose outputs it reads failed, after the outputs of all of them have arrived.
        """
        failures: list[CallFailure] = []
        columns = columns_read(self.plan, call.name)
        for producer in dict.fromkeys(map(self.plan.graph.producer, columns)):
            if producer is not None:
                try:
                    samples = samples.plus(**self._collect(producer).samples)
                except CallsFailed as failed:
                    failures += failed.failures
        if failures:
            raise CallsFailed(tuple(dict.fromkeys(failures)))
        return samples

    def _collect(self, producer: str) -> CallOutput:
        if not self.exchange.has(producer):
            self.alarm.at(f"waiting for the samples of {producer} of {self._step_name}")
        return self.exchange.collect(producer)

    def _divide(self, call: Call, samples: Rollouts, replicas: Collection[int] | None = None) -> list[Share]:
        """The shares of a call's replicas.

        Args:
            samples: the global batch with every column that the call reads.
            replicas: whose shares are wanted; by default all.

        Raises:
            NonFiniteError: the call trains, and a number of the samples is not finite.
        """
        if not call.trains:
            return shares_of_samples(self.plan, call, samples, replicas)
        prepared = self._prepare(samples)
        if self._skips_training:
            count = self.plan[call.name].strategy.dp if replicas is None else len(replicas)
            return [Share(Rollouts(), is_skipped=True)] * count
        return shares_of_training(self.plan, call, self.algorithm, prepared, self._step.number, replicas)

    def _prepare(self, samples: Rollouts) -> Rollouts:
        """The samples with the columns that the algorithm computes before training. The leaders of the meshes that
        train and rank 0 compute them from the same data, once for all training calls of the iteration.

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
                self._skips_training = True
                if self.rank == RESULTS:
                    logger.warning(f"{error}. Nothing is trained on this batch.")
        return self._prepared

    # --- running a call ---------------------------------------------------------------------------------------------

    def _run_call(self, call: Call, share: Share) -> Rollouts:
        """Run a call of any kind on this rank's share."""
        placement, settings, step = self.placement, self.settings, self._step
        match call.kind:
            case CallKind.GENERATE:
                return calls.generate(placement, settings, call, share.samples, step, self.alarm.check)
            case CallKind.FORWARD:
                return calls.forward(placement, settings, call, share.samples, step)
            case CallKind.TRAIN:
                loss = self.algorithm.loss(call.name).of_tokens
                return calls.train(placement, settings, loss, call, share.mini_batches(), step)

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
            self.alarm.at(f"{name} of {self._step_name} (its parameters)")
            try:
                moved = self.placement.refresh(name)
            # an engine refused the parameters; every rank knows it, and the collectives are complete
            except EngineError:
                is_collective = False
                raise
            is_collective = self.placement.has_collectives(name)
            self.alarm.at(f"{name} of {self._step_name}")
            spans = (Span(moved.name, self.rank, moved.start, moved.end, step, bytes=moved.bytes),) if moved else ()
            start = time.time()
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
                span = Span(name, self.rank, start, max(start, time.time()), step, tokens)
                output = CallOutput(outputs, (*spans, span))
        except JobFailed:
            raise
        except Exception as error:
            # RewardError and NonFiniteError come after the call's last collective, the latter on every rank of its mesh
            if is_collective and not isinstance(error, RewardError | NonFiniteError):
                raise
            self._failure = error
            is_unharmed = isinstance(error, RewardError)  # no role has been trained yet
            sample = error.sample if isinstance(error, NonFiniteError) else -1
            output = (CallFailure(self.rank, name, str(error) or type(error).__name__, is_unharmed, sample),)
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
        self.alarm.at(f"waiting for the results of {self._step_name}")
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
                    self._prepare(samples)  # also where rank 0 trains nothing: a batch may be refused or skipped
                except NonFiniteError as error:
                    refused = error
            try:
                output = self._collect(name)
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
            samples = samples.plus(**self._prepare(samples))  # a training call may have read fewer columns
            metrics = sample_metrics(self.algorithm, samples, only_finite=self._skips_training)
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
