"""`Dispatcher`: decides which samples are scored where and when while others are being generated, and which unfinished
samples move to other engines.

A state machine without clock and communication: it is told what has happened and answers with orders. The runtime tells
it what ranks report, the simulation what it expects, so both make the same decisions. All ranks run their orders in the
order in which they were given. Two forwards with collectives therefore never wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..plan.batching import balance
from ..plan.streams import Migration
from .stream import Stream, StreamedGeneration, StreamedScoring


DEPTH = 2  # forwards that a rank is given at a time, so that the next one is there when it ends one
SHARES = (
    4  # forwards that each team would run of a call, if all had the same number of tokens and the budget allowed it
)


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

    call: str
    engine: int


@dataclass(frozen=True)
class Continue:
    """Go on generating samples that another engine has begun."""

    call: str
    engine: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Release:
    """An engine gets no more samples of this call, and its ranks may score."""

    call: str
    engine: int


Order = Score | Withdraw | Continue | Release


@dataclass
class _Generating:
    """The state of a call that generates."""

    stream: StreamedGeneration
    unfinished: list[set[int]]
    released: list[bool]
    withdrawing: set[int] = field(default_factory=set)  # engines that have not answered yet
    destinations: list[int] = field(default_factory=list)  # engines that migrated samples go to
    has_migrated: bool = False

    @property
    def left(self) -> int:
        return sum(map(len, self.unfinished))


@dataclass
class _Scoring:
    """The state of a call that scores."""

    stream: StreamedScoring
    missing: list[int]  # of each sample: producers whose outputs are not there
    ready: set[int] = field(default_factory=set)
    tokens_ready: int = 0
    seen: int = 0  # samples that have been ready
    tokens_seen: int = 0


class Dispatcher:
    """Each method that reports an event returns the orders that follow from it.

    Args:
        stream: the calls and samples.
        migration: when unfinished samples move.
        deterministic: score the same samples together whenever they were finished.
    """

    def __init__(self, stream: Stream, migration: Migration | None = None, *, deterministic: bool = False) -> None:
        self.stream, self.migration = stream, migration
        n = len(stream.prompts)
        self._generating = {
            g.name: _Generating(g, [set(samples) for samples in g.samples], [False] * len(g.engines))
            for g in stream.generations
        }
        self._scoring = {s.name: _Scoring(s, [len(s.producers)] * n) for s in stream.scorings}
        self._responses: dict[tuple[str, int], int] = {}  # (call that generates, sample) -> tokens
        self._joined: set[int] = set()
        self._busy = Counter(rank for g in stream.generations for engine in g.engines for rank in engine)
        self._load = Counter[int]()  # forwards that a rank has been given and has not ended
        self._latest: dict[int, str] = {}  # rank -> call of its latest forward
        self._open: dict[int, Score] = {}
        self._number = 0
        self._groups = {s.name: _groups(stream, s) if deterministic else [] for s in stream.scorings}

    @property
    def is_finished(self) -> bool:
        """Whether every sample has been generated and scored by every call, and every engine released."""
        generated = all(all(state.released) for state in self._generating.values())
        scored = all(s.seen == len(s.missing) and not s.ready for s in self._scoring.values())
        return generated and scored and not self._open

    # --- events ------------------------------------------------------------------------------------------------------

    def join(self, rank: int) -> list[Order]:
        """A rank has begun its part: its engine runs, and its parameters are there."""
        self._joined.add(rank)
        orders: list[Order] = []
        for state in self._generating.values():
            for engine, ranks in enumerate(state.stream.engines):
                if ranks[0] == rank:
                    orders += self._release(state, engine)
        return orders + self._scores()

    def finish(self, call: str, engine: int, samples: Sequence[tuple[int, int]]) -> list[Order]:
        """Samples have been generated.

        Args:
            samples: (index, tokens of the response) of each.
        """
        state = self._generating[call]
        for index, tokens in samples:
            state.unfinished[engine].remove(index)
            self._responses[call, index] = tokens
        self._produced(call, [index for index, _ in samples])
        return [*self._migrate(state), *self._release(state, engine), *self._scores()]

    def withdraw(self, call: str, engine: int, samples: Sequence[int]) -> list[Order]:
        """An engine has answered `Withdraw` with the samples that it stopped. Its others go on."""
        state = self._generating[call]
        state.withdrawing.remove(engine)
        state.unfinished[engine].difference_update(samples)
        moved: dict[int, list[int]] = {}
        for index in samples:
            destination = min(state.destinations, key=lambda other: (len(state.unfinished[other]), other))
            state.unfinished[destination].add(index)
            moved.setdefault(destination, []).append(index)
        orders: list[Order] = [Continue(call, destination, tuple(moved[destination])) for destination in sorted(moved)]
        for other in (engine, *state.destinations):
            orders += self._release(state, other)
        return orders + self._scores()

    def scored(self, number: int) -> list[Order]:
        """All ranks of a team have run the forward of this number."""
        order = self._open.pop(number)
        for rank in _ranks(self._scoring[order.call].stream.teams[order.team]):
            self._load[rank] -= 1
        self._produced(order.call, [index for part in order.parts for index in part])
        return self._scores()

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _produced(self, call: str, samples: Sequence[int]) -> None:
        """A call has made its outputs for these samples."""
        for state in self._scoring.values():
            if call not in state.stream.producers:
                continue
            for index in samples:
                state.missing[index] -= 1
                if not state.missing[index]:
                    state.ready.add(index)
                    state.seen += 1
                    state.tokens_seen += self._tokens(state, index)
                    state.tokens_ready += self._tokens(state, index)

    def _tokens(self, state: _Scoring, index: int) -> int:
        return self.stream.prompts[index] + self._responses[state.stream.generation, index]

    def _migrate(self, state: _Generating) -> list[Order]:
        """Withdraw the samples of all but the fullest engines, once, when few samples are unfinished."""
        migration, left = self.migration, state.left
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
        return [Withdraw(state.stream.name, engine) for engine in sorted(state.withdrawing)]

    def _release(self, state: _Generating, engine: int) -> list[Order]:
        is_expecting = engine in state.destinations and state.withdrawing
        ranks = state.stream.engines[engine]
        if state.released[engine] or state.unfinished[engine] or engine in state.withdrawing or is_expecting:
            return []
        if ranks[0] not in self._joined:
            return []
        state.released[engine] = True
        self._busy.subtract(ranks)
        return [Release(state.stream.name, engine)]

    def _scores(self) -> list[Order]:
        """Forwards for the ranks that are free."""
        orders: list[Order] = []
        while (order := self._next_score()) is not None:
            orders.append(order)
        return orders

    def _next_score(self) -> Score | None:
        """A forward for the team with the least to do, of the call that it ran last if that has samples."""
        teams = [
            (max(self._load[rank] for rank in _ranks(team)), at, number, state)
            for at, state in enumerate(self._scoring.values())
            if state.ready
            for number, team in enumerate(state.stream.teams)
            if all(self._is_free(rank) for rank in _ranks(team))
        ]
        free = Counter(state.stream.name for _, _, _, state in teams)

        def preference(item: tuple[int, int, int, _Scoring]) -> tuple[int, bool, int, int]:
            load, at, number, state = item
            first = state.stream.teams[number][0][0]
            return load, self._latest.get(first) != state.stream.name, at, number

        for _, _, number, state in sorted(teams, key=preference):
            samples = self._samples(state, number, free[state.stream.name])
            if samples:
                return self._order(state, number, samples)
        return None

    def _is_free(self, rank: int) -> bool:
        return rank in self._joined and not self._busy[rank] and self._load[rank] < DEPTH

    def _order(self, state: _Scoring, number: int, samples: Sequence[int]) -> Score:
        team = state.stream.teams[number]
        positions = balance([self._tokens(state, index) for index in samples], len(team))
        parts = tuple(tuple(sorted(samples[at] for at in part)) for part in positions)
        order = Score(self._number, state.stream.name, number, parts)
        self._number += 1
        self._open[order.number] = order
        state.ready.difference_update(samples)
        state.tokens_ready -= sum(self._tokens(state, index) for index in samples)
        for rank in _ranks(team):
            self._load[rank] += 1
            self._latest[rank] = order.call
        return order

    def _samples(self, state: _Scoring, number: int, free: int) -> list[int]:
        """The samples of the next forward of a team; none if it should wait for more.

        Args:
            free: teams that could run the call now.
        """
        if groups := self._groups[state.stream.name]:
            return list(next((group for group in groups if group <= state.ready), ()))
        replicas, n = len(state.stream.teams[number]), len(state.missing)
        share = state.tokens_seen / state.seen * n / (SHARES * len(state.stream.teams))
        wanted = min(float(state.stream.budget * replicas), max(1.0, share))
        if state.seen == n:  # the last samples, for all teams that are free
            wanted = min(wanted, state.tokens_ready / free)
        elif state.tokens_ready < wanted:
            return []
        chosen, tokens = list[int](), 0
        for index in sorted(state.ready, key=lambda index: (-self._tokens(state, index), index)):
            if not chosen or tokens + self._tokens(state, index) <= wanted:
                chosen.append(index)
                tokens += self._tokens(state, index)
        return chosen


def _ranks(team: Sequence[Sequence[int]]) -> list[int]:
    return [rank for replica in team for rank in replica]


def _groups(stream: Stream, scoring: StreamedScoring) -> list[frozenset[int]]:
    """The samples that are scored together in a deterministic plan: neighbours in the batch, as many as fit into one
    forward of each replica whatever their lengths are."""
    longest = max(stream.prompts, default=0) + stream.limit
    size = max(1, scoring.budget // max(1, longest)) * len(scoring.teams[0])
    n = len(stream.prompts)
    return [frozenset(range(first, min(first + size, n))) for first in range(0, n, size)]
