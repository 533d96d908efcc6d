"""`agree_on_parts`: tells all ranks of a reallocation which rank holds which boxes of the parameters.

Ranks with equal parts, such as replicas, share a description, and ZeRO-3 partitions are described by their number. So a
rank sends and receives three messages. Their size depends on the model and the number of different parts; another rank
adds a few bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ...realloc.layout import Box, flat_boxes
from ..messages import Messages, all_reduce


@dataclass(frozen=True)
class HeldParts:
    """Parts of parameters that one rank holds.

    Args:
        boxes: boxes by parameter name; parameters without boxes may be left out.
        flat_partition: (number, count) if the rank has one of `count` equal ranges of every flattened parameter, as in
            ZeRO-3.
        shapes: shapes of the whole parameters; needed with `flat_partition`.
    """

    boxes: Mapping[str, Sequence[Box]]
    dtypes: Mapping[str, torch.dtype]
    flat_partition: tuple[int, int] | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class _Boxes:
    """Name, dtype and boxes of each parameter."""

    parts: tuple[tuple[str, torch.dtype, tuple[Box, ...]], ...]

    def boxes(self, number: int) -> dict[str, list[Box]]:
        return {name: list(boxes) for name, _, boxes in self.parts}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: dtype for name, dtype, _ in self.parts}


@dataclass(frozen=True)
class _FlatPartitions:
    """Equal ranges of flattened parameters: name, dtype and shape of each, and the number of ranges."""

    parameters: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    count: int

    def boxes(self, number: int) -> dict[str, list[Box]]:
        ranges = {name: _range_boxes(shape, number, self.count) for name, _, shape in self.parameters}
        return {name: boxes for name, boxes in ranges.items() if boxes}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: dtype for name, dtype, _ in self.parameters}


_Description = _Boxes | _FlatPartitions
_Ranks = dict[int, int]  # rank -> number of its partition, 0 where there are none


def _range_boxes(shape: tuple[int, ...], number: int, count: int) -> list[Box]:
    elements = prod(shape)
    size = -(-elements // count)
    start, stop = min(number * size, elements), min((number + 1) * size, elements)
    return list(flat_boxes(shape, start, stop))


def _described(held: HeldParts) -> tuple[_Description, int]:
    """A description, and the number of the rank's partition (0 for `_Boxes`)."""
    boxes = {name: list(parts) for name, parts in held.boxes.items() if parts}
    if held.flat_partition is not None and held.shapes is not None and held.dtypes.keys() <= held.shapes.keys():
        number, count = held.flat_partition
        flat = _FlatPartitions(tuple((name, held.dtypes[name], held.shapes[name]) for name in held.dtypes), count)
        if flat.boxes(number) == boxes:
            return flat, number
    return _Boxes(tuple((name, held.dtypes[name], tuple(parts)) for name, parts in boxes.items())), 0


def _merged(left: dict[_Description, _Ranks], right: dict[_Description, _Ranks]) -> dict[_Description, _Ranks]:
    return {key: {**left.get(key, {}), **right.get(key, {})} for key in (*left, *right)}


def agree_on_parts(
    messages: Messages, ranks: Sequence[int], rank: int, held: HeldParts | None, tag: int
) -> tuple[dict[int, dict[str, list[Box]]], dict[str, torch.dtype]]:
    """The boxes of every rank that has parts, by parameter name, and the dtypes of the parameters. All ranks call this
    together, and get the same result.

    Args:
        ranks: the participating ranks; in the same order on each.
        held: this rank's parts; `None` on a rank that is not in the layout. A rank of the layout may have no boxes.
        tag: tag of the messages.
    """
    descriptions: dict[_Description, _Ranks] = {}
    if held is not None:
        description, number = _described(held)
        descriptions = {description: {rank: number}}
    all_ranks: dict[_Description, _Ranks] = all_reduce(messages, ranks, rank, descriptions, _merged, tag)
    boxes = {holder: key.boxes(number) for key, numbers in all_ranks.items() for holder, number in numbers.items()}
    dtypes: dict[str, torch.dtype] = {}
    for _, key in sorted((min(numbers), key) for key, numbers in all_ranks.items()):
        dtypes |= {name: dtype for name, dtype in key.dtypes().items() if name not in dtypes}
    return dict(sorted(boxes.items())), dtypes
