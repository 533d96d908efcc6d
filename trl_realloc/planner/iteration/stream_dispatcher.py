"""`Dispatcher`: decides which samples are scored where and when while others are being generated, and which unfinished
samples move to other engines.

A state machine without clock and communication: events go in, orders come out. The runtime feeds it the reports of the
ranks, the simulation feeds it simulated events, so both make the same decisions. All ranks run their orders in the same
sequence, so that two forwards with collectives cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...plan.batching import balance
from ...plan.streams import Migration
from .scoring_state import FreeTeams, ReadySamples, Team
from .stream import Stream, StreamedGeneration, StreamedScoring


DEPTH = 2  # forwards in a rank's queue, so that the next one has arrived when one ends
SHARES = 4  # forwards of each team and call, if all had the same number of tokens and the budget allowed it


@dataclass(frozen=True)
class Score:
    """Run one forward of a scoring call.

    Args:
        number: number of the order, from 0.
        parts: samples of each replica of the team, ascending; some may be empty.
    """

    number: int
    call: str
    team: int
    parts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Withdraw:
    """Stop the unfinished samples of an engine and report them."""

    engine: int


@dataclass(frozen=True)
class Continue:
    """Go on generating samples that another engine has begun."""

    engine: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Release:
    """An engine gets no more samples, and its ranks may score."""

    engine: int


Order = Score | Withdraw | Continue | Release


@dataclass
class _Generating:
    stream: StreamedGeneration
    unfinished: list[set[int]]  # samples, by engine
    left: int  # number of samples in `unfinished`
    released: list[bool]  # by engine
    withdrawing: set[int] = field(default_factory=set)  # engines that have not answered `Withdraw`
    destinations: list[int] = field(default_factory=list)  # engines that receive migrated samples
    has_migrated: bool = False
    unreleased: int = 0  # number of engines


@dataclass
class _Scoring:
    stream: StreamedScoring
    missing: list[int]  # by sample, the number of producers whose outputs are missing
    ready: ReadySamples


class Dispatcher:
    """The scheduler of streamed calls. Each method that reports an event returns the resulting orders.

    Args:
        migration: rule for moving unfinished samples; `None`: none move.
        deterministic: whether the groups of samples that are scored together are fixed, whenever they finish.
    """

    def __init__(
        self,
        stream: Stream,
        migration: Migration | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self.stream, self.migration = stream, migration
        n = len(stream.prompts)
        engines = stream.generation
        self._generating = _Generating(
            engines,
            [set(samples) for samples in engines.samples],
            sum(map(len, engines.samples)),
            [False] * len(engines.engines),
            unreleased=len(engines.engines),
        )
        self._engines_of: dict[int, list[int]] = {}  # first rank -> engines
        for engine, ranks in enumerate(engines.engines):
            self._engines_of.setdefault(ranks[0], []).append(engine)
        self._scoring = {
            s.name: _Scoring(s, [len(s.producers)] * n, ReadySamples(n, _groups(stream, s) if deterministic else ()))
            for s in stream.scorings
        }
        self._calls = list(self._scoring)
        self._teams = FreeTeams(stream, DEPTH)
        self._responses: dict[int, int] = {}  # sample -> tokens of its response
        self._joined: set[int] = set()
        self._open: dict[int, Score] = {}
        self._number = 0

    @property
    def is_finished(self) -> bool:
        """True if every sample has been generated and scored by every call, and every engine has been released."""
        if self._generating.unreleased or self._open:
            return False
        return all(state.ready.is_last and not state.ready for state in self._scoring.values())

    # --- events ------------------------------------------------------------------------------------------------------

    def join(self, rank: int) -> list[Order]:
        """A rank has begun its part: its engine runs, and its parameters have arrived."""
        self._joined.add(rank)
        self._teams.join(rank)
        orders: list[Order] = []
        for engine in self._engines_of.get(rank, ()):
            orders += self._release(engine)
        return [*orders, *self._scores()]

    def finish(self, engine: int, samples: Sequence[tuple[int, int]]) -> list[Order]:
        """Samples have been generated.

        Args:
            samples: (index, tokens of the response) of each sample.
        """
        state = self._generating
        for index, tokens in samples:
            state.unfinished[engine].remove(index)
            self._responses[index] = tokens
        state.left -= len(samples)
        self._produced(state.stream.name, [index for index, _ in samples])
        return [*self._migrate(), *self._release(engine), *self._scores()]

    def withdraw(self, engine: int, samples: Sequence[int]) -> list[Order]:
        """An engine has answered `Withdraw` with the samples that it stopped. It continues its other samples."""
        state = self._generating
        state.withdrawing.remove(engine)
        state.unfinished[engine].difference_update(samples)
        moved: dict[int, list[int]] = {}
        for index in samples:
            destination = min(state.destinations, key=lambda other: (len(state.unfinished[other]), other))
            state.unfinished[destination].add(index)
            moved.setdefault(destination, []).append(index)
        orders: list[Order] = [Continue(destination, tuple(moved[destination])) for destination in sorted(moved)]
        for other in (engine, *state.destinations):
            orders += self._release(other)
        return [*orders, *self._scores()]

    def scored(self, number: int) -> list[Order]:
        """All ranks of a team have run the forward with this number."""
        order = self._open.pop(number)
        self._teams.end((self._calls.index(order.call), order.team))
        self._produced(order.call, [index for part in order.parts for index in part])
        return list(self._scores())

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _produced(self, call: str, samples: Sequence[int]) -> None:
        """The outputs of a call for these samples have arrived."""
        for state in self._scoring.values():
            if call not in state.stream.producers:
                continue
            for index in samples:
                state.missing[index] -= 1
                if not state.missing[index]:
                    response = self._responses[index]
                    state.ready.add(index, self.stream.prompts[index] + response)

    def _migrate(self) -> list[Order]:
        """When few samples are unfinished, withdraw those of all but the fullest engines. This happens once."""
        state, migration = self._generating, self.migration
        left = state.left
        if migration is None or state.has_migrated or not left:
            return []
        if left >= migration.threshold * len(self.stream.prompts):
            return []
        active = [engine for engine, samples in enumerate(state.unfinished) if samples]
        active.sort(key=lambda engine: (-len(state.unfinished[engine]), engine))
        state.has_migrated = True
        if len(active) <= migration.engines:
            return []
        state.destinations = active[: migration.engines]
        state.withdrawing = set(active[migration.engines :])
        return [Withdraw(engine) for engine in sorted(state.withdrawing)]

    def _release(self, engine: int) -> list[Order]:
        state = self._generating
        is_expecting = engine in state.destinations and state.withdrawing
        ranks = state.stream.engines[engine]
        if state.released[engine] or state.unfinished[engine] or engine in state.withdrawing or is_expecting:
            return []
        if ranks[0] not in self._joined:
            return []
        state.released[engine] = True
        state.unreleased -= 1
        for rank in ranks:
            self._teams.end_generation(rank)
        return [Release(engine)]

    def _scores(self) -> Iterator[Score]:
        while (team := self._next_team()) is not None:
            yield self._order(team)

    def _next_team(self) -> Team | None:
        teams = [
            best
            for call, state in enumerate(self._scoring.values())
            if state.ready and (best := self._teams.best(call)) is not None
            if state.ready.has(self._wanted(state)) or (not best[0] and self._is_short(state))
        ]
        return min(teams)[2:] if teams else None

    def _is_short(self, state: _Scoring) -> bool:
        """True if the ready samples of a call and those to come have too few tokens for a full forward, so that an idle
        team should not wait. False if samples are scored in fixed groups."""
        ready = state.ready
        to_come = (ready.total - ready.seen) * ready.tokens_seen / ready.seen
        return not ready.is_grouped and ready.tokens + to_come < self._wanted(state)

    def _wanted(self, state: _Scoring) -> float:
        """Tokens of a call's next forward."""
        ready, scoring, call = state.ready, state.stream, self._calls.index(state.stream.name)
        wanted = ready.tokens_seen / ready.seen * ready.total / (SHARES * len(scoring.teams))
        if ready.is_last:
            # Divide the last samples among all free teams, but not more to each than if the teams that are busy now
            # took part too: they will be free soon.
            wanted = min(wanted, ready.tokens / max(1, self._teams.count(call)))
            wanted = max(wanted, ready.tokens / max(1, self._teams.scoring(call)))
        return min(scoring.budget * len(scoring.teams[0]), wanted)

    def _order(self, team: Team) -> Score:
        state = self._scoring[self._calls[team[0]]]
        taken = state.ready.take(self._wanted(state))
        positions = balance([tokens for _, tokens in taken], len(state.stream.teams[team[1]]))
        if not state.ready.is_grouped:
            positions = [self._fitting(state, taken, part) for part in positions]
        parts = tuple(tuple(sorted(taken[position][0] for position in part)) for part in positions)
        order = Score(self._number, state.stream.name, team[1], parts)
        self._number += 1
        self._open[order.number] = order
        self._teams.give(team)
        return order

    def _fitting(self, state: _Scoring, taken: Sequence[tuple[int, int]], part: Sequence[int]) -> list[int]:
        """A replica's part of a forward, reduced to its budget: its shortest samples wait for the next forward.
        Otherwise all replicas, which run in step, would run a second micro-batch for a few samples."""
        longest_first = sorted(part, key=lambda position: (-taken[position][1], taken[position][0]))
        excess = sum(taken[position][1] for position in part) - state.stream.budget
        while excess > 0 and len(longest_first) > 1:
            index, tokens = taken[longest_first.pop()]
            state.ready.put_back(index, tokens)
            excess -= tokens
        return longest_first


def _groups(stream: Stream, scoring: StreamedScoring) -> list[range]:
    """Groups of samples that are scored together in a deterministic plan: neighbours in the batch, as many as fit into
    one forward whatever their lengths, and few enough for `SHARES` forwards per team."""
    n, replicas = len(stream.prompts), len(scoring.teams[0])
    longest = max(stream.prompts, default=0) + stream.limit
    share = -(-n // (SHARES * len(scoring.teams) * replicas))
    size = max(1, min(share, scoring.budget // max(1, longest))) * replicas
    return [range(first, min(first + size, n)) for first in range(0, n, size)]
