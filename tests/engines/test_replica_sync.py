"""Digests of tensors, by which replicas are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.engines.training import replica_sync as replicas
from trl_realloc.engines.training.replica_sync import digest


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool]
)
def test_equal_bits_have_equal_digests_and_a_changed_one_another(dtype: torch.dtype) -> None:
    one = (torch.arange(1, 3001).view(30, 100) % 7).to(dtype)
    other = one.clone()
    assert digest(one) == digest(other) == digest(one.t().contiguous().t())
    other[17, 3] = 1 - other[17, 3].to(torch.int64)
    assert digest(one) != digest(other)


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=40), st.randoms())
def test_a_digest_depends_on_the_order_of_the_elements(numbers: list[int], draw: Any) -> None:
    shuffled = list(numbers)
    draw.shuffle(shuffled)
    one, other = torch.tensor(numbers, dtype=torch.float32), torch.tensor(shuffled, dtype=torch.float32)
    assert (digest(one) == digest(other)) == (numbers == shuffled)


def test_a_digest_sees_every_slice_of_a_large_tensor() -> None:
    of_slice = replicas.DIGEST_SLICE
    one = torch.zeros(2 * of_slice + 3)
    seen = {int(digest(one))}
    for place in (
        0,
        replicas.DIGEST_SLICE - 1,
        replicas.DIGEST_SLICE,
        2 * replicas.DIGEST_SLICE,
        2 * replicas.DIGEST_SLICE + 2,
    ):
        other = one.clone()
        other[place] = 1.0
        seen.add(int(digest(other)))
    assert len(seen) == 6
