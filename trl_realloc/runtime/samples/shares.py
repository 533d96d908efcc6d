"""Divides a call's samples among its data-parallel replicas.

`Share` is what the leader of a call's mesh sends to the ranks of one replica. Columns of the data set are not sent,
because every rank has them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ...algorithms.base import Algorithm
from ...algorithms.rollout import Ragged, Rollouts
from ...plan.batching import balance, work
from ...plan.dataflow import Call, CallKind
from ...plan.execution_plan import ExecutionPlan
from .results import OF_GENERATION


@dataclass(frozen=True)
class Share:
    """One replica's samples of one call.

    Args:
        samples: each sample once, with the columns that the call reads.
        steps: of a call that trains: for each optimizer step the columns `index` and those that the algorithm adds to
            a mini-batch, of the replica's samples of it. Empty for other calls.
        is_skipped: the call is not run, because its batch is not finite and the run skips such batches.
    """

    samples: Rollouts
    steps: tuple[Rollouts, ...] = ()
    is_skipped: bool = False

    def mini_batches(self) -> Iterator[Rollouts]:
        """The replica's samples of each optimizer step, with every column."""
        for step in self.steps:
            yield rows_of(self.samples, step.tensor("index")).plus(**step)

    def without(self, columns: Collection[str]) -> Share:
        """The share without these columns."""
        return replace(self, samples=self.samples.only(n for n in self.samples if n not in columns))

    def with_columns_of(self, batch: Rollouts) -> Share:
        """The share with the columns of `batch`, the data set's columns of the global batch."""
        if self.is_skipped:
            return self
        own = rows_of(batch, self.samples.tensor("index"))
        return replace(self, samples=own.plus(**self.samples))

    def packed(self) -> tuple[bytes, list[bytes], bool]:
        """The share as bytes."""
        return self.samples.to_bytes(), [step.to_bytes() for step in self.steps], self.is_skipped

    @staticmethod
    def of(packed: tuple[bytes, list[bytes], bool]) -> Share:
        """The inverse of `packed`."""
        samples, steps, is_skipped = packed
        return Share(Rollouts.from_bytes(samples), tuple(map(Rollouts.from_bytes, steps)), is_skipped)


def shares_of_samples(
    plan: ExecutionPlan,
    call: Call,
    samples: Rollouts,
    replicas: Iterable[int] | None = None,
    *,
    attention_at: float = math.inf,
) -> list[Share]:
    """The share of each replica of a call that does not train: prompts in turn, samples with responses so that their
    work is balanced.

    Args:
        samples: the global batch with the columns that the call reads.
        replicas: whose shares are wanted; by default all.
        attention_at: of the call's model, as of `work`.
    """
    dp = plan[call.name].strategy.dp
    read = samples.only(("index", *call.inputs))
    if call.kind is CallKind.GENERATE:
        positions = deal(samples.ragged(call.inputs[0]), dp)
    else:
        positions = balance(work(as_responses(call, samples).lengths.tolist(), attention_at), dp)
    return [Share(read.select(positions[replica])) for replica in (range(dp) if replicas is None else replicas)]


def deal(prompts: Ragged, parts: int) -> list[list[int]]:
    """The positions of the prompts of each of `parts` engines, ascending: in turn, but equal prompts that follow each
    other, the groups of GRPO, together as far as no engine gets more than its share, because an engine computes a
    prompt's keys and values once."""
    begins = torch.nonzero(~prompts.repeats()).flatten().tolist()
    dealt, fewest = [list[int]() for _ in range(parts)], [(0, part) for part in range(parts)]  # a heap
    most = -(-len(prompts) // parts)
    for begin, end in pairwise([*begins, len(prompts)]):
        while begin < end:
            has, part = fewest[0]
            count = min(end - begin, most - has)
            dealt[part] += range(begin, begin + count)
            heapq.heapreplace(fewest, (has + count, part))
            begin += count
    return dealt


def shares_of_training(
    plan: ExecutionPlan,
    call: Call,
    algorithm: Algorithm,
    prepared: Rollouts,
    step: int,
    replicas: Iterable[int] | None = None,
    *,
    attention_at: float = math.inf,
) -> list[Share]:
    """The share of each replica of a call that trains. The work of every mini-batch is balanced over the replicas.

    Args:
        prepared: the global batch after `Algorithm.prepare`.
        step: the number of the iteration.
        replicas, attention_at: as of `shares_of_samples`.
    """
    dp, made = plan[call.name].strategy.dp, {column for other in plan.graph.calls for column in other.outputs}
    steps: dict[int, list[Rollouts]] = {replica: [] for replica in (range(dp) if replicas is None else replicas)}
    for batch in algorithm.mini_batches(prepared, step):
        added = ("index", *(name for name in batch if name not in prepared))
        positions = balance(work(batch.lengths.tolist(), attention_at), dp)
        for replica, of_replica in steps.items():
            of_replica.append(batch.only(added).select(positions[replica]))
    # without the outputs of other calls that this call does not read, and what is known of the generation
    read = prepared.only(n for n in prepared if n in (*call.inputs, "index") or n not in (*made, *OF_GENERATION))
    shares = []
    for own_steps in steps.values():
        index = torch.cat([own.tensor("index") for own in own_steps]).unique() if own_steps else torch.zeros(0).long()
        shares.append(Share(rows_of(read, index), tuple(own_steps)))
    return shares


def as_responses(call: Call, samples: Rollouts) -> Rollouts:
    """The samples with the call's first two input columns renamed to `prompts` and `responses`."""
    prompts, responses = call.inputs[:2]
    if (prompts, responses) == ("prompts", "responses"):
        return samples
    return samples.plus(prompts=samples[prompts], responses=samples[responses])


def rows_of(samples: Rollouts, index: torch.Tensor | Sequence[int]) -> Rollouts:
    """The samples with these `index` values, in this order."""
    ascending, order = samples.tensor("index").sort()
    return samples.select(order[torch.searchsorted(ascending, torch.as_tensor(index, dtype=torch.long))])
