"""64-bit digests of tensors to compare copies of weights. A digest depends on every bit and on its position.

A digest is a sum over elements modulo 2^64, so a tensor's digest is the sum of the digests of its parts, on any devices
and in any order.

The flattened tensor is cut into rows of `row_width` elements, and a row into words of 8 bytes. A word x contributes
(x + (x >> 31)) * C[its place in the row] * R[the row], with odd weights C and R mixed from all bits of the place. An
element contributes the word with its bits and zeros elsewhere, so a part may begin or end within a word.

A product modulo 2^64 keeps 64 - k bits of the weight of a change by a multiple of 2^k. The shift adds the upper half of
a word to the lower, so k is at most 32, for changes of only the highest bits of words. A change of one bit, or of one
element of at most 4 bytes, always shows. Sign changes of only the last elements of words go unseen with probability
2^-31, or 2^-26 if they form a block of rows and columns; other changes with 2^-40 or less, of 8-bit integers 2^-32.
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
_FLAT_ROW = 1 << 16  # elements of a row of a one-dimensional tensor
_CPU_WORDS = 1 << 15  # words per block on a CPU: 256 KiB, which fits a core's cache
_DEVICE_WORDS = 1 << 22  # words per block on an accelerator: working copies of 32 MiB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLUMN_SALT, _ROW_SALT = 0x243F6A8885A308D3, 0x13198A2E03707344


class UndigestedError(ValueError):
    """The elements of a part are not some columns of some rows of its tensor."""


def digest(tensor: Tensor) -> Tensor:
    """The digest of a whole tensor, 0-dimensional int64 on the tensor's device."""
    shape = tuple(tensor.shape)
    return strided_digest(tensor, 0, _strides(shape), shape)


def part_digest(part: Tensor, box: Box, shape: Sequence[int]) -> Tensor:
    """The contribution of a part to the tensor's digest, 0-dimensional int64 on the part's device.

    Args:
        box: position of the part in the tensor.
        shape: shape of the whole tensor.
    """
    strides = _strides(shape)
    start = sum(low * stride for (low, _), stride in zip(box, strides, strict=True))
    return strided_digest(part, start, strides, shape)


def strided_digest(part: Tensor, start: int, strides: Sequence[int], shape: Sequence[int]) -> Tensor:
    """`part_digest` of a part whose element [i, j, ...] is element start + i * strides[0] + j * strides[1] + ... of the
    flattened tensor.

    Args:
        shape: shape of the whole tensor.

    Raises:
        UndigestedError: the positions are neither whole rows nor some columns of some rows.
    """
    part = part.detach()
    if not part.numel():
        return torch.zeros((), dtype=torch.int64, device=part.device)
    order = sorted((d for d in range(part.dim()) if part.shape[d] > 1), key=lambda d: -strides[d])
    rest = [d for d in range(part.dim()) if part.shape[d] == 1]
    part = part.permute(*order, *rest).reshape([part.shape[d] for d in order])
    return _digest(part, start, [strides[d] for d in order], row_width(shape))


def has_digest(sizes: Sequence[int], start: int, strides: Sequence[int], shape: Sequence[int]) -> bool:
    """True if `strided_digest` supports a part of these sizes and positions."""
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
    """Digests as numbers, with one wait per device."""
    return torch.stack([digest.to(digests[0].device) for digest in digests]).tolist() if digests else []


def total(digests: Iterable[int]) -> int:
    """The sum of digests, as a signed number of 64 bits."""
    return (sum(digests) + 2**63) % 2**64 - 2**63


def hexadecimal(digest: int | np.int64) -> str:
    """A digest for messages."""
    return f"{int(digest) % 2**64:016x}"


def row_width(shape: Sequence[int]) -> int:
    return shape[-1] if len(shape) > 1 else max(1, min(prod(shape), _FLAT_ROW))


def forget_weights() -> None:
    """Free the tables of weights, which lie on each device that digests were computed on."""
    _weights.cache_clear()


def _strides(shape: Sequence[int]) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _digest(part: Tensor, start: int, strides: Sequence[int], width: int) -> Tensor:
    """`strided_digest` for falling strides and without dimensions of size 1."""
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


def _over_rows(part: Tensor, start: int, strides: Sequence[int], width: int, axis: int) -> Tensor:
    """`_digest` of a part whose dimension `axis` spans rows: the end of the first row, whole rows, the rest."""
    size, stride = part.shape[axis], strides[axis]
    inner = sum((n - 1) * s for n, s in zip(part.shape[axis + 1 :], strides[axis + 1 :], strict=True))
    if width % stride or start % stride + inner >= stride:
        raise UndigestedError(f"strides {strides} in rows of {width}")
    of_row = width // stride
    head = min(size, -(start % width // stride) % of_row)
    whole = (size - head) // of_row
    result = torch.zeros((), dtype=torch.int64, device=part.device)
    for begin, length in ((0, head), (head + whole * of_row, size - head - whole * of_row)):
        if length:
            result += _digest(part.narrow(axis, begin, length), start + begin * stride, strides, width)
    if whole:
        rows = part.narrow(axis, head, whole * of_row).unflatten(axis, (whole, of_row))
        result += _digest(rows, start + head * stride, [*strides[:axis], width, *strides[axis:]], width)
    return result


_Places = range | Tensor  # consecutive places, or an int64 tensor of places


def _places(start: int, sizes: Sequence[int], strides: Sequence[int]) -> _Places:
    """start + i * strides[0] + j * strides[1] + ..., for all i, j, ... in order."""
    count = prod(sizes)
    if all(stride == prod(sizes[axis + 1 :]) for axis, stride in enumerate(strides) if sizes[axis] > 1):
        return range(start, start + count)
    places = torch.full((), start, dtype=torch.int64)
    for size, stride in zip(sizes, strides, strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return places.flatten()


def _row_sums(values: Tensor, places: _Places) -> Tensor:
    """(rows,) int64: sum of the contributions of each row of (rows, columns) integers, without the row's weight."""
    size, device = values.element_size(), values.device
    most = (_CPU_WORDS if device.type == "cpu" else _DEVICE_WORDS) * _WORD // size
    if len(places) > most:
        blocks = range(0, len(places), most)
        return torch.stack([_row_sums(values[:, i : i + most], places[i : i + most]) for i in blocks]).sum(0)
    of_word = _WORD // size
    if not isinstance(places, range):  # one word per element
        weights = _at(_COLUMN_SALT, places // of_word, device)
        shifts = (places % of_word * size * 8).to(device)
        return torch.cat([_products(_bits(part) << shifts, weights) for part in _copied(values)])
    before, after = places.start % of_word, -places.stop % of_word  # missing elements of the first and last word
    weights = _at(_COLUMN_SALT, range(places.start // of_word, (places.stop + after) // of_word), device)
    if not before and not after and _lies_in_words(values):
        return _products(values.view(torch.int64), weights)
    return torch.cat([_products(_in_words(part, before, after), weights) for part in _copied(values)])


def _lies_in_words(values: Tensor) -> bool:
    size = values.element_size()
    starts = (values.storage_offset(), *values.stride()[:-1])
    return (
        values.stride(-1) == 1 and not any(start * size % _WORD for start in starts) and not values.data_ptr() % _WORD
    )


def _copied(values: Tensor) -> Sequence[Tensor]:
    """The rows in blocks to make working copies of. On a CPU one thread copies each block."""
    most = _CPU_WORDS if values.device.type == "cpu" else _DEVICE_WORDS
    return values.split(max(1, most // values.shape[1]))


def _in_words(values: Tensor, before: int, after: int) -> Tensor:
    """A copy of rows of integers as rows of words; the missing elements of the first and last word are zeros."""
    rows, columns = values.shape
    padded = values.new_zeros(rows, before + columns + after)
    padded[:, before : before + columns] = values
    return padded.view(torch.int64)


def _bits(values: Tensor) -> Tensor:
    return values.long() & ((1 << 8 * values.element_size()) - 1) if values.element_size() < _WORD else values


def _products(words: Tensor, weights: Tensor) -> Tensor:
    """(rows,) int64: sums of words times weights. NumPy computes them on a CPU, in one thread, because torch's threads
    wait for each other on busy cores."""
    on_cpu = words.device.type == "cpu"
    rows = max(1, (_CPU_WORDS if on_cpu else _DEVICE_WORDS) // len(weights))
    if not on_cpu:
        return torch.cat([((part >> 31).add_(part) * weights).sum(1) for part in words.split(rows)])
    # not by `Tensor.numpy`, after which torch neither grows nor frees a storage (`cpu_offload.DroppedCopy`)
    of_words, of_weights = np.from_dlpack(words), np.from_dlpack(weights)
    folded, sums = np.empty((min(rows, len(words)), len(weights)), np.int64), np.empty(len(words), np.int64)
    for begin in range(0, len(words), rows):
        part = of_words[begin : begin + rows]
        to = folded[: len(part)]
        np.right_shift(part, 31, out=to)
        np.add(to, part, out=to)
        np.einsum("ij,j->i", to, of_weights, out=sums[begin : begin + rows])
    return torch.from_numpy(sums)


def _at(salt: int, places: _Places, device: torch.device) -> Tensor:
    """(n,) int64: weights of places."""
    if not len(places):
        return torch.ones(0, dtype=torch.int64, device=device)
    last = places.stop - 1 if isinstance(places, range) else int(places.max())
    table = _weights(salt, 1 << max(12, last.bit_length()), device)
    return table[places.start : places.stop] if isinstance(places, range) else table[places.to(device)]


@functools.lru_cache(maxsize=16)
def _weights(salt: int, count: int, device: torch.device) -> Tensor:
    """(count,) int64: odd weights, mixed from all bits of the place by splitmix64."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)
