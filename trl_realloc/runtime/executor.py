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

from ..algorithms import ppo
from ..algorithms.nonfinite import NonFiniteError, problem_of, with_text
from ..algorithms.prompts import PromptBatch
from ..algorithms.rewards import RewardError
from ..algorithms.rollout import Rollouts
from ..engines.base import EngineError, Rate, Sampling
from ..plan.dataflow import CallKind, Role
from ..plan.timeline import Span
from . import calls
from .alarm import Alarm, JobFailed, current_watchdog
from .calls import Rules
from .exchange import Exchange, Failure, Piece
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
    """Args:
    placement: this rank's engines.
    exchange: its post office.
    rules: PPO's settings, sampling, rewards.
    alarm: tells the other ranks of a failure here, and this one of theirs.
    """

    def __init__(self, placement: Placement, exchange: Exchange, rules: Rules, alarm: Alarm) -> None:
        self.placement, self.exchange, self.rules, self.alarm = placement, exchange, rules, alarm
        self.plan, self.rank = placement.plan, placement.rank
        self._step = ""
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
        self._step = f"update {step + 1}" if step < EVALUATION_STEP else "an evaluation"
        self.exchange.begin()
        self._failure = self._prepared = None
        self._unfit = False
        for name, samples in (known or {}).items():
            self.exchange.know(name, samples)
        names = [n for n in self.plan.order if n not in (known or {}) and (only is None or n in only)]
        mine = [name for name in names if self.placement.takes_part(name)]
        for name, following in zip_longest(mine, mine[1:]):
            inputs = self._inputs(name, batch.prompts)
            if self._unfit and self.plan.graph.call(name).trains:
                continue
            if following is not None:
                self.placement.prefetch(following)  # while this call runs
            work = partial(self._run, name, inputs, batch, step, learning_rates, sampling)
            self._perform(name, step, work)
        return self._finish(batch, step, names, known or {})

    def _inputs(self, name: str, samples: Rollouts) -> Rollouts:
        """The global batch with every column that the call reads."""
        call = self.plan.graph.call(name)
        for producer in dict.fromkeys(self.plan.graph.producer(column) for column in call.inputs):
            if producer is not None:
                samples = self._with(samples, producer)
        return self._prepare(samples) if call.trains else samples

    def _with(self, samples: Rollouts, producer: str) -> Rollouts:
        if not self.exchange.has(producer):
            self.alarm.at(f"waiting for the samples of {producer} of {self._step}")
        try:
            return samples.plus(**self.exchange.collect(producer))
        except JobFailed as error:
            raise error from self._failure

    def _prepare(self, samples: Rollouts) -> Rollouts:
        """Rewards and advantages: on every rank for itself, from the same data, once for both trainings."""
        if self._prepared is None:
            if self.rules.settings.match_trl:
                samples = samples.plus(width=ppo.response_widths(samples, self.rules.settings))
            self._prepared = ppo.prepare(samples, self.rules.settings)
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

    def _run(
        self,
        name: str,
        samples: Rollouts,
        batch: PromptBatch,
        step: int,
        learning_rates: Mapping[Role, Rate],
        sampling: Sampling | None,
    ) -> Rollouts:
        call, placement, rules = self.plan.graph.call(name), self.placement, self.rules
        match call.role, call.kind:
            case Role.ACTOR, CallKind.GENERATE:
                return calls.generate(placement, rules, samples, step, sampling or rules.sampling, self.alarm.check)
            case Role.REFERENCE, CallKind.FORWARD:
                return calls.reference_forward(placement, samples)
            case Role.REWARD, CallKind.FORWARD:
                return calls.reward_forward(placement, rules, samples, batch.rows)
            case Role.CRITIC, CallKind.FORWARD:
                return calls.critic_forward(placement, samples)
            case role, CallKind.TRAIN:
                return calls.train(placement, rules, samples, name, step, learning_rates[role])
        raise AssertionError(f"no way to run {name}")

    def _perform(self, name: str, step: int, work: Callable[[], Rollouts]) -> None:
        """Run a call and publish what it made, or that it could not: then all ranks fail at the same place, where the
        outputs are first needed, with every collective in between whole.

        A failure inside a call with collectives is raised at once: the other ranks of its mesh wait in one of them, and
        whatever this rank did next on the same process group would meet it there.
        """
        piece: Piece | Failure
        together = True  # inside something that ranks do together
        try:
            self.alarm.at(f"{name} of {self._step} (its parameters)")
            try:
                moved = self.placement.refresh(name)
            except EngineError:  # an engine refused; every rank has been told, and the collectives are complete
                together = False
                raise
            together = self.placement.waits_inside(name)
            self.alarm.at(f"{name} of {self._step}")
            moves = (Span(moved.name, self.rank, moved.start, moved.end, step, bytes=moved.bytes),) if moved else ()
            start = time.time()
            if self.rank not in self.plan.mesh(name):
                return  # it had parameters to give
            self.placement.check_fresh(name)
            with self.placement.resident(name):
                made = work()
            tokens = int(made.ragged("responses").lengths.sum()) if "responses" in made else 0
            piece = Piece(made, Span(name, self.rank, start, max(start, time.time()), step, tokens), moves)
        except JobFailed:
            raise
        except Exception as error:
            # both are raised after the call's last collective, and the second on every rank of its mesh
            if together and not isinstance(error, RewardError | NonFiniteError):
                raise
            self._failure = error
            unharmed = isinstance(error, RewardError)  # no role has been trained yet
            piece = Failure(self.rank, name, str(error) or type(error).__name__, unharmed)
        self.exchange.publish(name, piece)

    def _finish(self, batch: PromptBatch, step: int, names: list[str], known: Mapping[str, Rollouts]) -> Iteration:
        samples, spans = batch.prompts, list[Span]()
        for name in known:
            samples = self._with(samples, name)
        steps: dict[int, dict[str, torch.Tensor]] = {}
        for name in names:
            trains = self.plan.graph.call(name).trains
            if trains:
                self._prepare(samples)  # a rank that trains nothing learns here that nobody does
                if self._unfit:
                    continue
            made = self._with(Rollouts(), name)
            spans += self.exchange.spans(name)
            if trains:
                _by_update(made, len(batch), steps)
            else:
                samples = samples.plus(**made)
        metrics = {}
        if {"logprobs", "ref_logprobs", "values", "scores"} <= set(samples):
            samples = self._prepare(samples)
            metrics = ppo.objective_metrics(samples, self.rules.settings, self.rules.eos_token_id)
            if self._unfit:
                metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        trainings = [name for name in names if self.plan.graph.call(name).trains]
        if trainings:
            rows = []
            for update, (mini_batch, weights) in enumerate(calls.updates(samples, self.rules, step)):
                at = mini_batch.tensor("index")
                rows.append((weights, {name: sums[at] for name, sums in steps.get(update, {}).items()}))
            metrics.update(ppo.update_metrics(rows))
            if self.rules.skip_nonfinite:
                metrics.update(_skipped(trainings, [set(sums) for _, sums in rows]))
        return Iteration(samples, metrics, tuple(spans))


def make_executor(placement: Placement, rules: Rules) -> Executor:
    """The executor of a placement, with an exchange and an alarm of its own. All ranks make theirs."""
    exchange = Exchange(placement.plan, placement.rank, placement.control)
    return Executor(placement, exchange, rules, Alarm(current_watchdog() if placement.plan.cluster.size > 1 else None))


LOSSES = {"actor.train": ("policy", "policy_loss"), "critic.train": ("value", "value_loss")}


def _skipped(trainings: Sequence[str], steps: Sequence[Collection[str]]) -> dict[str, float]:
    """`skipped_updates/policy` and `skipped_updates/value`: how many optimizer steps of an iteration were left out, by
    the statistics that there are of each."""
    return {
        f"skipped_updates/{word}": float(sum(loss not in found for found in steps))
        for name, (word, loss) in LOSSES.items()
        if name in trainings
    }


def _by_update(made: Rollouts, n: int, steps: dict[int, dict[str, torch.Tensor]]) -> None:
    """The statistics that the ranks of a training published, by optimizer step and place in the global batch."""
    if "update" not in made:  # every step was left out
        return
    which, index = made.tensor("update"), made.tensor("index")
    for update in which.unique().tolist():
        here = which == update
        for name in set(made) - {"index", "update"}:
            sums = steps.setdefault(update, {}).setdefault(name, torch.zeros(n))
            sums[index[here]] = made.tensor(name)[here]
