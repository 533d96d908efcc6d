"""Digests of tensors by which copies of weights are compared: 64 bits that depend on every bit and on its position.

A digest is a sum over elements modulo 2^64, so the digest of a tensor is the sum of those of its parts, on whichever
devices they lie, and does not depend on the order of the additions. Which copies are compared is decided elsewhere.

The flattened tensor is cut into rows of `row_width` elements, and a row into words of 8 bytes. A word contributes its
bits, as a number, times C[its place in the row] * R[the row]. C and R are odd, so a change of one element always shows,
and mixed from all bits of the place. The elements in a word contribute on their own, times a power of 2, so that a part
may begin or end within a word. Of the last one only as many bits count as it has, 16 of bfloat16: what is exchanged
between last elements alone is overlooked once in 2^16 exchanges, and two that differ in the sign alone always. An
element of 8 bytes contributes its upper half a second time, shifted down, so that nothing of the kind happens to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..realloc.layout import Box


_WORD = 8  # bytes
_FLAT_ROW = 1 << 16  # elements of a row of a tensor of one dimension
_CPU_WORDS = 1 << 15  # words that are copied at a time on a CPU: 256 KiB, which a core's cache holds
_DEVICE_WORDS = 1 << 22  # on an accelerator: working copies of 32 MiB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLUMN_SALT, _ROW_SALT = 0x243F6A8885A308D3, 0x13198A2E03707344


class UndigestedError(ValueError):
    """A part whose elements are not at rows times columns of its tensor."""


def digest(tensor: Tensor) -> Tensor:
    """The digest of a whole tensor, 0-dimensional int64 on the tensor's device."""
    shape = tuple(tensor.shape)
    return strided_digest(tensor, 0, _strides(shape), shape)


def part_digest(part: Tensor, box: Box, shape: Sequence[int]) -> Tensor:
    """The digest that a part of a tensor contributes to that of the whole, 0-dimensional int64 on the part's device.

    Args:
        part: of the box's shape.
        box: of the tensor.
        shape: of the tensor.
    """
    strides = _strides(shape)
    start = sum(low * stride for (low, _), stride in zip(box, strides, strict=True))
    return strided_digest(part, start, strides, shape)


def strided_digest(part: Tensor, start: int, strides: Sequence[int], shape: Sequence[int]) -> Tensor:
    """As `part_digest`, of a part whose element [i, j, ...] is element start + i * strides[0] + j * strides[1] + ... of
    the flattened tensor.

    Args:
        shape: of the tensor.

    Raises:
        UndigestedError: the positions are not those of whole rows, or of some columns of some rows.
    """
    part = part.detach()
    if not part.numel():
        return torch.zeros((), dtype=torch.int64, device=part.device)
    order = sorted((d for d in range(part.dim()) if part.shape[d] > 1), key=lambda d: -strides[d])
    rest = [d for d in range(part.dim()) if part.shape[d] == 1]
    part = part.permute(*order, *rest).reshape([part.shape[d] for d in order])
    return _digest(part, start, [strides[d] for d in order], row_width(shape))


def has_digest(sizes: Sequence[int], start: int, strides: Sequence[int], shape: Sequence[int]) -> bool:
    """True if `strided_digest` takes a part of these sizes and positions."""
    width = row_width(shape)
    falling = sorted(((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1), reverse=True)
    of_rows = sum(stride % width == 0 for stride, _ in falling)
    columns = falling[of_rows:]
    if any(stride % width for stride, _ in falling[:of_rows]):
        return False
    if start % width + sum((size - 1) * stride for stride, size in columns) < width:
        return True
    (stride, _), inner = columns[0], columns[1:]
    return not width % stride and start % stride + sum((n - 1) * s for s, n in inner) < stride


def numbers(digests: Sequence[Tensor]) -> list[int]:
    """Digests as numbers, with one wait for a device. They may lie on several."""
    return torch.stack([digest.to(digests[0].device) for digest in digests]).tolist() if digests else []


def total(digests: Iterable[int]) -> int:
    """The sum of digests, as a signed number of 64 bits."""
    return (sum(digests) + 2**63) % 2**64 - 2**63


def row_width(shape: Sequence[int]) -> int:
    """The number of elements of a row."""
    return shape[-1] if len(shape) > 1 else max(1, min(prod(shape), _FLAT_ROW))


def forget_weights() -> None:
    """Free the tables of weights, which lie on each device that digests were computed on."""
    _weights.cache_clear()


def _strides(shape: Sequence[int]) -> list[int]:
    return [prod(shape[at + 1 :]) for at in range(len(shape))]


def _digest(part: Tensor, start: int, strides: Sequence[int], width: int) -> Tensor:
    """As `strided_digest`, with falling strides and without dimensions of size 1."""
    of_rows = sum(stride % width == 0 for stride in strides)
    columns = list(zip(part.shape[of_rows:], strides[of_rows:], strict=True))
    if any(stride % width for stride in strides[:of_rows]):
        raise UndigestedError(f"strides {strides} in rows of {width}")
    if start % width + sum((size - 1) * stride for size, stride in columns) >= width:
        return _over_rows(part, start, strides, width, of_rows)
    row_places = _places(start // width, part.shape[:of_rows], [stride // width for stride in strides[:of_rows]])
    column_places = _places(start % width, part.shape[of_rows:], strides[of_rows:])
    values = part.reshape(prod(part.shape[:of_rows]), prod(part.shape[of_rows:]))
    values = values.view(_INTEGERS[values.element_size()])
    sums = _row_sums(values, column_places)
    return (sums * _at(_ROW_SALT, row_places, part.device)).sum()


def _over_rows(part: Tensor, start: int, strides: Sequence[int], width: int, at: int) -> Tensor:
    """As `_digest`, of a part whose dimension `at` goes on from row to row: up to the first row's end, whole rows, and
    the rest."""
    size, stride = part.shape[at], strides[at]
    inner = sum((n - 1) * s for n, s in zip(part.shape[at + 1 :], strides[at + 1 :], strict=True))
    if width % stride or start % stride + inner >= stride:
        raise UndigestedError(f"strides {strides} in rows of {width}")
    of_row = width // stride
    head = min(size, -(start % width // stride) % of_row)
    whole = (size - head) // of_row
    found = torch.zeros((), dtype=torch.int64, device=part.device)
    for begin, length in ((0, head), (head + whole * of_row, size - head - whole * of_row)):
        if length:
            found += _digest(part.narrow(at, begin, length), start + begin * stride, strides, width)
    if whole:
        rows = part.narrow(at, head, whole * of_row).unflatten(at, (whole, of_row))
        found += _digest(rows, start + head * stride, [*strides[:at], width, *strides[at:]], width)
    return found


_Places = range | Tensor  # consecutive places, or an int64 tensor of them


def _places(start: int, sizes: Sequence[int], strides: Sequence[int]) -> _Places:
    """start + i * strides[0] + j * strides[1] + ..., for all i, j, ... in order."""
    count = prod(sizes)
    if all(stride == prod(sizes[at + 1 :]) for at, stride in enumerate(strides) if sizes[at] > 1):
        return range(start, start + count)
    places = torch.full((), start, dtype=torch.int64)
    for size, stride in zip(sizes, strides, strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return places.flatten()


def _row_sums(values: Tensor, places: _Places) -> Tensor:
    """(rows,) int64: the sum of each row's contributions, without the row's weight.

    Args:
        values: (rows, columns) integers.
        places: of the columns, in the row.
    """
    size, device = values.element_size(), values.device
    whole_words = isinstance(places, range) and places.start * size % _WORD == 0 == len(places) * size % _WORD
    if isinstance(places, range) and whole_words and size < _WORD:
        weights = _at(_COLUMN_SALT, range(places.start * size // _WORD, places.stop * size // _WORD), device)
    else:
        index = torch.arange(places.start, places.stop) if isinstance(places, range) else places
        weights = _at(_COLUMN_SALT, index * size // _WORD, device) << (index * size % _WORD * 8).to(device)
    if whole_words and size < _WORD and _lies_in_words(values):  # without a copy
        values, size = values.view(torch.int64), 0
    at_once = len(values)
    if size or device.type != "cpu":  # with working copies
        at_once = max(1, (_CPU_WORDS if device.type == "cpu" else _DEVICE_WORDS) // len(weights))
    sums = torch.empty(len(values), dtype=torch.int64, device=device)
    for begin in range(0, len(values), at_once):
        words = values[begin : begin + at_once]
        if size and whole_words and size < _WORD:
            words = words.clone(memory_format=torch.contiguous_format).view(torch.int64)
        elif size:
            words = _widened(words)
        sums[begin : begin + at_once] = _products(words, weights)
    return sums


def _lies_in_words(values: Tensor) -> bool:
    """True if rows of integers can be viewed as rows of words."""
    size = values.element_size()
    starts = (values.storage_offset(), *values.stride()[:-1])
    return (
        values.stride(-1) == 1 and not any(start * size % _WORD for start in starts) and not values.data_ptr() % _WORD
    )


def _widened(values: Tensor) -> Tensor:
    """int64: the bits of elements as numbers, for those of 8 bytes with the upper half once more."""
    if values.element_size() == _WORD:
        return values + ((values >> 32) & 0xFFFFFFFF)
    return values.long() & ((1 << 8 * values.element_size()) - 1)


def _products(words: Tensor, weights: Tensor) -> Tensor:
    """(rows,) int64: the sums of rows of words times weights. On a CPU by NumPy, whose one thread reads 14 GB/s, three
    times as many as it copies; torch takes 2 with two threads, which wait for each other."""
    if words.device.type != "cpu":
        return (words * weights).sum(1)
    # not by `Tensor.numpy`, after which torch neither grows nor frees a storage (`residency.DroppedCopy`)
    return torch.from_numpy(np.einsum("ij,j->i", np.from_dlpack(words), np.from_dlpack(weights)))


def _at(salt: int, places: _Places, device: torch.device) -> Tensor:
    """(n,) int64: the weights of places."""
    if not len(places):
        return torch.ones(0, dtype=torch.int64, device=device)
    last = places.stop - 1 if isinstance(places, range) else int(places.max())
    table = _weights(salt, 1 << max(12, last.bit_length()), device)
    return table[places.start : places.stop] if isinstance(places, range) else table[places.to(device)]


@functools.lru_cache(maxsize=16)
def _weights(salt: int, count: int, device: torch.device) -> Tensor:
    """(count,) int64: an odd weight for each place, mixed from all bits of it as by splitmix64."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)
