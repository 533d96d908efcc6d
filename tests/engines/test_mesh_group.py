"""The collectives of a mesh copy tensors only where they have to, and tensors are put into buckets for them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trl_realloc.engines.mesh_group import MeshGroup, in_buckets


SIZES = st.lists(st.tuples(st.integers(0, 40), st.sampled_from("ab")))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of what is sent. Each collective of a mesh of two ranks that hold the same doubles it."""
    addresses: list[int] = []

    def collective(tensor: Tensor, *_: Any, **__: Any) -> None:
        addresses.append(tensor.data_ptr())
        tensor.mul_(2)

    for name in ("all_reduce", "reduce", "broadcast"):
        monkeypatch.setattr(dist, name, collective)
    return addresses


def test_one_large_tensor_is_sent_from_its_own_memory(sent: list[int]) -> None:
    """An embedding is larger than a bucket; a copy of it would be as much memory again."""
    mesh, tensor = MeshGroup((0, 1), 0), torch.ones(3, 4, requires_grad=True)
    mesh.sum_([tensor])
    mesh.broadcast([tensor], 1)
    assert sent == [tensor.data_ptr()] * 2
    assert torch.equal(tensor.detach(), torch.full((3, 4), 4.0))


@pytest.mark.parametrize("kind", ["transposed", "several"])
def test_others_are_copied_and_copied_back(sent: list[int], kind: str) -> None:
    tensors = [torch.ones(3, 4).t()] if kind == "transposed" else [torch.ones(3), torch.ones(2, 2)]
    MeshGroup((0, 1), 0).sum_(tensors)
    assert len(sent) == 1 and sent[0] not in [tensor.data_ptr() for tensor in tensors]
    assert all(torch.equal(tensor, torch.full_like(tensor, 2.0)) for tensor in tensors)


@pytest.mark.parametrize(("index", "kept"), [(0, 2.0), (1, 1.0)])
def test_a_sum_for_one_rank_leaves_the_tensors_of_the_others(sent: list[int], index: int, kept: float) -> None:
    """gloo changes what is given to a reduce on every rank."""
    tensor = torch.ones(3, 4)
    MeshGroup((0, 1), 0).sum_to([tensor], index)
    assert torch.equal(tensor, torch.full((3, 4), kept))


@given(SIZES, st.integers(0, 60))
def test_buckets_keep_the_order_the_limit_and_the_kind(items: list[tuple[int, str]], limit: int) -> None:
    made = list(in_buckets(items, lambda item: item[0], limit, lambda item: item[1]))
    assert [item for bucket in made for item in bucket] == items
    for bucket in made:
        assert bucket and len({kind for _, kind in bucket}) == 1
        assert len(bucket) == 1 or sum(size for size, _ in bucket) <= limit


@given(SIZES, st.integers(0, 60))
def test_a_bucket_ends_only_where_the_next_item_does_not_fit(items: list[tuple[int, str]], limit: int) -> None:
    made = list(in_buckets(items, lambda item: item[0], limit, lambda item: item[1]))
    for bucket, following in itertools.pairwise(made):
        is_full = sum(size for size, _ in bucket) + following[0][0] > limit
        assert is_full or following[0][1] != bucket[0][1]


def test_items_are_read_no_further_than_needed() -> None:
    read: list[int] = []

    def items() -> object:
        for number in range(10):
            read.append(number)
            yield number

    next(in_buckets(items(), lambda item: 1, 3))  # type: ignore[arg-type]
    assert read == [0, 1, 2, 3]
