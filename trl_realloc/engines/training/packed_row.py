"""The tokens of a micro-batch as one row, in which beginnings that samples share occur once. `plan.batching` finds
these beginnings.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...algorithms.rollout import on_device
from ...plan.batching import PrefixTree


Run = tuple[int, int]  # columns of the row: the first one, and the one after the last


@dataclass(frozen=True)
class Segment:
    """The tokens of a sample that it does not share with a sample to its left.

    Args:
        begin, end: columns of the segment.
        before: runs of columns of the earlier tokens of its sample, in order; no two of them touch.
    """

    begin: int
    end: int
    before: tuple[Run, ...] = ()

    @property
    def first(self) -> int:
        """Position of the first token in the sample."""
        return sum(end - begin for begin, end in self.before)


@dataclass(frozen=True)
class PackedRow:
    """A micro-batch as one row of tokens.

    Args:
        lengths: tokens of each sample.
        order: samples in the order of their segments in the row.
        segments: one segment per sample, in the row's order; may be empty.
    """

    lengths: tuple[int, ...]
    order: tuple[int, ...]
    segments: tuple[Segment, ...]

    @staticmethod
    def plain(lengths: Sequence[int]) -> PackedRow:
        """A row of samples one after the other, without shared tokens."""
        bounds = itertools.pairwise(itertools.accumulate(lengths, initial=0))
        return PackedRow(tuple(lengths), tuple(range(len(lengths))), tuple(itertools.starmap(Segment, bounds)))

    @staticmethod
    def of(tree: PrefixTree) -> PackedRow:
        """A row in which the samples share all that the tree does."""
        if not any(tree.shared):
            return PackedRow.plain(tree.lengths)
        segments, end, path = list[Segment](), 0, tuple[Run, ...]()
        for sample, shared in zip(tree.order, tree.shared, strict=True):
            before = _cropped(path, shared)
            begin, end = end, end + tree.lengths[sample] - shared
            segments.append(Segment(begin, end, before))
            path = _joined(before, (begin, end))
        return PackedRow(tree.lengths, tree.order, tuple(segments))

    @property
    def tokens(self) -> int:
        """Number of tokens of the row."""
        return self.segments[-1].end if self.segments else 0

    @property
    def saved(self) -> int:
        """Number of the samples' tokens that are not computed again because they are shared."""
        return sum(self.lengths) - self.tokens

    @cached_property
    def own(self) -> list[int]:
        """Number of tokens of each segment."""
        return [segment.end - segment.begin for segment in self.segments]

    @cached_property
    def columns(self) -> Tensor:
        """(tokens of the samples,) int64: the column of each token, sample by sample."""
        if not self.saved:
            return torch.arange(self.tokens)
        of_samples: list[Tensor] = [torch.empty(0, dtype=torch.long)] * len(self.lengths)
        for sample, segment in zip(self.order, self.segments, strict=True):
            runs = (*segment.before, (segment.begin, segment.end))
            of_samples[sample] = torch.cat([torch.arange(begin, end) for begin, end in runs])
        return torch.cat(of_samples)

    @cached_property
    def taken(self) -> Tensor:
        """(tokens of the row,) int64: for each column the index of one of its tokens among the samples' tokens."""
        taken = torch.empty(self.tokens, dtype=torch.long)
        taken[self.columns] = torch.arange(len(self.columns))
        return taken

    @cached_property
    def positions(self) -> Tensor:
        """(tokens of the row,) int64: the position of each token in its sample."""
        ranges = [torch.arange(s.first, s.first + s.end - s.begin) for s in self.segments]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.long)

    @cached_property
    def keys(self) -> tuple[list[int], Tensor]:
        """The tokens that each non-empty segment sees, which are those of its sample up to the segment's end: their
        number per segment, and all their columns, (sum,) int64."""
        seen = [(*s.before, (s.begin, s.end)) for s in self.segments if s.end > s.begin]
        counts = [sum(end - begin for begin, end in runs) for runs in seen]
        return counts, torch.cat([torch.arange(*run) for runs in seen for run in runs])

    def on(self, device: torch.device) -> Tensor:
        """The columns of `keys` on a device."""
        if device not in self._on_device:
            self._on_device[device] = on_device(self.keys[1], device)
        return self._on_device[device]

    @cached_property
    def _on_device(self) -> dict[torch.device, Tensor]:
        return {}


def _joined(runs: tuple[Run, ...], run: Run) -> tuple[Run, ...]:
    if run[0] == run[1]:
        return runs
    if runs and runs[-1][1] == run[0]:
        return *runs[:-1], (runs[-1][0], run[1])
    return *runs, run


def _cropped(runs: tuple[Run, ...], tokens: int) -> tuple[Run, ...]:
    """The first `tokens` columns of the runs."""
    cropped = list[Run]()
    for begin, end in runs:
        if tokens > 0:
            cropped.append((begin, min(end, begin + tokens)))
            tokens -= end - begin
    return tuple(cropped)
