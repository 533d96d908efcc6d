"""`Dispatcher`: decides which samples are scored where and when while others are being generated, and which unfinished
samples move to other engines.

A state machine without clock and communication: it is told what has happened and answers with orders. The runtime tells
it what ranks report, the simulation what it expects, so both make the same decisions. All ranks run their orders in the
order in which they were given. Two forwards with collectives therefore never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...plan.batching import balance
from ...plan.streams import Migration
from .scoring_state import FreeTeams, ReadySamples, Team
from .stream import Stream, StreamedGeneration, StreamedScoring


DEPTH = 2  # forwards that a rank is given at a time, so that the next one is there when it ends one
SHARES = 4  # forwards of each team and call, if all had the same number of tokens and the budget allowed it


@dataclass(frozen=True)
class Score:
    """Run one forward of a scoring call.

    Args:
        number: of the order, from 0.
        parts: the samples of each replica of the team, ascending; some may be empty.
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
    """The state of the generation."""

    stream: StreamedGeneration
    unfinished: list[set[int]]
    left: int  # samples of `unfinished`
    released: list[bool]
    withdrawing: set[int] = field(default_factory=set)  # engines that have not answered yet
    destinations: list[int] = field(default_factory=list)  # engines that migrated samples go to
    has_migrated: bool = False
    unreleased: int = 0  # engines


@dataclass
class _Scoring:
    """The state of a call that scores."""

    stream: StreamedScoring
    missing: list[int]  # of each sample: producers whose outputs are not there
    ready: ReadySamples


class Dispatcher:
    """Each method that reports an event returns the orders that follow from it.

    Args:
        stream: the calls and samples.
        migration: when unfinished samples move.
        deterministic: score the same samples together whenever they were finished.
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
        self._engines_of: dict[int, list[int]] = {}  # first rank -> its engines
        for engine, ranks in enumerate(engines.engines):
            self._engines_of.setdefault(ranks[0], []).append(engine)
        self._scoring = {
            s.name: _Scoring(s, [len(s.producers)] * n, ReadySamples(n, _groups(stream, s) if deterministic else ()))
            for s in stream.scorings
        }
        self._calls = list(self._scoring)
        self._teams = FreeTeams(stream, DEPTH)
        self._responses: dict[int, int] = {}  # sample -> tokens
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
        """A rank has begun its part: its engine runs, and its parameters are there."""
        self._joined.add(rank)
        self._teams.join(rank)
        orders: list[Order] = []
        for engine in self._engines_of.get(rank, ()):
            orders += self._release(engine)
        return [*orders, *self._scores()]

    def finish(self, engine: int, samples: Sequence[tuple[int, int]]) -> list[Order]:
        """Samples have been generated.

        Args:
            samples: (index, tokens of the response) of each.
        """
        state = self._generating
        for index, tokens in samples:
            state.unfinished[engine].remove(index)
            self._responses[index] = tokens
        state.left -= len(samples)
        self._produced(state.stream.name, [index for index, _ in samples])
        return [*self._migrate(), *self._release(engine), *self._scores()]

    def withdraw(self, engine: int, samples: Sequence[int]) -> list[Order]:
        """An engine has answered `Withdraw` with the samples that it stopped. Its others go on."""
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
        """All ranks of a team have run the forward of this number."""
        order = self._open.pop(number)
        self._teams.end((self._calls.index(order.call), order.team))
        self._produced(order.call, [index for part in order.parts for index in part])
        return list(self._scores())

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _produced(self, call: str, samples: Sequence[int]) -> None:
        """A call has made its outputs for these samples."""
        for state in self._scoring.values():
            if call not in state.stream.producers:
                continue
            for index in samples:
                state.missing[index] -= 1
                if not state.missing[index]:
                    response = self._responses[index]
                    state.ready.add(index, self.stream.prompts[index] + response)

    def _migrate(self) -> list[Order]:
        """Withdraw the samples of all but the fullest engines, once, when few samples are unfinished."""
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
        """Forwards for the ranks that are free."""
        while (team := self._next_team()) is not None:
            yield self._order(team)

    def _next_team(self) -> Team | None:
        """The team that runs a forward next; `None` if none can."""
        teams = [
            best
            for call, state in enumerate(self._scoring.values())
            if state.ready and (best := self._teams.best(call)) is not None
            if state.ready.has(self._wanted(state)) or (not best[0] and self._is_short(state))
        ]
        return min(teams)[2:] if teams else None

    def _is_short(self, state: _Scoring) -> bool:
        """True if the ready samples of a call and the expected tokens of those to come are too few for a full forward.
        An idle team should not wait for the samples to come. False if samples are scored in fixed groups."""
        ready = state.ready
        to_come = (ready.total - ready.seen) * ready.tokens_seen / ready.seen
        return not ready.is_grouped and ready.tokens + to_come < self._wanted(state)

    def _wanted(self, state: _Scoring) -> float:
        """Tokens of a call's next forward."""
        ready, scoring, call = state.ready, state.stream, self._calls.index(state.stream.name)
        wanted = ready.tokens_seen / ready.seen * ready.total / (SHARES * len(scoring.teams))
        if ready.is_last:
            # the last samples, for all teams that are free; but the only free one does not get what those that are
            # busy now can take soon
            wanted = min(wanted, ready.tokens / max(1, self._teams.count(call)))
            wanted = max(wanted, ready.tokens / max(1, self._teams.scoring(call)))
        return min(scoring.budget * len(scoring.teams[0]), wanted)

    def _order(self, team: Team) -> Score:
        state = self._scoring[self._calls[team[0]]]
        taken = state.ready.take(self._wanted(state))
        positions = balance([tokens for _, tokens in taken], len(state.stream.teams[team[1]]))
        if not state.ready.is_grouped:
            positions = [self._fitting(state, taken, part) for part in positions]
        parts = tuple(tuple(sorted(taken[at][0] for at in part)) for part in positions)
        order = Score(self._number, state.stream.name, team[1], parts)
        self._number += 1
        self._open[order.number] = order
        self._teams.give(team)
        return order

    def _fitting(self, state: _Scoring, taken: Sequence[tuple[int, int]], part: Sequence[int]) -> list[int]:
        """A replica's part of a forward without its shortest samples, as many as exceed the budget; they wait for the
        next one. For a few of them all replicas, which run in step, would run a second micro-batch."""
        longest_first = sorted(part, key=lambda at: (-taken[at][1], taken[at][0]))
        excess = sum(taken[at][1] for at in part) - state.stream.budget
        while excess > 0 and len(longest_first) > 1:
            index, tokens = taken[longest_first.pop()]
            state.ready.put_back(index, tokens)
            excess -= tokens
        return longest_first


def _groups(stream: Stream, scoring: StreamedScoring) -> list[range]:
    """The samples that are scored together in a deterministic plan: neighbours in the batch, as many as fit into one
    forward of each replica whatever their lengths are, and no more than make `SHARES` forwards for each team."""
    n, replicas = len(stream.prompts), len(scoring.teams[0])
    longest = max(stream.prompts, default=0) + stream.limit
    share = -(-n // (SHARES * len(scoring.teams) * replicas))
    size = max(1, min(share, scoring.budget // max(1, longest))) * replicas
    return [range(first, min(first + size, n)) for first in range(0, n, size)]
