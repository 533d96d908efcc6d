"""`PrefixTree`: samples with their common prefixes, each of which is computed once.

`engines.training.packed_row` computes such samples, `batching` divides them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


# A shorter common prefix is computed for each sample, because a branch costs several calls in every layer.
MIN_SHARED = 16


@dataclass(frozen=True)
class PrefixTree:
    """A trie over the tokens of samples, as a list of its leaves from left to right. A sample's longest common prefix
    with any sample to its left is its common prefix with the nearest one.

    Args:
        lengths: number of tokens of each sample.
        order: the positions of the samples in the order of the leaves.
        shared: length of each sample's common prefix with the previous one in `order`, in tokens; 0 for the first.
    """

    lengths: tuple[int, ...]
    order: tuple[int, ...]
    shared: tuple[int, ...]

    @staticmethod
    def of(keys: Sequence[bytes], prompts: Sequence[int], width: int, least: int = MIN_SHARED) -> PrefixTree:
        """The tree of samples. They branch at the end of a prompt, or where other samples branch, unless they share at
        least `least` more tokens.

        Args:
            keys: the tokens of each sample, `width` bytes per token.
            prompts: number of tokens of each prompt.
        """
        order = sorted(range(len(keys)), key=keys.__getitem__)
        shared, branches = [0] * min(1, len(keys)), [0]
        for before, current in pairwise(order):
            common = _common_bytes(keys[before], keys[current]) // width
            branches = [end for end in branches if end <= common]
            ends = [*branches, *(prompts[position] for position in (before, current) if prompts[position] <= common)]
            end = max(ends)
            if common - end >= least:
                end = common
            shared.append(end if end >= least else 0)
            branches = sorted({*branches, shared[-1]})
        return PrefixTree(tuple(len(key) // width for key in keys), tuple(order), tuple(shared))

    @cached_property
    def tokens(self) -> int:
        """Number of computed tokens."""
        return sum(self.lengths) - sum(self.shared)

    def select(self, positions: Sequence[int]) -> PrefixTree:
        """The tree of some of the samples, by their new positions."""
        new = {old: position for position, old in enumerate(positions)}
        order, shared, common = list[int](), list[int](), 0
        for position, first in zip(self.order, self.shared, strict=True):
            common = min(common, first)
            if position in new:
                order.append(new[position])
                shared.append(common)
                common = self.lengths[position]
        return PrefixTree(tuple(self.lengths[position] for position in positions), tuple(order), tuple(shared))

    def work_of(self, parts: Sequence[Sequence[int]], attention_at: float = math.inf) -> list[float]:
        """Work of each part of the samples (`batching.work`), if each part computes a common prefix once.

        Args:
            parts: lists of positions; no position is in two of them.
            attention_at: the argument of `batching.work`.
        """
        part_of = {position: number for number, part in enumerate(parts) for position in part}
        works, latest = [0.0] * len(parts), dict[int, int]()  # the latest leaf of each part
        # monotonic stack: leaves with ascending numbers of shared tokens
        leaves, fewest = list[int](), list[int]()
        for leaf, (position, shared) in enumerate(zip(self.order, self.shared, strict=True)):
            while fewest and fewest[-1] >= shared:
                leaves.pop()
                fewest.pop()
            leaves.append(leaf)
            fewest.append(shared)
            if (part := part_of.get(position)) is not None:
                again = fewest[bisect.bisect_right(leaves, latest[part])] if part in latest else 0
                works[part] += _work(self.lengths[position], attention_at) - _work(again, attention_at)
                latest[part] = leaf
        return works

    def branches(self, most: float, attention_at: float = math.inf) -> list[tuple[float, list[int]]]:
        """The samples in groups with long common prefixes, of at most `most` work. A larger sample has a separate
        group.

        Returns:
            The work and the positions of each group, in the order of the leaves.
        """
        size = [_work(self.lengths[i], attention_at) for i in self.order]  # work of each group, at its first leaf
        first, last = list(range(len(size))), list(range(len(size)))  # ends of a group, valid at its end leaves
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


def _common_bytes(left: bytes, right: bytes) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
