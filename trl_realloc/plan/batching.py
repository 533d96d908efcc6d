"""Divides samples among data-parallel replicas by their work, and into micro-batches of a token budget, if need be with
their common prefixes (`PrefixTree`), each of which is computed once. Orders micro-batches on the stages of a pipeline.

`engines.training.packed_row` lays samples with common prefixes out.
"""

from __future__ import annotations

import bisect
import heapq
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
        """Work of each part of the samples (`work`), if each part computes a common prefix once.

        Args:
            parts: lists of positions; no position is in two of them.
            attention_at: the argument of `work`.
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


def _common_bytes(left: bytes, right: bytes) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def work(lengths: Sequence[int], attention_at: float) -> list[float]:
    """Work of each sample, in units of a token of a short sample: the length, plus a quadratic term for attention.

    Args:
        lengths: number of tokens of each sample.
        attention_at: the length at which attention takes as long as the rest of the model (`ModelSpec.attention_at`);
            infinity for the lengths alone.
    """
    return [_work(length, attention_at) for length in lengths]


def _work(tokens: int, attention_at: float) -> float:
    return tokens + tokens * tokens / attention_at


def balance(sizes: Sequence[float], parts: int) -> list[list[int]]:
    """Divide samples among `parts` ranks so that the sums of their sizes are as even as possible.

    The largest sample comes first, and each goes to the rank with the smallest sum (Graham's LPT rule: the largest sum
    is at most 4/3 of the optimum). Deterministic, so that every rank of a mesh computes the same division. Within a
    part the samples keep their order.

    Args:
        sizes: size of each sample, such as its tokens or its `work`.

    Returns:
        `parts` lists of positions. Every position of `range(len(sizes))` is in one of them; some may be empty.
    """
    heap: list[tuple[float, int, int]] = [(0, 0, part) for part in range(parts)]
    positions: list[list[int]] = [[] for _ in range(parts)]
    for position in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size, count, part = heapq.heappop(heap)
        positions[part].append(position)
        heapq.heappush(heap, (size + sizes[position], count + 1, part))
    return [sorted(part_positions) for part_positions in positions]


def balance_shared(tree: PrefixTree, parts: int, attention_at: float = math.inf) -> list[list[int]]:
    """Divide samples with common prefixes among `parts` ranks, each of which computes a common prefix once. Samples
    with long common prefixes stay together if this reduces the largest work of a rank. The result is that of `balance`.

    Args:
        attention_at: the argument of `work`.
    """
    divisions = [balance(work(tree.lengths, attention_at), parts)]
    (together,) = tree.work_of([range(len(tree.lengths))], attention_at)
    for largest in (together / (parts * pieces) for pieces in (1, 2, 4)):
        groups = tree.branches(largest, attention_at)
        dealt = balance([size for size, _ in groups], parts)
        divisions.append([sorted(i for index in part for i in groups[index][1]) for part in dealt])
    return min(divisions, key=lambda division: max(tree.work_of(division, attention_at)))


def stage_batches(lengths: Sequence[int], budget: int, stages: int, tree: PrefixTree | None = None) -> list[list[int]]:
    """Divide samples into the micro-batches of a pipeline: as few as the budget allows but at least one per stage if
    there are enough samples, with tokens as even as possible, because each takes as long as the widest one.

    Args:
        lengths: number of tokens of each sample.
        budget: maximum tokens of a micro-batch. A longer sample has a separate micro-batch.
        tree: prefix tree of samples with common prefixes. Samples with long common prefixes stay together if this
            reduces the pipeline's time: (micro-batches + stages - 1) times the widest micro-batch.

    Returns:
        Lists of positions; none is empty.
    """
    if tree is not None:
        return _shared_stage_batches(tree, budget, stages)
    widest, count = max(budget, *lengths) if lengths else budget, max(stages, -(-sum(lengths) // budget))
    while True:
        batches = [batch for batch in balance(lengths, min(count, len(lengths))) if batch]
        if count >= len(lengths) or all(sum(lengths[position] for position in batch) <= widest for batch in batches):
            return batches
        count += 1


def _shared_stage_batches(tree: PrefixTree, budget: int, stages: int) -> list[list[int]]:
    best, least = list[list[int]](), math.inf
    fewest, longest = -(-tree.tokens // budget), max(tree.lengths)
    for count in range(fewest, min(len(tree.lengths), fewest + 2 * stages) + 1):
        groups = tree.branches(max(longest, min(budget, -(-tree.tokens // count))))
        parts = [part for part in balance([tokens for tokens, _ in groups], count) if part]
        widest = max(sum(groups[index][0] for index in part) for part in parts)
        seconds = (len(parts) + stages - 1) * widest
        if widest <= max(budget, longest) and seconds < least:
            best, least = [sorted(i for index in part for i in groups[index][1]) for part in parts], seconds
    return best or micro_batches(tree.lengths, budget, tree)


def one_f_one_b(micro_batches: int, stages: int, stage: int) -> list[tuple[int, bool]]:
    """1F1B: the tasks of a pipeline stage in order, as (micro-batch, is_backward). At most `stages - stage`
    micro-batches are between their forward and their backward."""
    warm = min(micro_batches, stages - stage)
    order = [(micro_batch, False) for micro_batch in range(warm)]
    for micro_batch in range(micro_batches):
        order.append((micro_batch, True))
        if warm + micro_batch < micro_batches:
            order.append((warm + micro_batch, False))
    return order


def micro_batches(lengths: Sequence[int], budget: int, tree: PrefixTree | None = None) -> list[list[int]]:
    """Pack samples into micro-batches of at most `budget` tokens. A longer sample has a separate micro-batch.

    First fit with the longest sample first: samples of similar length are together, so an engine that pads adds little
    padding.

    Args:
        lengths: number of tokens of each sample.
        tree: prefix tree of samples with common prefixes. Samples with long common prefixes are packed together, and a
            common prefix counts once.

    Returns:
        Lists of positions; none is empty.
    """
    if tree is not None:
        groups = tree.branches(budget)
        packed = micro_batches([int(tokens) for tokens, _ in groups], budget)
        return [[member for group in batch for member in groups[group][1]] for batch in packed]
    batches: list[list[int]] = []
    room: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for batch, free in enumerate(room):
            if lengths[position] <= free:
                batches[batch].append(position)
                room[batch] -= lengths[position]
                break
        else:
            batches.append([position])
            room.append(budget - lengths[position])
    return batches
