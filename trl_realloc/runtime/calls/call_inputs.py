"""`CallInputs`: collects the samples that each call of an iteration reads, and divides them among the call's ranks.

Sending is in `exchange`, the arithmetic of the division in `shares`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from transformers.utils import logging

from ...algorithms.algorithm import Algorithm
from ...algorithms.nonfinite import NonFiniteError, problem_of, with_text
from ...algorithms.rollout import Rollouts
from ...plan.dataflow import Call
from ..failures.alarm import Alarm
from ..samples.exchange import CallFailure, CallOutput, CallsFailed, Exchange
from ..samples.routes import RESULTS, columns_read, is_divided_by_each, replica
from ..samples.shares import PrefixAffinity, Share, shares_of_samples, shares_of_training
from .generate_and_score import CallSettings, Step


logger = logging.get_logger(__name__)


class CallInputs:
    """The inputs of one rank's calls in one iteration.

    Args:
        answered: prefix affinity of each call that generates, on the mesh's leader.
        shares_tokens: returns the argument `shares_tokens` of `shares_of_samples` for a call of this rank.
    """

    def __init__(
        self,
        exchange: Exchange,
        algorithm: Algorithm,
        settings: CallSettings,
        alarm: Alarm,
        step: Step,
        answered: Mapping[str, PrefixAffinity],
        shares_tokens: Callable[[str], bool],
    ) -> None:
        self.exchange, self.algorithm, self.settings, self.alarm = exchange, algorithm, settings, alarm
        self.plan, self.rank = exchange.plan, exchange.rank
        self.step, self._answered, self._shares_tokens = step, answered, shares_tokens
        self.reports = self.rank == RESULTS  # warns of a skipped batch
        self._prepared: Rollouts | None = None
        self.skips_training = False  # the batch is not finite, and the run skips it (`skip_nonfinite`)

    def share(self, call: Call, batch: Rollouts) -> Share | CallsFailed:
        """This rank's share of a call's inputs, or the failures of the calls that make them.

        Args:
            batch: the data set's columns of the global batch.
        """
        if is_divided_by_each(self.plan, call.name):
            replica_index = replica(self.plan, call.name, self.rank)
            return shares_of_samples(self.plan, call, batch, [replica_index])[0]
        if self.rank != self.plan.mesh(call.name).leader:
            self.alarm.set_activity(f"waiting for its samples of {call.name} of {self.step.name}")
            try:
                return self.exchange.receive_share(call.name).with_columns_of(batch)
            except CallsFailed as failed:
                return failed
        return self._distributed(call, lambda: self._inputs(call, batch), self.plan.graph.sources)

    def share_of_gathered(self, call: Call, samples: Rollouts | None) -> Share | CallsFailed:
        """This rank's share of the leader's samples.

        Args:
            samples: every column that the call reads, on the leader of the call's mesh; `None` on the others.
        """
        if samples is not None:
            return self._distributed(call, lambda: samples, ())
        try:
            return self.exchange.receive_share(call.name)
        except CallsFailed as failed:
            return failed

    def _distributed(self, call: Call, inputs: Callable[[], Rollouts], omitted: Collection[str]) -> Share | CallsFailed:
        """Divide a call's inputs on the leader of its mesh, and send the shares without the columns `omitted`."""
        try:
            shares = self.divide(call, inputs())
        except CallsFailed as failed:
            self.exchange.distribute(call.name, failed)
            return failed
        except NonFiniteError as error:  # rank 0 raises it on every rank
            refused = CallsFailed((CallFailure(self.rank, call.name, str(error), True, error.sample),))
            self.exchange.distribute(call.name, refused)
            return refused
        self.exchange.distribute(call.name, [share.without(omitted) for share in shares])
        return shares[replica(self.plan, call.name, self.rank)]

    def _inputs(self, call: Call, samples: Rollouts) -> Rollouts:
        """The global batch with every column that the call reads. Only on the leader of the call's mesh.

        Raises:
            CallsFailed: a producer failed. Raised after all producers have ended.
        """
        failures: list[CallFailure] = []
        columns = columns_read(self.plan, call.name)
        for producer in dict.fromkeys(map(self.plan.graph.producer, columns)):
            if producer is not None:
                try:
                    samples = samples.plus(**self.collect(producer).samples)
                except CallsFailed as failed:
                    failures += failed.failures
        if failures:
            raise CallsFailed(tuple(dict.fromkeys(failures)))
        return samples

    def collect(self, producer: str) -> CallOutput:
        """A call's outputs from all ranks. Raises `CallsFailed` if the call has failed."""
        if not self.exchange.has(producer):
            self.alarm.set_activity(f"waiting for the samples of {producer} of {self.step.name}")
        return self.exchange.collect(producer)

    def divide(self, call: Call, samples: Rollouts, replicas: Collection[int] | None = None) -> list[Share]:
        """The shares of a call's replicas.

        Args:
            samples: the global batch with every column that the call reads.
            replicas: replicas to return; by default all.

        Raises:
            NonFiniteError: the call trains, and a number of the samples is not finite.
        """
        attention_at = self.settings.attention_at.get(call.role, math.inf)
        shares_tokens = self._shares_tokens(call.name)
        if not self.step.trains(call):
            # a rank that divides by itself does not know the earlier prompts
            answered = self._answered.get(call.name) if replicas is None else None
            return shares_of_samples(
                self.plan,
                call,
                samples,
                replicas,
                attention_at=attention_at,
                shares_tokens=shares_tokens,
                answered=answered,
            )
        prepared = self.prepare(samples)
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
                if self.reports:
                    logger.warning(f"{error}. Nothing is trained on this batch.")
        return self._prepared
