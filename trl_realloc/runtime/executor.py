"""`Executor`: the loop over the plan's calls. For each call it waits for the inputs, runs the call and publishes its
outputs.

Every rank runs the loop. A rank runs the calls whose mesh contains it, in plan order, so calls on disjoint meshes
overlap. What a call does on one rank is in `calls`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
from transformers.utils import logging

from ..algorithms.base import Algorithm, training_inputs
from ..algorithms.nonfinite import NonFiniteError, problem_of, with_text
from ..algorithms.prompts import PromptBatch
from ..algorithms.rewards import RewardError
from ..algorithms.rollout import Rollouts
from ..engines.base import EngineError, Rate, Sampling
from ..plan.dataflow import Call, CallKind, Role
from ..plan.timeline import Span
from . import calls
from .calls import CallSettings, Step
from .exchange import CallFailure, CallOutput, Exchange
from .failures.alarm import Alarm, JobFailed
from .failures.watchdog_client import current_watchdog
from .placement import Placement


logger = logging.get_logger(__name__)
EVALUATION_STEP = 1 << 40  # steps from here on are evaluations, which draw from seeds of their own


@dataclass(frozen=True)
class Iteration:
    """The results of one iteration.

    Args:
        samples: the global batch with every column.
        metrics: by TRL's names.
        spans: when each rank ran each call.
    """

    samples: Rollouts
    metrics: dict[str, float]
    spans: tuple[Span, ...]


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
        self._skip_training = False

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
        self.begin(Step(step, batch.rows, learning_rates, sampling))
        for name, samples in known.items():
            self.exchange.know(name, samples)
        names = [n for n in self.plan.order if n not in known and (only is None or n in only)]
        of_rank = [name for name in names if self.placement.takes_part(name)]
        for name, following in zip_longest(of_rank, of_rank[1:]):
            call = self.plan.graph.call(name)
            inputs = self._inputs(call, batch.prompts)
            if self._skip_training and call.trains:
                continue
            if following is not None:
                self.placement.prefetch(following)  # while this call runs
            self._execute(call, inputs)
        return self._finish(batch, names, known)

    # --- one call at a time -----------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Begin an iteration. All ranks together, after the messages of the last iteration have been received."""
        self._step = step
        self._step_name = f"update {step.number + 1}" if step.number < EVALUATION_STEP else "an evaluation"
        self.exchange.begin()
        self._failure = self._prepared = None
        self._skip_training = False

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
        if call.trains:
            self._prepared = None
            samples = self._prepare(samples)
            if self._skip_training:
                return Rollouts()
        if self.placement.takes_part(name):
            self._execute(call, samples)
        return self._collect(name)

    def _inputs(self, call: Call, samples: Rollouts) -> Rollouts:
        """The global batch with every column that the call reads."""
        for producer in dict.fromkeys(self.plan.graph.producer(column) for column in call.inputs):
            if producer is not None:
                samples = samples.plus(**self._collect(producer))
        return self._prepare(samples) if call.trains else samples

    def _collect(self, producer: str) -> Rollouts:
        if not self.exchange.has(producer):
            self.alarm.at(f"waiting for the samples of {producer} of {self._step_name}")
        try:
            return self.exchange.collect(producer)
        except JobFailed as error:
            raise error from self._failure

    def _prepare(self, samples: Rollouts) -> Rollouts:
        """The samples with the columns that the algorithm computes before training. Every rank computes them from the
        same data, once for all training calls of the iteration."""
        if self._prepared is None:
            self._prepared = self.algorithm.prepare(samples)
            self._check(self._prepared)
        return self._prepared

    def _check(self, samples: Rollouts) -> None:
        """Refuse a batch that is not finite. Every rank has the same samples, so all ranks refuse it together, before
        any of them trains on it.

        Raises:
            NonFiniteError: a number of a sample is not finite, or too large to be trained on.
        """
        error = problem_of(samples)
        if error is None:
            return
        error = with_text(error, samples, self.settings.processing_class)
        if not self.settings.skip_nonfinite:
            raise NonFiniteError(f"{error}. Nothing was trained on this batch.", error.sample)
        self._skip_training = True
        if self.rank == 0:
            logger.warning(f"{error}. Nothing is trained on this batch.")

    def _function_of(self, call: Call, samples: Rollouts) -> Callable[[], Rollouts]:
        """The function that runs a call of this kind on this rank."""
        placement, settings, step = self.placement, self.settings, self._step
        match call.kind:
            case CallKind.GENERATE:
                return partial(calls.generate, placement, settings, call, samples, step, self.alarm.check)
            case CallKind.FORWARD:
                return partial(calls.forward, placement, settings, call, samples, step)
            case CallKind.TRAIN:
                return partial(calls.train, placement, settings, self.algorithm, call, samples, step)

    def _execute(self, call: Call, samples: Rollouts) -> None:
        """Run a call, and publish its outputs or its failure. A published failure is raised on all ranks at the same
        place, where the outputs are first needed, after they have completed the same collectives.

        A failure inside a call with collectives is raised at once. The other ranks of its mesh wait in one of them, and
        the next collective of this rank on the same process group would be taken for it.
        """
        output: CallOutput | CallFailure
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
            reallocations = (
                (Span(moved.name, self.rank, moved.start, moved.end, step, bytes=moved.bytes),) if moved else ()
            )
            start = time.time()
            if not self.placement.has(name):
                return  # this rank only sent parameters
            self.placement.check_fresh(name)
            with self.placement.resident(name):
                outputs = self._function_of(call, samples)()
            has_tokens = call.kind is CallKind.GENERATE and len(outputs) > 0
            tokens = int(outputs.ragged(call.outputs[0]).lengths.sum()) if has_tokens else 0
            output = CallOutput(
                outputs, Span(name, self.rank, start, max(start, time.time()), step, tokens), reallocations
            )
        except JobFailed:
            raise
        except Exception as error:
            # RewardError and NonFiniteError come after the call's last collective, the latter on every rank of its mesh
            if is_collective and not isinstance(error, RewardError | NonFiniteError):
                raise
            self._failure = error
            is_unharmed = isinstance(error, RewardError)  # no role has been trained yet
            output = CallFailure(self.rank, name, str(error) or type(error).__name__, is_unharmed)
        self.exchange.publish(name, output)

    # --- the results of an iteration ----------------------------------------------------------------------------------

    def _finish(self, batch: PromptBatch, names: list[str], known: Mapping[str, Rollouts]) -> Iteration:
        samples, spans = batch.prompts, list[Span]()
        for name in known:
            samples = samples.plus(**self._collect(name))
        statistics: dict[int, dict[str, torch.Tensor]] = {}
        for name in names:
            trains = self.plan.graph.call(name).trains
            if trains:
                self._prepare(samples)  # also on ranks that train nothing, so that they know whether the others do
                if self._skip_training:
                    continue
            outputs = self._collect(name)
            spans += self.exchange.spans(name)
            if trains:
                _by_update(outputs, len(batch), statistics)
            else:
                samples = samples.plus(**outputs)
        metrics = {}
        if training_inputs(self.algorithm.graph) <= set(samples):
            samples = samples.plus(**self._prepare(samples))  # a training call may have read fewer columns
            metrics = self.algorithm.sample_metrics(samples)
            if self._skip_training:
                metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        trainings = [name for name in names if self.plan.graph.call(name).trains]
        if trainings:
            metrics |= self._update_metrics(trainings, samples, statistics)
        return Iteration(samples, metrics, tuple(spans))

    def _update_metrics(
        self, trainings: Sequence[str], samples: Rollouts, statistics: Mapping[int, Mapping[str, torch.Tensor]]
    ) -> dict[str, float]:
        """Metrics of the optimizer steps. With `skip_nonfinite` also the number of skipped steps of each loss."""
        steps = []
        for update, mini_batch in enumerate(self.algorithm.mini_batches(samples, self._step.number)):
            at = mini_batch.tensor("index")
            steps.append((mini_batch, {name: sums[at] for name, sums in statistics.get(update, {}).items()}))
        metrics = self.algorithm.update_metrics(steps)
        if self.settings.skip_nonfinite:
            for loss in map(self.algorithm.loss, trainings):
                skipped = sum(loss.statistic not in step_statistics for _, step_statistics in steps)
                metrics[f"skipped_updates/{loss.name}"] = float(skipped)
        return metrics


def make_executor(placement: Placement, algorithm: Algorithm, settings: CallSettings) -> Executor:
    """The executor of a placement, with a new exchange and a new alarm. All ranks call this together."""
    exchange = Exchange(placement.plan, placement.rank, placement.control)
    alarm = Alarm(current_watchdog() if placement.plan.cluster.size > 1 else None)
    return Executor(placement, exchange, algorithm, settings, alarm)


def _by_update(outputs: Rollouts, n: int, statistics: dict[int, dict[str, torch.Tensor]]) -> None:
    """Add the statistics that the ranks of a training call published to `statistics`: optimizer step -> statistic ->
    (n,) float32 by position in the global batch."""
    if "update" not in outputs:  # every step was left out
        return
    which, index = outputs.tensor("update"), outputs.tensor("index")
    for update in which.unique().tolist():
        selected = which == update
        for name in set(outputs) - {"index", "update"}:
            sums = statistics.setdefault(update, {}).setdefault(name, torch.zeros(n))
            sums[index[selected]] = outputs.tensor(name)[selected]
