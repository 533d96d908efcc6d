"""`CopyDigests`: proves that the copies in a reallocation's target layout are equal to the source's parameters.

Every rank adds up the digests of its parts, and the ranks add up these sums in a message that they exchange anyway: 8
bytes per parameter for the source and for each copy. `reallocation` compares the sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...engines.weight_digest import hexadecimal, numbers, part_digest
from ...realloc.layout import Box, Layout
from ...realloc.transfer import Parts


@dataclass(frozen=True)
class DigestSums:
    """Sums of some ranks' digests, for the source and for each copy by its number. (parameters,) int64 each; the sums
    wrap."""

    source: np.ndarray | None = None
    copies: Mapping[int, np.ndarray] = field(default_factory=dict)

    def plus(self, other: DigestSums) -> DigestSums:
        numbers = {**self.copies, **other.copies}
        copies = {number: _plus(self.copies.get(number), other.copies.get(number)) for number in numbers}
        return DigestSums(
            _plus(self.source, other.source), {number: sums for number, sums in copies.items() if sums is not None}
        )


def _plus(left: np.ndarray | None, right: np.ndarray | None) -> np.ndarray | None:
    return right if left is None else left if right is None else left + right


class CopyDigests:
    """The digests of one rank's parts in both layouts.

    Args:
        source, target: layouts of the same parameters. Boxes of a parameter are equal or do not overlap.
        dtypes: dtypes in which the parameters are sent.
    """

    def __init__(self, source: Layout, target: Layout, rank: int, dtypes: Mapping[str, torch.dtype]) -> None:
        self._layouts, self._rank, self._dtypes = (source, target), rank, dtypes
        self._shapes = {parameter.name: tuple(parameter.shape) for parameter in target.spec.parameters}
        self._copies = {
            name: max((len(placed.devices) for placed in boxes), default=0) for name, boxes in target.parameters.items()
        }
        self._target_digests: list[tuple[int, str, Tensor]] = []  # number of the copy, parameter, digest of a part

    def of_source(self, parts: Parts) -> DigestSums:
        """The sums of this rank's parts of the source layout. A part on several ranks counts on the first rank only.
        Parameters outside the target layout are skipped."""
        first: list[tuple[int, str, Tensor]] = []
        for name, boxes in parts.items():
            owners = {placed.box: placed.devices[0] for placed in self._layouts[0].parameters.get(name, ())}
            if self._copies.get(name):
                owned = [(box, tensor) for box, tensor in boxes if owners.get(box) == self._rank]
                first += [(0, name, self._digest(name, box, tensor)) for box, tensor in owned]
        return DigestSums(self._sums(first).get(0))

    def add_target(self, parts: Parts) -> None:
        """Add the digests of filled parts of the target layout."""
        for name, boxes in parts.items():
            devices = {placed.box: placed.devices for placed in self._layouts[1].parameters.get(name, ())}
            for box, tensor in boxes:
                if self._rank in devices.get(box, ()):
                    number = self._digest(name, box, tensor)
                    first, holders = devices[box].index(self._rank), len(devices[box])
                    # another box of the parameter may have more holders; this box is then part of several copies
                    self._target_digests += [(copy, name, number) for copy in range(first, self._copies[name], holders)]

    def of_target(self) -> DigestSums:
        """The sums of the parts since the last call."""
        digests, self._target_digests = self._target_digests, []
        return DigestSums(None, self._sums(digests))

    def difference(self, sums: DigestSums) -> str | None:
        """A sentence about a copy that differs from the source; `None` if all are equal.

        Args:
            sums: sums over all ranks.
        """
        if sums.source is None:
            return None
        names = [*self._shapes]
        expected = np.array([self._copies[name] for name in names])
        for copy in range(expected.max(initial=0)):
            digests = sums.copies.get(copy, np.zeros(len(names), np.int64))
            wrong = [row for row in np.flatnonzero(digests != sums.source) if expected[row] > copy]
            if wrong:
                name, row = names[wrong[0]], wrong[0]
                boxes = self._layouts[1].parameters[name]
                ranks = sorted({placed.devices[copy % len(placed.devices)] for placed in boxes})
                return (
                    f"{name} does not lie on rank {', '.join(map(str, ranks))} as it was sent: its digest is "
                    f"{hexadecimal(digests[row])} there and {hexadecimal(sums.source[row])} in the training "
                    f"({len(wrong)} of {len(names)} parameters differ)"
                )
        return None

    def _digest(self, name: str, box: Box, tensor: Tensor) -> Tensor:
        return part_digest(tensor.detach().to(self._dtypes[name]), box, self._shapes[name])

    def _sums(self, digests: Sequence[tuple[int, str, Tensor]]) -> dict[int, np.ndarray]:
        rows = {name: index for index, name in enumerate(self._shapes)}
        sums: dict[int, np.ndarray] = {}
        for (copy, name, _), number in zip(digests, numbers([digest for _, _, digest in digests]), strict=True):
            row = rows[name]
            sums.setdefault(copy, np.zeros(len(rows), np.int64))[row : row + 1] += number  # a scalar's sum would warn
        return sums
