"""`ReadySamples`: the samples that one scoring call could score now, and which of them make up its next forward.

When a forward is ordered, and for whom, is decided in `dispatcher`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Sequence


class ReadySamples:
    """The samples of one call whose inputs are there. Each method takes time logarithmic in their number, or
    proportional to the samples that it returns.

    Args:
        total: samples of the batch.
        groups: the samples that are always scored together; empty if any may be.

    Attributes:
        tokens: of the samples that are ready now.
        seen, tokens_seen: samples that have been ready until now, and their tokens.
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
        """True if samples of at least `tokens` tokens in total are ready, or any sample if no more will become ready.
        With fixed groups, true if a group is complete."""
        if self._groups:
            return bool(self._complete)
        return bool(self._ordered) and (self.is_last or self.tokens >= tokens)

    def take(self, tokens: float) -> list[tuple[int, int]]:
        """Remove the samples of a forward of at most so many tokens: the longest ones first, and one at least. Of
        samples that are always scored together: the first group that is complete, whatever its tokens.

        Returns:
            (index, tokens) of each.
        """
        taken: list[tuple[int, int]] = []
        if self._groups:
            group = self._groups[heapq.heappop(self._complete)]
            taken = [(index, tokens) for tokens, index in self._ordered if index in group]
            self._ordered = [item for item in self._ordered if item[1] not in group]
        else:
            at, room = len(self._ordered), tokens
            while at:
                length, index = self._ordered.pop(at - 1)
                taken.append((index, length))
                room -= length
                at = bisect_right(self._ordered, (room, self.total))  # the longest sample that there is room for
        self.tokens -= sum(length for _, length in taken)
        return taken
