"""The division of a call's samples among ranks: pure functions of the plan and of the samples' lengths.

The first rank of each data-parallel replica of a call sends its outputs to the leader (the first rank) of every mesh
that reads them. The leader divides the samples among the replicas of its call, and sends each `Share` to the replica's
first rank, which forwards it. So a sample goes only to the ranks that read it, and only a leader's messages grow with
the number of devices. Where each rank has samples of its own, it sends them to the leader of the mesh, and rank 0 sends
it their outputs. The sending is in `calls.batch`.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ...algorithms.algorithm import Algorithm
from ...algorithms.corrections import OF_GENERATION
from ...algorithms.rollout import Ragged, Rollouts, prefix_tree
from ...plan.algorithm_graphs import columns_read_by
from ...plan.batching import balance, balance_shared, work
from ...plan.dataflow import Call, CallKind
from ...plan.execution_plan import ExecutionPlan


FIRST_INDEX = (
    "first_index"  # column: the `index` of a further turn's sample in the first turn, which seeds its sampling
)
RESULTS = 0  # the rank that receives the outputs of every call, for metrics, logs and the timeline


def sources(plan: ExecutionPlan, call: str) -> tuple[int, ...]:
    """The ranks that send the call's outputs: the first of each data-parallel replica."""
    return tuple(plan.mesh(call).devices)[:: _replica_size(plan, call)]


def receivers(plan: ExecutionPlan, call: str, running: Collection[str]) -> tuple[int, ...]:
    """The ranks that receive all of the call's outputs, ascending.

    Args:
        running: the calls that this iteration runs.
    """
    outputs = set(plan.graph.call(call).outputs)
    readers = [name for name in plan.order if name in running and outputs & set(columns_read(plan, name))]
    return tuple(sorted({RESULTS, *(plan.mesh(reader).leader for reader in readers)}))


def columns_read(plan: ExecutionPlan, call: str) -> tuple[str, ...]:
    """The columns that the leader of the call's mesh needs: the call's inputs; for a call that trains, the inputs of
    all training calls, which `Algorithm.prepare` may read."""
    graph = plan.graph
    if not graph.call(call).trains:
        return graph.call(call).inputs
    trainings = [other for other in map(graph.call, graph.order) if other.trains]
    return tuple(dict.fromkeys(column for other in trainings for column in other.inputs))


def replica(plan: ExecutionPlan, call: str, rank: int) -> int:
    """Index of a rank's data-parallel replica of the call."""
    return plan.mesh(call).index(rank) // _replica_size(plan, call)


def replica_ranks(plan: ExecutionPlan, call: str, rank: int) -> tuple[int, ...]:
    """The ranks of a rank's replica of the call, ascending."""
    size = _replica_size(plan, call)
    first = size * replica(plan, call, rank)
    return tuple(plan.mesh(call).devices)[first : first + size]


def _replica_size(plan: ExecutionPlan, call: str) -> int:
    strategy = plan[call].strategy
    return strategy.tp * strategy.pp


@dataclass(frozen=True)
class Share:
    """One replica's samples of one call.

    Args:
        samples: each sample once, with the columns that the call reads.
        steps: the replica's samples of each optimizer step: `index` and the columns that the algorithm adds to a
            mini-batch. Empty for calls that do not train.
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
        local_rows = rows_of(batch, self.samples.tensor("index"))
        return replace(self, samples=local_rows.plus(**self.samples))

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
    shares_tokens: bool = False,
    answered: PrefixAffinity | None = None,
) -> list[Share]:
    """The share of each replica of a call that takes no optimizer step. Prompts are dealt in turn, samples with
    responses so that their work is balanced.

    Args:
        samples: the global batch with the present columns that the call reads.
        replicas: replicas to return; by default all.
        attention_at: `ModelSpec.attention_at` of the call's model.
        shares_tokens: the call's engines compute common prefixes of samples once.
        answered: prefix affinity of a call that generates. The prompts are added to it.
    """
    dp = plan[call.name].strategy.dp
    read = samples.only(name for name in ("index", FIRST_INDEX, *columns_read_by(call)) if name in samples)
    if call.kind is CallKind.GENERATE:
        prompts = samples.ragged(call.inputs[0])
        positions = deal(prompts, dp, [] if answered is None else answered.homes(prompts))
        if answered is not None:
            answered.remember(prompts, positions)
    else:
        positions = divided(as_responses(call, samples), dp, attention_at, shares_tokens=shares_tokens)
    return [Share(read.select(positions[replica])) for replica in (range(dp) if replicas is None else replicas)]


def divided(samples: Rollouts, parts: int, attention_at: float, *, shares_tokens: bool) -> list[list[int]]:
    """The positions of the samples of each of `parts` replicas, so that their work is balanced.

    Args:
        attention_at: `ModelSpec.attention_at` of the call's model.
        shares_tokens: common prefixes of samples are computed once.
    """
    if shares_tokens and parts > 1 and len(samples):
        return balance_shared(prefix_tree(samples), parts, attention_at)
    return balance(work(samples.lengths.tolist(), attention_at), parts)


def deal(prompts: Ragged, parts: int, homes: Sequence[int | None] = ()) -> list[list[int]]:
    """The positions of the prompts of each of `parts` engines, ascending. An engine computes the keys and values of a
    common prefix once, so prompts go to their `homes`, and consecutive equal prompts (the groups of GRPO) to one
    engine, as long as no engine gets more than an equal share. The other prompts are dealt in turn.

    Args:
        homes: engine that has each prompt's prefix, or `None`.
    """
    most, dealt, left = -(-len(prompts) // parts), [list[int]() for _ in range(parts)], list[int]()
    for position, home in enumerate(homes or [None] * len(prompts)):
        (left if home is None or len(dealt[home]) == most else dealt[home]).append(position)
    fewest = [(len(positions), part) for part, positions in enumerate(dealt)]
    heapq.heapify(fewest)
    begins = torch.nonzero(~prompts.select(left).repeats()).flatten().tolist()
    for begin, end in pairwise([*begins, len(left)]):
        while begin < end:
            has, part = fewest[0]
            count = min(end - begin, most - has)
            dealt[part] += left[begin : begin + count]
            heapq.heapreplace(fewest, (has + count, part))
            begin += count
    return [sorted(positions) for positions in dealt]


class PrefixAffinity:
    """Prefix affinity: the engine that last served each prompt of a call. Its cache has the prompt's keys and values,
    and the next turn of a conversation begins with the previous turn's prompt."""

    def __init__(self) -> None:
        self._engine_of: dict[bytes, int] = {}
        self._beginning = 0  # length of the shortest prompt, bytes
        self._by_beginning: dict[bytes, list[bytes]] = {}

    def remember(self, prompts: Ragged, dealt: Sequence[Sequence[int]]) -> None:
        """Record the engines of these prompts.

        Args:
            dealt: positions of the prompts of each engine.
        """
        rows = [row.numpy().tobytes() for row in prompts.rows()]
        self._engine_of = {rows[position]: engine for engine, positions in enumerate(dealt) for position in positions}
        self._beginning, self._by_beginning = min(map(len, rows), default=0), defaultdict(list)
        for row in self._engine_of:
            self._by_beginning[row[: self._beginning]].append(row)

    def homes(self, prompts: Ragged) -> list[int | None]:
        """For each prompt, the engine of the longest recorded prompt that it begins with, or `None`."""
        homes: list[int | None] = []
        for row in (row.numpy().tobytes() for row in prompts.rows()):
            recorded = self._by_beginning.get(row[: self._beginning], ())
            prefixes = [prompt for prompt in recorded if row.startswith(prompt)]
            homes.append(self._engine_of[max(prefixes, key=len)] if prefixes else None)
        return homes


def shares_of_training(
    plan: ExecutionPlan,
    call: Call,
    algorithm: Algorithm,
    prepared: Rollouts,
    step: int,
    replicas: Iterable[int] | None = None,
    *,
    attention_at: float = math.inf,
    shares_tokens: bool = False,
) -> list[Share]:
    """The share of each replica of a call that trains. The work of every mini-batch is balanced over the replicas.

    Args:
        prepared: the global batch after `Algorithm.prepare`.
        replicas, attention_at, shares_tokens: the arguments of `shares_of_samples`.
    """
    dp, outputs = plan[call.name].strategy.dp, {column for other in plan.graph.calls for column in other.outputs}
    steps: dict[int, list[Rollouts]] = {replica: [] for replica in (range(dp) if replicas is None else replicas)}
    for batch in algorithm.mini_batches(prepared, step):
        added = ("index", *(name for name in batch if name not in prepared))
        positions = divided(batch, dp, attention_at, shares_tokens=shares_tokens)
        for replica, mini_batches in steps.items():
            mini_batches.append(batch.only(added).select(positions[replica]))
    # drop the outputs of other calls that this call does not read, and the statistics of the generation
    read = prepared.only(n for n in prepared if n in (*call.inputs, "index") or n not in (*outputs, *OF_GENERATION))
    shares = []
    for batches in steps.values():
        index = torch.cat([batch.tensor("index") for batch in batches]).unique() if batches else torch.zeros(0).long()
        shares.append(Share(rows_of(read, index), tuple(batches)))
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
