"""Trains two split models at the same time on the same devices, mini-batch by mini-batch.

The pipelines of the two models run in opposite directions. On every stage their forwards and backwards follow one
order, which the caller chooses from the micro-batches' sizes and the stages' times. The gradients and steps are the
same as if the models were trained one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...algorithms.algorithm import TokenLoss
from ...algorithms.nonfinite import NonFiniteError
from ...algorithms.rollout import Rollouts
from ..base import Rate
from .megatron import MegatronEngine
from .pipeline import MiniBatch
from .stage_figures import FusedShape, exchanged_shape
from .stage_messages import StageTask
from .stage_run import Orders, StageRun
from .stage_times import StageTimes


@dataclass(frozen=True)
class FusedShare:
    """One model's part of `FusedTraining.train`; the fields are the arguments of `base.TrainingEngine.train`."""

    samples: Rollouts
    loss: TokenLoss
    micro_batch_tokens: int
    learning_rate: Rate


# the statistics of `base.TrainingEngine.train`, or the error of a refused step
Outcome = dict[str, Tensor] | NonFiniteError


class FusedTraining:
    """Trains two models whose pipelines share the devices of a mesh.

    Args:
        engines: engines of both models, with more than one stage. The stages of the second are reversed.
        orders_of: returns the order of the tasks on every stage of a line. Called on the line's first rank.
    """

    def __init__(
        self,
        engines: tuple[MegatronEngine, MegatronEngine],
        orders_of: Callable[[FusedShape], Orders],
    ) -> None:
        self.engines, self.orders_of = engines, orders_of
        first, second = engines[0].groups, engines[1].groups.reversed()
        # the pipeline with more stages; the other model has one or several pipelines there, one after the other
        self.line = first.pp if first.pp.size >= second.pp.size else second.pp
        self.times = StageTimes(engines[0].device)

    def train(self, shares: tuple[FusedShare, FusedShare]) -> tuple[Outcome, Outcome]:
        """Take one optimizer step of each model, on one mini-batch. Collective over the mesh."""
        batches = []
        for engine, share in zip(self.engines, shares, strict=True):
            engine.head.train()
            batches.append(engine.mini_batch(share.samples, share.loss, share.micro_batch_tokens))
        self._run(batches)
        return self._step(0, batches, shares[0]), self._step(1, batches, shares[1])

    def _step(self, model: int, batches: Sequence[MiniBatch], share: FusedShare) -> Outcome:
        engine = self.engines[model]
        statistics = engine.statistics_of(batches[model])
        try:
            engine.step(share.samples, statistics, share.learning_rate)
        except NonFiniteError as error:
            return error
        return statistics

    def _run(self, batches: Sequence[MiniBatch]) -> None:
        self.times.begin_mini_batch()
        orders = self._orders(batches)
        works = [
            engine.stage_work(batch.micros, batch.finish) for engine, batch in zip(self.engines, batches, strict=True)
        ]
        StageRun(works, orders, self.line, self.times.of).run()

    def _orders(self, batches: Sequence[MiniBatch]) -> Orders:
        """The order of the tasks on every stage of the line. One rank computes it and sends it to the other stages and
        tensor ranks, because ranks that computed it from their own times could get different orders."""
        line, tp = self.line, self.engines[0].groups.tp
        orders: Orders = ((),) * line.size
        shared: dict[str, Tensor] = {}
        if tp.is_leader:
            measures = not torch.are_deterministic_algorithms_enabled()
            shape = exchanged_shape(self.engines, batches, line, self.times if measures else None)
            if line.is_leader and shape.micro_batches:
                orders = self.orders_of(shape)
            table = {str(stage): torch.tensor(tasks, dtype=torch.int64) for stage, tasks in enumerate(orders)}
            shared = line.share(table, 0)
        shared = tp.share(shared, 0)
        return [
            [StageTask(model, number, bool(is_backward)) for model, number, is_backward in shared[str(stage)].tolist()]
            for stage in range(line.size)
        ]
