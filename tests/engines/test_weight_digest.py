"""Digests of tensors and of their parts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.engines.weight_digest import UndigestedError, digest, part_digest, strided_digest, total


FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [*FLOATS, torch.uint8, torch.int8, torch.int64, torch.bool]


def drawn(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=draw) < 0.5
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=draw)
    return bits.view(dtype).reshape(shape)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    one_long = st.lists(st.integers(65530, 140000), min_size=1, max_size=1)
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4) | one_long)
    return drawn(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1000)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_have_equal_digests_and_a_changed_one_another(dtype: torch.dtype) -> None:
    one = (torch.arange(1, 3001).view(30, 100) % 7).to(dtype)
    other = one.clone()
    assert digest(one) == digest(other) == digest(one.t().contiguous().t())
    other[17, 3] = 1 - other[17, 3].to(torch.int64)
    assert digest(one) != digest(other)


@given(tensors(), st.data())
def test_every_bit_matters(tensor: torch.Tensor, data: Any) -> None:
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    other = tensor.clone()
    bits = other.view(-1).view(torch.uint8)
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(tensor) != digest(other)


@given(st.integers(2, 60), st.sampled_from(DTYPES[:-1]), st.data())
def test_a_digest_depends_on_the_order_of_the_elements(count: int, dtype: torch.dtype, data: Any) -> None:
    one = drawn([count], dtype, data.draw(st.integers(0, 1000)))
    other, first, second = one.clone(), data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
    other[first], other[second] = one[second], one[first]
    same = torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert (digest(one) == digest(other)) == same


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_digest_is_that_of_neither_the_transposed_the_negated_nor_the_moved_tensor(dtype: torch.dtype) -> None:
    one = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    others = [one.t(), -one, one.roll(1, 0), one.roll(1, 1), one.flip(0), one.flip(1), one.roll(8, 1)]
    assert len({int(digest(each)) for each in (one, *others)}) == 8


def put(bits: torch.Tensor, at: Any, values: torch.Tensor | int) -> None:
    bits[at] = values.clone() if isinstance(values, torch.Tensor) else values


def negate(bits: torch.Tensor, at: Any) -> None:
    bits[at] = bits[at] ^ torch.iinfo(bits.dtype).min


ALL = slice(None)
# Changes of (rows, columns) integers: `r`, `s` are rows, `c`, `d` columns, `y`, `z` columns of last elements of words.
DAMAGE: dict[str, Callable[..., None]] = {
    "a bit": lambda b, r, s, c, d, y, z: put(b, (r, c), b[r, c] ^ 4),
    "a sign": lambda b, r, s, c, d, y, z: negate(b, (r, c)),
    "the sign of a last element": lambda b, r, s, c, d, y, z: negate(b, (r, y)),
    "two signs": lambda b, r, s, c, d, y, z: negate(b, ([r, s], [c, d])),
    "the signs of two last elements": lambda b, r, s, c, d, y, z: negate(b, ([r, s], [y, z])),
    "a negated column": lambda b, r, s, c, d, y, z: negate(b, (ALL, c)),
    "a negated column of last elements": lambda b, r, s, c, d, y, z: negate(b, (ALL, y)),
    "two negated columns of last elements": lambda b, r, s, c, d, y, z: negate(b, (ALL, [y, z])),
    "a negated row": lambda b, r, s, c, d, y, z: negate(b, r),
    "all negated": lambda b, r, s, c, d, y, z: negate(b, ALL),
    "an exchange": lambda b, r, s, c, d, y, z: put(b, ([r, s], [c, d]), b[[s, r], [d, c]]),
    "an exchange of neighbours": lambda b, r, s, c, d, y, z: put(b, (r, [c, c - 1]), b[r, [c - 1, c]]),
    "an exchange of last elements": lambda b, r, s, c, d, y, z: put(b, ([r, s], [y, z]), b[[s, r], [z, y]]),
    "exchanged rows": lambda b, r, s, c, d, y, z: put(b, [r, s], b[[s, r]]),
    "a repeated row": lambda b, r, s, c, d, y, z: put(b, r, b[s]),
    "a row of zeros": lambda b, r, s, c, d, y, z: put(b, r, 0),
    "a column of zeros in last elements": lambda b, r, s, c, d, y, z: put(b, (ALL, y), 0),
    "moved rows": lambda b, r, s, c, d, y, z: put(b, ALL, b.roll(1, 0)),
    "moved columns": lambda b, r, s, c, d, y, z: put(b, ALL, b.roll(1, 1)),
    "moved elements": lambda b, r, s, c, d, y, z: put(b, ALL, b.flatten().roll(1).view(b.shape)),
}


def in_parts(tensor: torch.Tensor) -> int:
    shape = tuple(tensor.shape)
    boxes = itertools.product(*(((0, n // 3), (n // 3, n)) for n in shape))
    return total(int(part_digest(tensor[tuple(slice(*cut) for cut in box)], box, shape)) for box in boxes)


LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda tensor: tensor,
    lambda tensor: tensor.t().contiguous().t(),
    lambda tensor: torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]],
    lambda tensor: torch.cat([tensor[:, :1], tensor], 1)[:, 1:],
    lambda tensor: torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape),
]


@pytest.mark.parametrize("dtype", DTYPES[:-1])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_changes_the_lower_bits_of_a_digest(kind: str, dtype: torch.dtype) -> None:
    """The difference of two random numbers ends in n zeros once in 2^n times, and damage goes unseen if it ends in 64.
    In 40 draws of each case no difference may end in 48."""
    draw = random.Random(f"{kind} {dtype}")
    of_word = 8 // dtype.itemsize
    for at in range(40):
        shape = [(14, 35), (16, 32)][at % 2]
        one = drawn([*shape], dtype, at)
        other = one.clone()
        rows, columns = draw.sample(range(shape[0]), 2), draw.sample(range(1, shape[1]), 2)
        last = draw.sample(range(of_word - 1, shape[1], of_word), 2)
        DAMAGE[kind](other.view(INTEGERS[dtype.itemsize]), *rows, *columns, *last)
        before, after = int(digest(one)), int(digest(other))
        if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            assert (after - before) % 2**48, f"{before:x} became {after:x}"
        if at < 2:
            assert {int(digest(lies(other))) for lies in LAYOUTS} == {after}
            assert {in_parts(lies(other)) for lies in LAYOUTS} == {after}


@given(tensors(), st.data())
def test_the_parts_of_a_tensor_add_up_to_it_however_it_is_cut(tensor: torch.Tensor, data: Any) -> None:
    shape = tuple(tensor.shape)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    boxes = itertools.product(*(itertools.pairwise(of_dimension) for of_dimension in cuts))
    parts = ((tensor[tuple(slice(*interval) for interval in box)], box) for box in boxes)
    assert total(int(part_digest(part, box, shape)) for part, box in parts) == digest(tensor)
    flat = tensor.reshape(-1)
    ends = sorted({0, len(flat), *data.draw(st.lists(st.integers(0, len(flat)), max_size=2))})
    ranges = ((flat[start:stop], start) for start, stop in itertools.pairwise(ends))
    assert total(int(strided_digest(part, start, [1], shape)) for part, start in ranges) == digest(tensor)


def test_a_part_that_lies_transposed_has_its_own_digest() -> None:
    tensor = torch.randn(6, 10)
    lies = tensor[:, 4:].t().contiguous()  # as vLLM keeps GPT-2's projections
    assert strided_digest(lies, 4, [1, 10], (6, 10)) == part_digest(tensor[:, 4:], ((0, 6), (4, 10)), (6, 10))
    assert strided_digest(lies, 4, [1, 10], (6, 10)) != strided_digest(lies.roll(1, 0), 4, [1, 10], (6, 10))
    with pytest.raises(UndigestedError):
        strided_digest(torch.zeros(3, 3), 0, [7, 1], (6, 10))


def test_a_digest_sees_every_row_of_a_large_tensor() -> None:
    one = torch.zeros(3 << 16)
    seen = {int(digest(one))}
    for place in (0, (1 << 16) - 1, 1 << 16, (2 << 16) + 2, len(one) - 1):
        other = one.clone()
        other[place] = 1.0
        seen.add(int(digest(other)))
    assert len(seen) == 6


def test_memory_can_be_freed_after_its_digest_was_taken() -> None:
    """As `cpu_offload.DroppedCopy` does between the uses of a copy."""
    tensor = torch.randn(8, 8)
    assert digest(tensor) == digest(tensor.clone())
    tensor.untyped_storage().resize_(0)
