"""Copies in pinned host memory share blocks, so that rounding up to powers of two costs little."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.engines import pinned_memory
from trl_realloc.engines.pinned_memory import pinned_blocks, pinned_copies


KIB, GIB = 2**10, 2**30


@given(st.lists(st.integers(0, 100 * KIB), max_size=40), st.sampled_from([KIB, 16 * KIB, 64 * KIB]))
def test_every_tensor_has_a_place_of_its_own_in_a_block_of_a_power_of_two(sizes: list[int], block_bytes: int) -> None:
    blocks = pinned_blocks(sizes, block_bytes)
    assert sorted(at for _, starts in blocks for at in starts) == list(range(len(sizes)))
    for size, starts in blocks:
        assert size & (size - 1) == 0
        end = 0
        for at, start in sorted(starts.items(), key=lambda place: (place[1], sizes[place[0]])):
            assert start >= end and start % 256 == 0
            end = start + sizes[at]
        assert end <= size


def test_the_layers_of_a_7b_model_take_little_more_than_their_bytes() -> None:
    """Qwen2.5 7B in 16 bits, of which torch would take 28 GB for 15, one tensor at a time."""
    hidden, inner, kv, vocabulary = 3584, 18944, 512, 152064
    layer = [hidden * inner] * 3 + [hidden * hidden] * 2 + [hidden * kv] * 2 + [hidden] * 4 + [kv] * 2
    sizes = [2 * n for n in [hidden * vocabulary] * 2 + layer * 28]
    taken = sum(size for size, _ in pinned_blocks(sizes))
    assert sum(1 << (size - 1).bit_length() for size in sizes) > 1.8 * sum(sizes)
    assert taken < 1.15 * sum(sizes)


def test_copies_have_the_values_shapes_and_dtypes_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append(pin_memory)  # which this machine may not have
        return torch.zeros(size, dtype=dtype)

    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7, 2, dtype=torch.bfloat16).T,
        "c": torch.tensor(4, dtype=torch.int64),
        "d": torch.empty(0, 3),
    }
    monkeypatch.setattr(pinned_memory, "torch", type("Torch", (), {"empty": staticmethod(empty), "uint8": torch.uint8}))
    copies = pinned_copies(tensors)
    assert list(copies) == list(tensors) and asked == [True]
    for name, tensor in tensors.items():
        assert copies[name].dtype == tensor.dtype and torch.equal(copies[name], tensor)
        assert copies[name].is_contiguous()
