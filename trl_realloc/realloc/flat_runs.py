"""Runs of a message's parts that are contiguous both in its buffer and in a tensor, so that each run is one copy.

For a model of 70 billion parameters under ZeRO-3 on 88 ranks, a rank that needs the whole model gets 160,000 parts,
because a range of a flattened parameter is up to three boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .layout import Box
from .schedule import Message, ParameterBox


_Parts = Mapping[str, Sequence[tuple[Box, Tensor]]]


@dataclass(frozen=True)
class Run:
    """A range of a contiguous tensor, and its place in a buffer.

    Args:
        outer: the tensor's box of its parameter.
        first, count: the range, in elements.
        start: first byte in the buffer.
    """

    parameter: str
    outer: Box
    first: int
    count: int
    start: int


def flat_range(outer: Box, box: Box) -> tuple[int, int] | None:
    """(first element, number of elements) of a box in a contiguous tensor with the box `outer`; `None` if it is not one
    range there. The box of a forwarded part may be outside the tensor."""
    stride, first, count, is_whole = 1, 0, 1, True
    for (low, high), (start, stop) in zip(reversed(outer), reversed(box), strict=True):
        size = stop - start
        if (size != 1 and not is_whole) or start < low or stop > high:
            return None
        first, count = first + (start - low) * stride, count * size
        is_whole = is_whole and size == high - low
        stride *= high - low
    return first, count


def runs_of(
    placed: Sequence[tuple[ParameterBox, int, int]], parts: _Parts, sizes: Mapping[str, int]
) -> tuple[Run, ...] | None:
    """The runs of a message's parts; `None` if a part is not a range of the rank's only tensor of its parameter.

    Args:
        placed: (part, first byte, end byte) in the buffer, for each part.
        sizes: bytes of an element of each parameter.
    """
    runs: list[Run] = []
    for piece, start, _ in placed:
        held = parts.get(piece.parameter, ())
        flat = flat_range(held[0][0], piece.box) if len(held) == 1 else None
        if flat is None or not held[0][1].is_contiguous():
            return None
        first, count = flat
        last, size = runs[-1] if runs else None, sizes[piece.parameter]
        here = (piece.parameter, first, start)
        if last is not None and here == (last.parameter, last.first + last.count, last.start + last.count * size):
            runs[-1] = replace(last, count=last.count + count)
        else:
            runs.append(Run(piece.parameter, held[0][0], first, count, start))
    return tuple(runs)


def views_of(
    runs: Sequence[Run], buffer: Tensor, parts: _Parts, dtypes: Mapping[str, torch.dtype]
) -> tuple[list[Tensor], list[Tensor]] | None:
    """The runs as views of a buffer, in the message's dtypes, and as views of the tensors; `None` if the tensors' boxes
    have changed."""
    in_buffer, in_tensors = [], []
    for run in runs:
        held = parts.get(run.parameter, ())
        if len(held) != 1 or held[0][0] != run.outer or not held[0][1].is_contiguous():
            return None
        dtype = dtypes[run.parameter]
        in_buffer.append(buffer[run.start : run.start + run.count * dtype.itemsize].view(dtype))
        in_tensors.append(held[0][1].view(-1)[run.first : run.first + run.count])
    return in_buffer, in_tensors


class MessageViews:
    """The parts of messages as views of buffers and tensors.

    Args:
        dtypes: dtype in which each parameter is sent.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype]) -> None:
        self._dtypes = dtypes
        self._runs: dict[tuple[int, int], tuple[Run, ...] | None] = {}  # key: ids of a message and of its first part

    def of(
        self,
        message: Message,
        buffer: Tensor,
        placed: Sequence[tuple[ParameterBox, int, int]],
        parts: _Parts,
        tensor_of: Callable[[ParameterBox], Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Views of some parts of a message in a buffer and in a rank's tensors. A run of parts is one view.

        Args:
            message: the message, which must live as long as this object.
            placed: (part, first byte, end byte) in the buffer, for each part.
            parts: the rank's tensors.
            tensor_of: returns the tensor of one part.
        """
        key = id(message), id(placed[0][0])
        if key not in self._runs:
            sizes = {piece.parameter: self._dtypes[piece.parameter].itemsize for piece, _, _ in placed}
            self._runs[key] = runs_of(placed, parts, sizes)
        runs = self._runs[key]
        views = None if runs is None else views_of(runs, buffer, parts, self._dtypes)
        if views is not None:
            return views
        tensors = [tensor_of(piece) for piece, _, _ in placed]
        in_buffer = [
            buffer[start:end].view(self._dtypes[piece.parameter]).view(tensor.shape)
            for (piece, start, end), tensor in zip(placed, tensors, strict=True)
        ]
        return in_buffer, tensors


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors in one call, because with thousands of small parts a device would wait for Python between copies."""
    with torch.no_grad():
        torch._foreach_copy_(list(targets), list(sources))
