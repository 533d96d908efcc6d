"""`Stream`: the streamed calls of one iteration for `stream_dispatcher`: engines, teams, samples and token budgets.

It is derived from a plan and the lengths of the prompts alone, so that the runtime and the simulation agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...plan.assignment import runs_in_step
from ...plan.execution_plan import ExecutionPlan


Ranks = tuple[int, ...]


@dataclass(frozen=True)
class StreamedGeneration:
    """A call that generates.

    Args:
        engines: ranks of each generation engine.
        samples: indices of the samples that each engine begins.
    """

    name: str
    engines: tuple[Ranks, ...]
    samples: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StreamedScoring:
    """A call that scores while samples are being generated.

    Args:
        teams: ranks that run a forward together, by team and by data-parallel replica of the team. A team is one
            replica, or all replicas if they run in step (`assignment.runs_in_step`).
        producers: streamed calls whose outputs it reads.
        budget: largest number of tokens of one forward of one replica.
    """

    name: str
    teams: tuple[tuple[Ranks, ...], ...]
    producers: tuple[str, ...]
    budget: int


@dataclass(frozen=True)
class Stream:
    """The streamed calls of one iteration.

    Args:
        scorings: scoring calls in the plan's order.
        prompts: tokens of each sample's prompt, by the sample's index.
        limit: largest number of tokens of a response.
    """

    generation: StreamedGeneration
    scorings: tuple[StreamedScoring, ...]
    prompts: tuple[int, ...]
    limit: int

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that generate or score."""
        replicas = [replica for scoring in self.scorings for team in scoring.teams for replica in team]
        return frozenset(rank for ranks in (*self.generation.engines, *replicas) for rank in ranks)


def stream_of(
    plan: ExecutionPlan,
    prompts: Sequence[int],
    limit: int,
    budgets: Mapping[str, int],
    dealt: Sequence[Sequence[int]] | None = None,
) -> Stream:
    """The streamed calls of an iteration of a plan that has streams.

    Args:
        prompts, limit: fields of `Stream`.
        budgets: largest number of tokens of one forward of each scoring call.
        dealt: indices of the samples that each engine begins; `None`: round robin.
    """
    generate, *scoring_calls = plan.streamed
    engines, scorings = replicas_of(plan, generate), []
    in_turn = [range(first, len(prompts), len(engines)) for first in range(len(engines))]
    shares = tuple(tuple(share) for share in (in_turn if dealt is None else dealt))
    for name in scoring_calls:
        replicas = replicas_of(plan, name)
        producers = dict.fromkeys(filter(None, map(plan.graph.producer, plan.graph.call(name).inputs)))
        in_step = runs_in_step(plan.graph.call(name), plan[name])
        teams = (replicas,) if in_step else tuple((replica,) for replica in replicas)
        scorings.append(StreamedScoring(name, teams, tuple(producers), budgets[name]))
    return Stream(StreamedGeneration(generate, engines, shares), tuple(scorings), tuple(prompts), limit)


def engine_samples(plan: ExecutionPlan, call: str, samples: int) -> int:
    """The largest number of samples that an engine of a generate call has at once: its share of `samples`, or with
    migration its share of the samples that may move, if that is more."""
    share = -(-samples // plan[call].strategy.dp)
    migration = plan.streams.migration if plan.streams is not None else None
    return share if migration is None else max(share, math.ceil(migration.threshold * samples / migration.engines))


def replicas_of(plan: ExecutionPlan, call: str) -> tuple[Ranks, ...]:
    """The ranks of each data-parallel replica of a call."""
    ranks, strategy = tuple(plan.mesh(call).devices), plan[call].strategy
    size = strategy.tp * strategy.pp
    return tuple(ranks[first : first + size] for first in range(0, len(ranks), size))
