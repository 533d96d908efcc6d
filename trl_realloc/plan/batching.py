"""Divides samples among data-parallel replicas by their work, and into micro-batches of a token budget. Orders
micro-batches on the stages of a pipeline."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from .prefix_tree import PrefixTree


def work(lengths: Sequence[int], attention_at: float) -> list[float]:
    """Work of each sample, in units of a token of a short sample: the length, plus a quadratic term for attention.

    Args:
        lengths: number of tokens of each sample.
        attention_at: the length at which attention takes as long as the rest of the model (`ModelSpec.attention_at`);
            infinity for the lengths alone.
    """
    return [length + length * length / attention_at for length in lengths]


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
