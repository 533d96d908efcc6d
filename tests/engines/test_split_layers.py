"""How often the layers of a tensor-parallel rank sum over their group, and in which dtype."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.training import split_layers
from trl_realloc.engines.training.split_layers import clear_gradient, leaf_of, split_inputs, split_outputs


class Block(nn.Module):
    """An attention and an MLP without their arithmetic, behind norms, with residuals: of two ranks the first one."""

    def __init__(self, group: MeshGroup) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.q, self.k, self.v, self.gate, self.up = (nn.Linear(8, 4, bias=False) for _ in range(5))
        self.o, self.down = (nn.Linear(4, 8) for _ in range(2))
        for linear in (self.q, self.k, self.v, self.gate, self.up):
            split_outputs(linear, group)
        for linear in (self.o, self.down):
            split_inputs(linear, group)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.o(self.q(y) * self.k(y) + self.v(y))
        y = self.norms[1](x)
        return x + self.down(self.gate(y) * self.up(y))


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype of each all-reduce, which leaves its tensor as it is: the other rank has zeros."""
    dtypes: list[torch.dtype] = []
    monkeypatch.setattr(split_layers.dist, "all_reduce", lambda tensor, group: dtypes.append(tensor.dtype))
    return dtypes


GROUP = MeshGroup((0, 1), 0)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_block_sums_once_forward_and_once_backward(summed: list[torch.dtype], recomputes: bool) -> None:
    block, x = Block(GROUP), torch.randn(3, 8, requires_grad=True)
    out: Any = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
    assert len(summed) == 2
    out.sum().backward()
    # torch computes no more again than what is kept for the backward, so not the last sum
    assert len(summed) == (5 if recomputes else 4)
    assert x.grad is not None and all(p.grad is not None for p in block.parameters())


@pytest.mark.parametrize("recomputes", [False, True])
def test_nothing_of_a_block_is_left_after_its_backward(summed: list[torch.dtype], recomputes: bool) -> None:
    """No reference cycle keeps the inputs, which would take the memory of a layer for each micro-batch."""
    block, x = Block(GROUP), torch.randn(3, 8, requires_grad=True)
    normed: list[weakref.ref[Tensor]] = []
    for norm in block.norms:
        norm.register_forward_hook(lambda module, given, output: normed.append(weakref.ref(output)))
    out: Any = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
    out.sum().backward()
    del out
    gc.collect()
    assert len(normed) == (4 if recomputes else 2) and not any(reference() is not None for reference in normed)


def test_under_autocast_gradients_are_summed_in_the_dtype_of_the_products(summed: list[torch.dtype]) -> None:
    block, x = Block(GROUP), torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(x)
    out.sum().backward()
    assert summed == [torch.bfloat16] * 4
    assert block.q.weight.grad is not None and block.q.weight.grad.dtype is torch.float32


def test_scoring_sums_forward_alone_and_its_results_are_those_of_training(summed: list[torch.dtype]) -> None:
    block, x = Block(GROUP), torch.randn(3, 8)
    with torch.no_grad():
        scored = block(x)
    assert len(summed) == 2
    assert torch.equal(scored, block(x))


def test_a_layer_whose_input_needs_no_gradient_does_not_sum_one(summed: list[torch.dtype]) -> None:
    """Below an adapter's first layer everything is frozen."""
    block, x = Block(GROUP).requires_grad_(False), torch.randn(3, 8)
    block.down.requires_grad_(True)
    block(x).sum().backward()
    assert len(summed) == 2


def test_a_parameter_that_is_whole_is_its_own_leaf() -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert leaf_of(parameter) is parameter
    parameter.grad = torch.ones(3)
    clear_gradient(parameter)
    assert parameter.grad is None
