"""The loop over the plan's calls: wait for the inputs, run, publish, record.

Every rank runs it; a rank executes the calls whose mesh holds it, in plan order, so calls on disjoint meshes overlap.
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
from .calls import Rules, Step
from .exchange import CallFailure, CallOutput, Exchange
from .failures.alarm import Alarm, JobFailed
from .failures.watchdog_client import current_watchdog
from .placement import Placement


logger = logging.get_logger(__name__)
EVALUATION_STEP = 1 << 40  # steps from here on are evaluations, which draw from seeds of their own


@dataclass(frozen=True)
class Iteration:
    """What one iteration made: the global batch with every column, metrics under TRL's names, and when what ran."""

    samples: Rollouts
    metrics: dict[str, float]
    spans: tuple[Span, ...]


class Executor:
    """Runs whole iterations (`run`), or one call at a time in any order that the data allow (`begin`, `perform`).

    Args:
        placement: this rank's engines.
        exchange: its post office.
        algorithm: what is computed between the calls, losses and metrics.
        rules: sampling and rewards.
        alarm: tells the other ranks of a failure here, and this one of theirs.
    """

    def __init__(
        self, placement: Placement, exchange: Exchange, algorithm: Algorithm, rules: Rules, alarm: Alarm
    ) -> None:
        self.placement, self.exchange, self.algorithm = placement, exchange, algorithm
        self.rules, self.alarm = rules, alarm
        self.plan, self.rank = placement.plan, placement.rank
        self._step, self._step_name = Step(0), ""
        self._failure: Exception | None = None
        self._prepared: Rollouts | None = None
        self._unfit = False  # nothing may be trained on this batch, and `Rules.skip_nonfinite` says to go on

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
        """One iteration.

        Args:
            batch: the global batch's prompts, the same on every rank.
            step: which iteration of the run; it seeds sampling and mini-batches.
            learning_rates: of each trained role in this iteration.
            known: outputs of calls that need not run (replayed rollouts), by call name.
            only: the calls to run, where not all: an evaluation trains nothing.
            sampling: instead of the run's own.

        Raises:
            JobFailed: a call failed here or on another rank; nothing is trained on a batch of which a call before the
                training failed.
        """
        known = known or {}
        self.begin(Step(step, batch.rows, learning_rates, sampling))
        for name, samples in known.items():
            self.exchange.know(name, samples)
        names = [n for n in self.plan.order if n not in known and (only is None or n in only)]
        mine = [name for name in names if self.placement.takes_part(name)]
        for name, following in zip_longest(mine, mine[1:]):
            call = self.plan.graph.call(name)
            inputs = self._inputs(call, batch.prompts)
            if self._unfit and call.trains:
                continue
            if following is not None:
                self.placement.prefetch(following)  # while this call runs
            self._execute(call, inputs)
        return self._finish(batch, names, known)

    # --- one call at a time -----------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Begin an iteration. All ranks together; the messages of the last one have been taken."""
        self._step = step
        self._step_name = f"update {step.number + 1}" if step.number < EVALUATION_STEP else "an evaluation"
        self.exchange.begin()
        self._failure = self._prepared = None
        self._unfit = False

    def perform(self, name: str, samples: Rollouts) -> Rollouts:
        """Run one call of the iteration that has begun, on any samples, and wait for what it makes. All ranks call this
        together with the same samples. A call may be performed several times.

        Args:
            samples: with every column that the call reads, and `index`, each sample's number, which seeds its draws.
                For a call that trains: the global batch.

        Returns:
            The call's outputs in ascending order of `index`; of a call that trains the statistics of its steps.

        Raises:
            JobFailed: the call failed here or on another rank.
            NonFiniteError: a number of the samples that a training was to use is not finite.
        """
        call = self.plan.graph.call(name)
        self.exchange.forget(name)
        if call.trains:
            self._prepared = None
            samples = self._prepare(samples)
            if self._unfit:
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
        """What the algorithm computes before training: on every rank for itself, from the same data, once for all
        trainings."""
        if self._prepared is None:
            self._prepared = self.algorithm.prepare(samples)
            self._check(self._prepared)
        return self._prepared

    def _check(self, samples: Rollouts) -> None:
        """Every rank has the same samples, so all refuse a batch together, before any of them trains on it.

        Raises:
            NonFiniteError: a number of a sample is not finite, or too large to be trained on.
        """
        error = problem_of(samples)
        if error is None:
            return
        error = with_text(error, samples, self.rules.processing_class)
        if not self.rules.skip_nonfinite:
            raise NonFiniteError(f"{error}. Nothing was trained on this batch.", error.sample)
        self._unfit = True
        if self.rank == 0:
            logger.warning(f"{error}. Nothing is trained on this batch.")

    def _work(self, call: Call, samples: Rollouts) -> Callable[[], Rollouts]:
        placement, rules, step = self.placement, self.rules, self._step
        match call.kind:
            case CallKind.GENERATE:
                return partial(calls.generate, placement, rules, call, samples, step, self.alarm.check)
            case CallKind.FORWARD:
                return partial(calls.forward, placement, rules, call, samples, step)
            case CallKind.TRAIN:
                return partial(calls.train, placement, rules, self.algorithm, call, samples, step)

    def _execute(self, call: Call, samples: Rollouts) -> None:
        """Run a call and publish what it made, or that it could not: then all ranks fail at the same place, where the
        outputs are first needed, with every collective in between whole.

        A failure inside a call with collectives is raised at once: the other ranks of its mesh wait in one of them, and
        whatever this rank did next on the same process group would meet it there.
        """
        output: CallOutput | CallFailure
        name, step = call.name, self._step.number
        together = True  # inside something that ranks do together
        try:
            self.alarm.at(f"{name} of {self._step_name} (its parameters)")
            try:
                moved = self.placement.refresh(name)
            except EngineError:  # an engine refused; every rank has been told, and the collectives are complete
                together = False
                raise
            together = self.placement.waits_inside(name)
            self.alarm.at(f"{name} of {self._step_name}")
            moves = (Span(moved.name, self.rank, moved.start, moved.end, step, bytes=moved.bytes),) if moved else ()
            start = time.time()
            if not self.placement.has(name):
                return  # it had parameters to give
            self.placement.check_fresh(name)
            with self.placement.resident(name):
                made = self._work(call, samples)()
            draws = call.kind is CallKind.GENERATE and len(made) > 0
            tokens = int(made.ragged(call.outputs[0]).lengths.sum()) if draws else 0
            output = CallOutput(made, Span(name, self.rank, start, max(start, time.time()), step, tokens), moves)
        except JobFailed:
            raise
        except Exception as error:
            # both are raised after the call's last collective, and the second on every rank of its mesh
            if together and not isinstance(error, RewardError | NonFiniteError):
                raise
            self._failure = error
            unharmed = isinstance(error, RewardError)  # no role has been trained yet
            output = CallFailure(self.rank, name, str(error) or type(error).__name__, unharmed)
        self.exchange.publish(name, output)

    # --- what an iteration made -------------------------------------------------------------------------------------

    def _finish(self, batch: PromptBatch, names: list[str], known: Mapping[str, Rollouts]) -> Iteration:
        samples, spans = batch.prompts, list[Span]()
        for name in known:
            samples = samples.plus(**self._collect(name))
        statistics: dict[int, dict[str, torch.Tensor]] = {}
        for name in names:
            trains = self.plan.graph.call(name).trains
            if trains:
                self._prepare(samples)  # a rank that trains nothing learns here that nobody does
                if self._unfit:
                    continue
            made = self._collect(name)
            spans += self.exchange.spans(name)
            if trains:
                _by_update(made, len(batch), statistics)
            else:
                samples = samples.plus(**made)
        metrics = {}
        if training_inputs(self.algorithm.graph) <= set(samples):
            samples = samples.plus(**self._prepare(samples))  # a training may have read fewer columns
            metrics = self.algorithm.sample_metrics(samples)
            if self._unfit:
                metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        trainings = [name for name in names if self.plan.graph.call(name).trains]
        if trainings:
            metrics |= self._update_metrics(trainings, samples, statistics)
        return Iteration(samples, metrics, tuple(spans))

    def _update_metrics(
        self, trainings: Sequence[str], samples: Rollouts, statistics: Mapping[int, Mapping[str, torch.Tensor]]
    ) -> dict[str, float]:
        """Metrics of the optimizer steps; where `skip_nonfinite`, how many of each loss were left out as well."""
        steps = []
        for update, mini_batch in enumerate(self.algorithm.mini_batches(samples, self._step.number)):
            at = mini_batch.tensor("index")
            steps.append((mini_batch, {name: sums[at] for name, sums in statistics.get(update, {}).items()}))
        metrics = self.algorithm.update_metrics(steps)
        if self.rules.skip_nonfinite:
            for loss in map(self.algorithm.loss, trainings):
                skipped = sum(loss.statistic not in found for _, found in steps)
                metrics[f"skipped_updates/{loss.name}"] = float(skipped)
        return metrics


def make_executor(placement: Placement, algorithm: Algorithm, rules: Rules) -> Executor:
    """The executor of a placement, with an exchange and an alarm of its own. All ranks make theirs."""
    exchange = Exchange(placement.plan, placement.rank, placement.control)
    alarm = Alarm(current_watchdog() if placement.plan.cluster.size > 1 else None)
    return Executor(placement, exchange, algorithm, rules, alarm)


def _by_update(made: Rollouts, n: int, statistics: dict[int, dict[str, torch.Tensor]]) -> None:
    """The statistics that the ranks of a training published, by optimizer step and place in the global batch."""
    if "update" not in made:  # every step was left out
        return
    which, index = made.tensor("update"), made.tensor("index")
    for update in which.unique().tolist():
        here = which == update
        for name in set(made) - {"index", "update"}:
            sums = statistics.setdefault(update, {}).setdefault(name, torch.zeros(n))
            sums[index[here]] = made.tensor(name)[here]
