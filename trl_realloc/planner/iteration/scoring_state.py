"""The state of `stream_dispatcher`: `FreeTeams`, the teams of ranks that could run a forward now, and `ReadySamples`,
the samples that a scoring call could score now.

A team is a group of ranks that run a forward together (`stream.StreamedScoring`). A change of a rank takes time
proportional to the number of its teams, so that thousands of ranks can be served.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Sequence

from .stream import Stream


Team = tuple[int, int]  # number of the scoring call in the stream, and of the team


class FreeTeams:
    """The teams of a stream's scoring calls.

    Args:
        depth: largest number of forwards in a rank's queue.
    """

    def __init__(self, stream: Stream, depth: int) -> None:
        self._depth = depth
        self.ranks: dict[Team, list[int]] = {
            (call, number): [rank for replica in team for rank in replica]
            for call, scoring in enumerate(stream.scorings)
            for number, team in enumerate(scoring.teams)
        }
        self._teams_of: dict[int, list[Team]] = defaultdict(list)
        for team, ranks in self.ranks.items():
            for rank in ranks:
                self._teams_of[rank].append(team)
        self._joined: set[int] = set()
        self._generating = {rank for engine in stream.generation.engines for rank in engine}
        self._load = Counter[int]()
        self._latest: dict[int, int] = {}  # rank -> call of its latest forward
        self._unfree = {team: len(ranks) for team, ranks in self.ranks.items()}  # ranks that are not free
        self._absent = dict(self._unfree)  # ranks that have not joined, or whose engine generates
        self._loaded = dict.fromkeys(self.ranks, 0)  # ranks that have a forward
        # free teams of each call, by (has a forward, latest forward was of another call)
        self._free: list[dict[tuple[bool, bool], set[int]]] = [defaultdict(set) for _ in stream.scorings]
        self._scoring = Counter[int]()  # call -> number of teams without an absent rank
        self._present: set[int] = set()  # ranks that are not absent

    def join(self, rank: int) -> None:
        """A rank has begun its part of the phase."""
        before = self._state(rank)
        self._joined.add(rank)
        self._changed(rank, before)

    def end_generation(self, rank: int) -> None:
        """A rank's engine has ended."""
        before = self._state(rank)
        self._generating.discard(rank)
        self._changed(rank, before)

    def give(self, team: Team) -> None:
        """A forward has been assigned to a team."""
        for rank in self.ranks[team]:
            before = self._state(rank)
            self._load[rank] += 1
            self._latest[rank] = team[0]
            self._changed(rank, before)

    def end(self, team: Team) -> None:
        """A team has run a forward."""
        for rank in self.ranks[team]:
            before = self._state(rank)
            self._load[rank] -= 1
            self._changed(rank, before)

    def count(self, call: int) -> int:
        """The number of teams that could run a forward of a call now."""
        return sum(map(len, self._free[call].values()))

    def scoring(self, call: int) -> int:
        """The number of teams of a call whose ranks all score, whether they are free now or will be."""
        return self._scoring[call]

    def best(self, call: int) -> tuple[bool, bool, int, int] | None:
        """The team of a call that should run its next forward: preferably an idle one, and one that ran the same call
        last, so that its parameters stay on the device.

        Returns:
            (has a forward, ran another call last, call, number of the team), or `None` if no team is free. Of several
            calls, the smallest tuple is the best.
        """
        for key in ((False, False), (False, True), (True, False), (True, True)):
            if self._free[call][key]:
                return (*key, call, min(self._free[call][key]))
        return None

    def _is_present(self, rank: int) -> bool:
        return rank in self._joined and rank not in self._generating

    def _state(self, rank: int) -> tuple[bool, bool]:
        """(free, has a forward)."""
        return self._is_present(rank) and self._load[rank] < self._depth, self._load[rank] > 0

    def _changed(self, rank: int, before: tuple[bool, bool]) -> None:
        was_free, was_loaded = before
        is_free, is_loaded = self._state(rank)
        becomes_present = rank not in self._present and self._is_present(rank)
        if becomes_present:
            self._present.add(rank)
        for team in self._teams_of[rank]:
            call, number = team
            if becomes_present:
                self._absent[team] -= 1
                self._scoring[call] += not self._absent[team]
            for teams in self._free[call].values():
                teams.discard(number)
            self._unfree[team] += was_free - is_free
            self._loaded[team] += is_loaded - was_loaded
            if not self._unfree[team]:
                key = self._loaded[team] > 0, self._latest.get(self.ranks[team][0]) != call
                self._free[call][key].add(number)


class ReadySamples:
    """The samples of one call whose inputs have arrived. Each method takes time logarithmic in their number, or
    proportional to the samples that it returns.

    Args:
        total: number of samples of the batch.
        groups: fixed groups of samples that are scored together; empty if any samples may be scored together.

    Attributes:
        tokens: number of tokens of the samples that are ready now.
        seen, tokens_seen: number of samples that have become ready so far, and of their tokens.
    """

    def __init__(self, total: int, groups: Sequence[range] = ()) -> None:
        self.total = total
        self.tokens = self.seen = self.tokens_seen = 0
        self._ordered: list[tuple[int, int]] = []  # (tokens, index), ascending
        self._groups = list(groups)
        self._missing = [len(group) for group in groups]
        self._complete: list[int] = []  # a heap of the numbers of groups whose samples are all ready

    def __len__(self) -> int:
        return len(self._ordered)

    @property
    def is_grouped(self) -> bool:
        """True if the samples are scored in fixed groups."""
        return bool(self._groups)

    @property
    def is_last(self) -> bool:
        """True if no more samples will become ready."""
        return self.seen == self.total

    def add(self, index: int, tokens: int) -> None:
        """A sample has become ready."""
        insort(self._ordered, (tokens, index))
        self.seen += 1
        self.tokens += tokens
        self.tokens_seen += tokens
        if self._groups:
            number = index // len(self._groups[0])
            self._missing[number] -= 1
            if not self._missing[number]:
                heapq.heappush(self._complete, number)

    def put_back(self, index: int, tokens: int) -> None:
        """A sample that was taken waits for another forward."""
        insort(self._ordered, (tokens, index))
        self.tokens += tokens

    def has(self, tokens: float) -> bool:
        """True if samples with at least `tokens` tokens in total are ready, or if any sample is ready and no more will
        become so. With fixed groups, true if a group is complete."""
        if self._groups:
            return bool(self._complete)
        return bool(self._ordered) and (self.is_last or self.tokens >= tokens)

    def take(self, tokens: float) -> list[tuple[int, int]]:
        """Remove the samples of a forward of at most `tokens` tokens: the longest ones first, and at least one. With
        fixed groups, the first complete group, whatever its size.

        Returns:
            (index, tokens) of each sample.
        """
        taken: list[tuple[int, int]] = []
        if self._groups:
            group = self._groups[heapq.heappop(self._complete)]
            taken = [(index, tokens) for tokens, index in self._ordered if index in group]
            self._ordered = [item for item in self._ordered if item[1] not in group]
        else:
            end, room = len(self._ordered), tokens
            while end:
                length, index = self._ordered.pop(end - 1)
                taken.append((index, length))
                room -= length
                end = bisect_right(self._ordered, (room, self.total))  # behind the longest sample that fits
        self.tokens -= sum(length for _, length in taken)
        return taken
