"""Forwards of scoring calls on a few samples of a batch: `ForwardRunner` runs them on a rank, `ForwardSamples` keeps
their inputs on rank 0.

`planner.iteration.stream_dispatcher` decides which samples are scored where and when.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...algorithms.prompt_batches import PromptBatch
from ...algorithms.rollout import Rollouts
from ...plan.algorithm_graphs import ROUTES, columns_read_by
from ...plan.dataflow import CallKind, Role
from ...plan.execution_plan import ExecutionPlan
from ...plan.spans import Span
from ...planner.iteration.stream import Stream, stream_of
from ...planner.iteration.stream_dispatcher import Score
from ..calls import generate_and_score as calls
from ..calls.generate_and_score import CallSettings, Step
from ..failures.alarm import Alarm
from ..messages import ROWS, Channels
from ..placement.placement import Placement
from ..samples.routes import deal, replica_ranks, rows_of
from .stream_messages import Forward, Rows


def stream_of_batch(placement: Placement, settings: CallSettings, step: Step, batch: PromptBatch) -> Stream:
    """The streamed calls of a batch."""
    plan = placement.plan
    forwards = [n for n in plan.streamed if plan.graph.call(n).kind is CallKind.FORWARD]
    generate = plan.graph.call(plan.streamed[0])
    prompts = batch.prompts.ragged(generate.inputs[0])
    dealt = deal(prompts, plan[generate.name].strategy.dp)
    limit = calls.sampling_of(settings, generate, step).max_tokens
    budgets = {name: placement.budget(name) for name in forwards}
    lengths = prompts.lengths.tolist()
    return stream_of(plan, lengths, limit, budgets, dealt)


class ForwardSamples:
    """The columns of one batch's samples that streamed calls read, on rank 0."""

    def __init__(self, stream: Stream) -> None:
        self._scorings = {s.name: s for s in stream.scorings}
        self._rows: dict[str, dict[int, bytes]] = defaultdict(dict)  # call -> sample index -> columns
        self._left: dict[int, tuple[str, int]] = {}  # number of a forward -> (call, replicas that have not run it)

    def add(self, call: str, rows: Rows) -> None:
        """Add a call's outputs for these samples."""
        self._rows[call].update(rows)

    def forwards(self, order: Score) -> Iterator[tuple[int, Forward]]:
        """(rank, message) for each rank of a forward's team."""
        scoring = self._scorings[order.call]
        team = scoring.teams[order.team]
        self._left[order.number] = order.call, len(team)
        template = next(index for part in order.parts for index in part)
        for ranks, part in zip(team, order.parts, strict=True):
            rows = {
                producer: {index: self._rows[producer][index] for index in part or (template,)}
                for producer in scoring.producers
            }
            for rank in ranks:
                forward_rows: Mapping[str, Rows] = rows if rank == ranks[0] else {}
                yield rank, Forward(order.number, order.call, order.team, part, forward_rows)

    def scored(self, number: int, rows: Rows) -> bool:
        """Record that a replica has run its part of a forward. Returns whether all replicas have."""
        call, left = self._left.pop(number)
        self.add(call, rows)
        if left > 1:
            self._left[number] = call, left - 1
        return left == 1


@dataclass(frozen=True)
class Forwarded:
    """The result of a forward on one rank.

    Args:
        outputs: the call's output columns for this rank's samples.
        rows: the columns that streamed calls read, as bytes, by sample index.
    """

    outputs: Rollouts
    span: Span
    rows: Rows


class ForwardRunner:
    """Runs forwards on one rank. The parameters of a call stay on the device until another call is run, or `close`.

    Args:
        channels: has a channel for the samples that the first rank of a replica forwards.
    """

    def __init__(self, placement: Placement, alarm: Alarm, channels: Channels) -> None:
        self.placement, self.alarm, self._forwarded = placement, alarm, channels.about(ROWS)
        self.plan, self.rank = placement.plan, placement.rank
        self._columns = _columns_read(self.plan)
        self._resident = contextlib.ExitStack()
        self._call = ""  # the call whose parameters are on the device

    def close(self) -> None:
        """Release the parameters' device memory. May be called at any time."""
        self._resident.close()
        self._call = ""

    def run(self, task: Forward, settings: CallSettings, step: Step, batch: PromptBatch) -> Forwarded:
        """Run one forward on this rank's replica."""
        call, name = self.plan.graph.call(task.call), task.call
        samples = self._samples_of(task, batch)
        self.alarm.set_activity(f"{name} of {step.name}")
        start = time.time()
        if self._call != name:  # the span includes loading the parameters from host memory, as the planner's span does
            self.close()
            self.placement.check_fresh(name)
            self._resident.enter_context(self.placement.resident(name))
            self._call = name
        outputs = calls.forward(self.placement, settings, call, samples, step, keeps=False)
        end, shared = max(start, time.time()), self.placement.take_shared_tokens(name)
        span = Span(name, self.rank, start, end, step.number, samples=len(task.samples), shared_tokens=shared)
        return Forwarded(outputs, span, self.rows(name, outputs))

    def rows(self, name: str, outputs: Rollouts) -> dict[int, bytes]:
        """The columns of a call's outputs that streamed calls read, by sample index."""
        if not self._columns[name] or not len(outputs):
            return {}
        read = outputs.only(column for column in ("index", *self._columns[name], ROUTES) if column in outputs)
        index = outputs.tensor("index").tolist()
        return {sample: read.select([row]).to_bytes() for row, sample in enumerate(index)}

    def _samples_of(self, task: Forward, batch: PromptBatch) -> Rollouts:
        first, *others = replica_ranks(self.plan, task.call, self.rank)
        rows = task.rows
        if self.rank == first:
            for rank in others:
                self._forwarded.send(pickle.dumps(rows), rank)
        else:
            rows = pickle.loads(self._forwarded.receive(first))  # safe: from another rank of this job
        columns: dict[str, Any] = {}
        for call_rows in rows.values():
            read = Rollouts.cat([Rollouts.from_bytes(call_rows[index]) for index in sorted(call_rows)])
            columns |= read if task.samples else read.select([])
        call = self.plan.graph.call(task.call)
        prompts = rows_of(batch.prompts, task.samples)
        texts = (calls.TEXTS,) if call.role is Role.REWARD and calls.TEXTS in prompts else ()
        samples = prompts.plus(**columns)
        return samples.only(name for name in ("index", *columns_read_by(call), *texts) if name in samples)


def _columns_read(plan: ExecutionPlan) -> dict[str, list[str]]:
    """For each streamed call, its output columns that other streamed calls read."""
    read = [column for name in plan.streamed[1:] for column in plan.graph.call(name).inputs]
    outputs = {name: plan.graph.call(name).outputs for name in plan.streamed}
    return {name: [column for column in dict.fromkeys(read) if column in columns] for name, columns in outputs.items()}
