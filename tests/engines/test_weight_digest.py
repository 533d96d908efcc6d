"""Digests of tensors and of their parts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.engines.weight_digest import UndigestedError, digest, part_digest, strided_digest, total


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool]


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


@given(st.integers(2, 60), st.sampled_from(DTYPES[:4]), st.data())
def test_a_digest_depends_on_the_order_of_the_elements(count: int, dtype: torch.dtype, data: Any) -> None:
    one = drawn([count], dtype, data.draw(st.integers(0, 1000)))
    of_word = 8 // dtype.itemsize
    first = data.draw(st.integers(0, count - 1).filter(lambda at: of_word == 1 or at % of_word != of_word - 1))
    other, second = one.clone(), data.draw(st.integers(0, count - 1))
    other[first], other[second] = one[second], one[first]
    same = torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert (digest(one) == digest(other)) == same


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_a_digest_is_that_of_neither_the_transposed_the_negated_nor_the_moved_tensor(dtype: torch.dtype) -> None:
    one = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    others = [one.t(), -one, one.roll(1, 0), one.roll(1, 1), one.flip(0), one.flip(1), one.roll(8, 1)]
    assert len({int(digest(each)) for each in (one, *others)}) == 8


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
    """As `residency.DroppedCopy` does between the uses of a copy."""
    tensor = torch.randn(8, 8)
    assert digest(tensor) == digest(tensor.clone())
    tensor.untyped_storage().resize_(0)
