"""`PrefixTree`: samples with the tokens that they have in common at their beginnings, of which one copy is computed.

How a row of such samples is computed is in `engines.training.packed_row`. How they are divided is in `batching`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


# A shorter common beginning is computed for each sample: a branch costs some calls in every layer.
MIN_SHARED = 16


@dataclass(frozen=True)
class PrefixTree:
    """A trie over the tokens of samples, as a list of its leaves from the left to the right. The longest beginning that
    a sample has in common with any sample to its left is the one that it has in common with the nearest.

    Args:
        lengths: tokens of each sample.
        order: the positions of the samples in the order of the leaves.
        shared: of each sample in `order`, how many of its first tokens the one before it has too; 0 of the first.
    """

    lengths: tuple[int, ...]
    order: tuple[int, ...]
    shared: tuple[int, ...]

    @staticmethod
    def of(keys: Sequence[bytes], prompts: Sequence[int], width: int, least: int = MIN_SHARED) -> PrefixTree:
        """The tree of samples. They branch at the end of a prompt, or where other samples branch, unless at least
        `least` more tokens are in common.

        Args:
            keys: the tokens of each sample, `width` bytes each.
            prompts: tokens of each prompt.
        """
        order = sorted(range(len(keys)), key=keys.__getitem__)
        shared, branches = [0] * min(1, len(keys)), [0]
        for before, at in pairwise(order):
            common = _common_bytes(keys[before], keys[at]) // width
            branches = [end for end in branches if end <= common]
            ends = [*branches, *(prompts[one] for one in (before, at) if prompts[one] <= common)]
            end = max(ends)
            if common - end >= least:
                end = common
            shared.append(end if end >= least else 0)
            branches = sorted({*branches, shared[-1]})
        return PrefixTree(tuple(len(key) // width for key in keys), tuple(order), tuple(shared))

    @cached_property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return sum(self.lengths) - sum(self.shared)

    def select(self, positions: Sequence[int]) -> PrefixTree:
        """The tree of some of the samples, by their new positions."""
        new = {old: at for at, old in enumerate(positions)}
        order, shared, common = list[int](), list[int](), 0
        for at, first in zip(self.order, self.shared, strict=True):
            common = min(common, first)
            if at in new:
                order.append(new[at])
                shared.append(common)
                common = self.lengths[at]
        return PrefixTree(tuple(self.lengths[at] for at in positions), tuple(order), tuple(shared))

    def work_of(self, parts: Sequence[Sequence[int]], attention_at: float = math.inf) -> list[float]:
        """Work of each part of the samples, in tokens of a short one, if each part computes what its samples share
        once.

        Args:
            parts: lists of positions; no position is in two of them.
            attention_at: as of `batching.work`.
        """
        part_of = {at: number for number, part in enumerate(parts) for at in part}
        works, latest = [0.0] * len(parts), dict[int, int]()  # the latest leaf of each part
        # leaves with ascending numbers of shared tokens, of which the last one has the fewest of all from there on
        leaves, fewest = list[int](), list[int]()
        for leaf, (at, shared) in enumerate(zip(self.order, self.shared, strict=True)):
            while fewest and fewest[-1] >= shared:
                leaves.pop()
                fewest.pop()
            leaves.append(leaf)
            fewest.append(shared)
            if (part := part_of.get(at)) is not None:
                again = fewest[bisect.bisect_right(leaves, latest[part])] if part in latest else 0
                works[part] += _work(self.lengths[at], attention_at) - _work(again, attention_at)
                latest[part] = leaf
        return works

    def branches(self, most: float, attention_at: float = math.inf) -> list[tuple[float, list[int]]]:
        """The samples in groups that have much in common, of at most `most` work. A sample of more has a group to
        itself.

        Returns:
            The work and the positions of each group, in the order of the leaves.
        """
        size = [_work(self.lengths[at], attention_at) for at in self.order]  # of each group, at its first leaf
        first, last = list(range(len(size))), list(range(len(size)))  # of the group of a leaf, at the group's ends
        for leaf in sorted(range(1, len(size)), key=lambda leaf: -self.shared[leaf]):
            begin, end = first[leaf - 1], last[leaf]
            joined = size[begin] + size[leaf] - _work(self.shared[leaf], attention_at)
            if self.shared[leaf] and joined <= most:
                size[begin], last[begin], first[end] = joined, end, begin
        groups, begin = list[tuple[float, list[int]]](), 0
        while begin < len(size):
            groups.append((size[begin], list(self.order[begin : last[begin] + 1])))
            begin = last[begin] + 1
        return groups


def _work(tokens: int, attention_at: float) -> float:
    return tokens + tokens * tokens / attention_at


def _common_bytes(one: bytes, other: bytes) -> int:
    """The length of the longest common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
