"""Divides samples by their tokens: among data-parallel replicas, and into micro-batches of a token budget."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Divide samples among `parts` ranks so that their token counts are as even as possible.

    The longest sample comes first, and each goes to the rank with the fewest tokens (Graham's LPT rule: the fullest
    rank has at most 4/3 of the optimum). Deterministic, so that every rank of a mesh computes the same division. Within
    a part the samples keep their order.

    Args:
        lengths: tokens of each sample.

    Returns:
        `parts` lists of positions. Every position of `range(len(lengths))` is in one of them; some may be empty.
    """
    heap = [(0, 0, part) for part in range(parts)]
    positions: list[list[int]] = [[] for _ in range(parts)]
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, count, part = heapq.heappop(heap)
        positions[part].append(position)
        heapq.heappush(heap, (tokens + lengths[position], count + 1, part))
    return [sorted(part_positions) for part_positions in positions]


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack samples into micro-batches of at most `budget` tokens. A longer sample has a micro-batch to itself.

    First fit with the longest sample first: samples of similar length are together, so an engine that pads adds little
    padding.

    Args:
        lengths: tokens of each sample.

    Returns:
        Lists of positions; none is empty.
    """
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
