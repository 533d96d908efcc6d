"""The collectives of a mesh copy tensors only where they have to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trl_realloc.engines.mesh_group import MeshGroup


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
