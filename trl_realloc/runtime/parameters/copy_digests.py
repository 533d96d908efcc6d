"""`CopyDigests`: proves, by digests taken where parameters lie, that the copies in the target layout of a reallocation
are equal to the parameters in its source layout.

Every rank adds up what it holds, and the ranks add up their sums in a message that they exchange anyway: 8 bytes for
each parameter, of the source and of each copy. When the sums are compared is in `reallocation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...engines.weight_digest import numbers, part_digest
from ...realloc.layout import Box, Layout
from ...realloc.transfer import Parts


@dataclass(frozen=True)
class DigestSums:
    """Digests of whole parameters, as far as some ranks know them: those of the source, and those of each copy by its
    number. (parameters,) int64 each, whose sums wrap."""

    source: np.ndarray | None = None
    copies: Mapping[int, np.ndarray] = field(default_factory=dict)

    def plus(self, other: DigestSums) -> DigestSums:
        numbers = {**self.copies, **other.copies}
        copies = {number: _plus(self.copies.get(number), other.copies.get(number)) for number in numbers}
        return DigestSums(
            _plus(self.source, other.source), {number: sums for number, sums in copies.items() if sums is not None}
        )


def _plus(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    return other if one is None else one if other is None else one + other


class CopyDigests:
    """The digests of one rank's parts in both layouts.

    Args:
        source, target: layouts of the same parameters. Boxes of a parameter are equal or do not overlap.
        rank: this process.
        dtypes: in which the parameters are sent.
    """

    def __init__(self, source: Layout, target: Layout, rank: int, dtypes: Mapping[str, torch.dtype]) -> None:
        self._layouts, self._rank, self._dtypes = (source, target), rank, dtypes
        self._shapes = {parameter.name: tuple(parameter.shape) for parameter in target.spec.parameters}
        self._copies = {
            name: max((len(placed.devices) for placed in boxes), default=0) for name, boxes in target.parameters.items()
        }
        self._found: list[tuple[int, str, Tensor]] = []  # number of the copy, parameter, digest of a part

    def of_source(self, parts: Parts) -> DigestSums:
        """The sums of this rank's parts of the source layout. Of a part that several ranks hold, the first one counts.
        Nothing is computed where the target layout holds nothing."""
        first: list[tuple[int, str, Tensor]] = []
        for name, boxes in parts.items():
            owners = {placed.box: placed.devices[0] for placed in self._layouts[0].parameters.get(name, ())}
            if self._copies.get(name):
                mine = [(box, tensor) for box, tensor in boxes if owners.get(box) == self._rank]
                first += [(0, name, self._digest(name, box, tensor)) for box, tensor in mine]
        return DigestSums(self._sums(first).get(0))

    def add_target(self, parts: Parts) -> None:
        """Take the digests of parts of the target layout that have been filled."""
        for name, boxes in parts.items():
            devices = {placed.box: placed.devices for placed in self._layouts[1].parameters.get(name, ())}
            for box, tensor in boxes:
                if self._rank in devices.get(box, ()):
                    number = self._digest(name, box, tensor)
                    at, holders = devices[box].index(self._rank), len(devices[box])
                    # another box of the parameter may have more holders: this one is part of several copies
                    self._found += [(copy, name, number) for copy in range(at, self._copies[name], holders)]

    def of_target(self) -> DigestSums:
        """The sums of the parts since the last call."""
        found, self._found = self._found, []
        return DigestSums(None, self._sums(found))

    def difference(self, sums: DigestSums) -> str | None:
        """A sentence that says how a copy differs from the source; `None` if none does.

        Args:
            sums: of all ranks.
        """
        if sums.source is None:
            return None
        names = [*self._shapes]
        expected = np.array([self._copies[name] for name in names])
        for copy in range(expected.max(initial=0)):
            lies = sums.copies.get(copy, np.zeros(len(names), np.int64))
            wrong = [at for at in np.flatnonzero(lies != sums.source) if expected[at] > copy]
            if wrong:
                name, at = names[wrong[0]], wrong[0]
                boxes = self._layouts[1].parameters[name]
                ranks = sorted({placed.devices[copy % len(placed.devices)] for placed in boxes})
                return (
                    f"{name} does not lie on rank {', '.join(map(str, ranks))} as it was sent: its digest is "
                    f"{_hex(lies[at])} there and {_hex(sums.source[at])} in the training ({len(wrong)} of "
                    f"{len(names)} parameters differ)"
                )
        return None

    def _digest(self, name: str, box: Box, tensor: Tensor) -> Tensor:
        return part_digest(tensor.detach().to(self._dtypes[name]), box, self._shapes[name])

    def _sums(self, found: Sequence[tuple[int, str, Tensor]]) -> dict[int, np.ndarray]:
        rows = {name: at for at, name in enumerate(self._shapes)}
        sums: dict[int, np.ndarray] = {}
        for (copy, name, _), number in zip(found, numbers([digest for _, _, digest in found]), strict=True):
            row = rows[name]
            sums.setdefault(copy, np.zeros(len(rows), np.int64))[row : row + 1] += number  # a scalar's sum would warn
        return sums


def _hex(digest: np.int64) -> str:
    return f"{int(digest) % 2**64:016x}"
