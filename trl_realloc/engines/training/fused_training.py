"""`FusedTraining`: trains two split models at the same time on the same devices, mini-batch by mini-batch.

The pipelines of the two models lie in opposite directions. On every stage their forwards and backwards follow one
order, which the caller chooses from the micro-batches' sizes and the stages' times. The gradients, and so the steps,
are those of one model after the other. What a stage computes is in `stage_run`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...algorithms.base import TokenLoss
from ...algorithms.nonfinite import NonFiniteError
from ...algorithms.rollout import Rollouts
from ..base import Rate
from ..device import is_accelerator
from ..mesh_group import FusedGroups
from .megatron import MegatronEngine
from .pipeline import MiniBatch
from .stage_figures import FusedShape, exchanged_shape
from .stage_messages import Route
from .stage_run import Neighbours, StageRun
from .stage_times import StageTimes


MOST_MICRO_BATCHES = 1 << 20  # of one mini-batch, for the messages' tags


class StageTask(NamedTuple):
    """One forward or backward on a stage.

    Args:
        model: 0 or 1.
        micro_batch: number within the model's pipeline.
    """

    model: int
    micro_batch: int
    is_backward: bool


Orders = Sequence[Sequence[StageTask]]  # the tasks of each stage of a line, in the order in which they are run


@dataclass(frozen=True)
class FusedMiniBatch:
    """What the stages of a line ran in one mini-batch.

    Args:
        shape: what the order of the tasks was chosen from.
        orders: the tasks of each stage, in the order in which they were run.
        times: of each task of `orders`, its start and end, seconds since the epoch; without the waiting for its input.
        ranks: of the stages.
    """

    shape: FusedShape
    orders: Orders
    times: Sequence[Sequence[tuple[float, float]]]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class FusedShare:
    """One model's part of `FusedTraining.train`; the fields are the arguments of `base.TrainingEngine.train`."""

    samples: Rollouts
    loss: TokenLoss
    micro_batch_tokens: int
    learning_rate: Rate


# What `base.TrainingEngine.train` returns, or the step's refusal.
Outcome = dict[str, Tensor] | NonFiniteError


class FusedTraining:
    """Args:
    engines: of both models, with more than one stage. The stages of the second are reversed.
    orders_of: the order of the tasks on every stage of a line. Called on the line's first rank.
    """

    def __init__(
        self,
        engines: tuple[MegatronEngine, MegatronEngine],
        groups: FusedGroups,
        orders_of: Callable[[FusedShape], Orders],
    ) -> None:
        self.engines, self.groups, self.orders_of = engines, groups, orders_of
        self.times = StageTimes(engines[0].device)
        # of the latest mini-batch, on the first tensor rank of each stage
        self._latest: tuple[FusedShape, Orders] | None = None
        # With NCCL a receive is a kernel, which runs until the message is there. What has to wait for an idle device
        # (the first launch of a kernel, memory that is freed) would wait for it, while the sender may be waiting for
        # this stage.
        self._receives_ahead = not is_accelerator(engines[0].device)

    def connect(self) -> None:
        """Send one message along every route. NCCL connects two ranks in their first message, and waits there for both,
        so that a receive posted ahead would stop a stage. Here both ranks of a pair come to the same message at the
        same time. Collective over the mesh."""
        line = self.groups.line
        for channel in range(4):
            before, after = self._neighbours(channel // 2)
            source, target = (before, after) if channel % 2 == 0 else (after, before)
            for is_odd in (0, 1):  # a stage's links to its two neighbours take turns
                for peer, exchange in ((source, dist.irecv), (target, dist.isend)):
                    if peer is None or min(line.index, line.ranks.index(peer)) % 2 != is_odd:
                        continue
                    group = self.groups.messages_of(channel, peer)
                    work = exchange(torch.zeros(1, device=line.device), peer, group=group)
                    assert work is not None, "both ranks are in the group"
                    work.wait()

    def _neighbours(self, model: int) -> tuple[int | None, int | None]:
        """The ranks of the stages before and after this rank's; `None` where there is none."""
        pp = self.engines[model].groups.pp
        before = pp.ranks[pp.index - 1] if pp.index else None
        return before, pp.ranks[pp.index + 1] if pp.index + 1 < pp.size else None

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
        """The forwards and backwards of both models."""
        self.times.begin_mini_batch()
        orders = self._orders(batches)
        runs = [self._stage_run(model, batch, orders) for model, batch in enumerate(batches)]
        self.times.begin_tasks()  # the host has just read the orders from the device, which so has nothing left to do
        for task in orders[self.groups.line.index]:
            run = runs[task.model]
            (run.backward if task.is_backward else run.forward)(task.micro_batch)
        for run in runs:
            run.finish()

    def _orders(self, batches: Sequence[MiniBatch]) -> Orders:
        """The order of the tasks on every stage of the line. One rank makes it and sends it to the other stages and to
        the other tensor ranks, because ranks that made it from their own times could come to different orders."""
        line, tp = self.groups.line, self.engines[0].groups.tp
        orders: Orders = ((),) * line.size
        shared: dict[str, Tensor] = {}
        shape: FusedShape | None = None
        if tp.is_leader:
            measures = not torch.are_deterministic_algorithms_enabled()
            shape = exchanged_shape(self.engines, batches, line, self.times if measures else None)
            if line.is_leader and shape.micro_batches:
                orders = self.orders_of(shape)
            table = {str(stage): torch.tensor(tasks, dtype=torch.int64) for stage, tasks in enumerate(orders)}
            shared = line.share(table, 0)
        shared = tp.share(shared, 0)
        orders = [
            [StageTask(model, number, bool(is_backward)) for model, number, is_backward in shared[str(stage)].tolist()]
            for stage in range(line.size)
        ]
        self._latest = (shape, orders) if shape is not None and shape.micro_batches else None
        return orders

    def take_latest(self) -> FusedMiniBatch | None:
        """The latest mini-batch since this was last asked, on the line's first rank, if that is the first tensor rank
        of its stage. `None` on the others, if there was no mini-batch, if the line had no samples, and if a device has
        not ended it. Collective over the line.

        The device is not waited for. After `train` it has ended the mini-batch: the steps read the gradients' norms.
        """
        line, (latest, self._latest) = self.groups.line, (self._latest, None)
        if latest is None:
            return None
        shape, orders = latest
        longest, own = max(map(len, orders)), self.times.of_tasks()
        rows = own + [(math.nan, math.nan)] * (longest - len(own))
        gathered = line.gather(torch.tensor(rows, dtype=torch.float64, device=line.device))
        if not line.is_leader:
            return None
        times = [
            [(start, end) for start, end in stage[: len(tasks)].tolist()]
            for stage, tasks in zip(gathered, orders, strict=True)
        ]
        is_complete = all(math.isfinite(end) for stage in times for _, end in stage)
        return FusedMiniBatch(shape, orders, times, line.ranks) if is_complete else None

    def _stage_run(self, model: int, batch: MiniBatch, orders: Orders) -> StageRun:
        engine, line = self.engines[model], self.groups.line
        assert engine.pipeline is not None, "a fused model has more than one stage"
        before, after = self._neighbours(model)

        def numbers(rank: int | None, is_backward: bool) -> list[int]:
            tasks = orders[line.ranks.index(rank)] if rank is not None else ()
            return [task.micro_batch for task in tasks if (task.model, task.is_backward) == (model, is_backward)]

        neighbours = Neighbours(
            hidden_from=self._route(2 * model, before),
            hidden_to=self._route(2 * model, after),
            gradient_from=self._route(2 * model + 1, after),
            gradient_to=self._route(2 * model + 1, before),
            forwards_before=numbers(before, False),
            backwards_after=numbers(after, True),
        )
        measured = partial(self.times.of, model)
        return StageRun(engine.pipeline, batch, neighbours, engine.in_context, measured, ahead=self._receives_ahead)

    def _route(self, channel: int, peer: int | None) -> Route | None:
        if peer is None:
            return None
        return Route(self.groups.messages_of(channel, peer), peer, channel * MOST_MICRO_BATCHES)
