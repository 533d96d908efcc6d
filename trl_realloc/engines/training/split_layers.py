"""Tensor-parallel forwards of linear layers and of the embedding. A block (attention, MLP) has one all-reduce of hidden
states at the end of its forward, and one of their gradient at the end of its backward (Shoeybi et al. 2019,
arXiv 1909.08053, section 3).

`tensor_parallel` splits the parameters. They are DTensors, which record a rank's part of a parameter. The computations
use plain tensors: DTensor's dispatch takes four to eight times as long, and it would sum the gradient of a block's
input once for each of its projections.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ..mesh_group import MeshGroup
from ..torch_compat import memory_of


_LEAF, _ENTERED = "_trl_realloc_leaf", "_trl_realloc_entered"  # attributes of a parameter; of a block's input


class _Enter(torch.autograd.Function):
    """Passes the input, which every rank of the group has, to layers whose outputs are divided. Each rank computes a
    part of its gradient, and the backward sums the parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: MeshGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Leave(torch.autograd.Function):
    """The sum of the ranks' parts, on every rank. Overwrites its input."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: MeshGroup) -> Tensor:
        dist.all_reduce(part, group=group)
        ctx.mark_dirty(part)
        return part

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def entered(x: Tensor, group: MeshGroup) -> Tensor:
    """The input of a layer whose outputs are divided. Layers with the same input (queries, keys and values) share one,
    so that its gradient is summed over the group once, in autocast's dtype."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    cached: Tensor | None = getattr(x, _ENTERED, None)
    if cached is None:
        kind = x.device.type
        cast = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.is_floating_point() else x
        cached = _Enter.apply(cast, group.group)
        setattr(x, _ENTERED, cached)
    assert cached is not None, "it was made above"
    return cached


def left(part: Tensor, group: MeshGroup) -> Tensor:
    """The sum over the ranks of their results of a layer whose inputs are divided. Overwrites `part`."""
    if torch.is_grad_enabled() and part.requires_grad:
        result: Tensor = _Leave.apply(part, group.group)
        return result
    part = part.contiguous()
    dist.all_reduce(part, group=group.group)
    return part


# --- parameters -------------------------------------------------------------------------------------------------------


def leaf_of(parameter: Tensor) -> Tensor:
    """This rank's part of a split parameter as autograd sees it: a leaf with the same memory, which has the gradient.
    Returns an unsplit parameter itself."""
    memory = memory_of(parameter)
    if memory is parameter:
        return parameter
    leaf: Tensor | None = getattr(parameter, _LEAF, None)
    if leaf is None:
        leaf = nn.Parameter(memory.detach(), requires_grad=parameter.requires_grad)
        setattr(parameter, _LEAF, leaf)
    elif leaf.data_ptr() != memory.data_ptr() or leaf.shape != memory.shape:
        leaf.data = memory.detach()
    return leaf


def part_of(parameter: Tensor | None) -> Tensor | None:
    """This rank's part of a parameter, to compute with."""
    if parameter is None:
        return None
    return leaf_of(parameter) if torch.is_grad_enabled() and parameter.requires_grad else memory_of(parameter).detach()


def clear_gradient(parameter: nn.Parameter) -> None:
    """Clear the gradient of a parameter that may be split."""
    parameter.grad = None
    leaf: nn.Parameter | None = getattr(parameter, _LEAF, None)
    if leaf is not None:
        leaf.grad = None


# --- forwards ---------------------------------------------------------------------------------------------------------


def split_outputs(linear: nn.Linear, group: MeshGroup) -> None:
    """Make a linear layer compute this rank's outputs."""

    def forward(input: Tensor) -> Tensor:
        return functional.linear(
            entered(input, group), _part(linear, "weight"), part_of(linear._parameters.get("bias"))
        )

    linear.forward = forward  # type: ignore[method-assign]


def split_inputs(linear: nn.Linear, group: MeshGroup) -> None:
    """Make a linear layer compute all outputs from this rank's inputs, which are those of `split_outputs`."""

    def forward(input: Tensor) -> Tensor:
        result = left(functional.linear(input, _part(linear, "weight")), group)
        bias = part_of(linear._parameters.get("bias"))
        return result if bias is None else result + bias.to(result.dtype)

    linear.forward = forward  # type: ignore[method-assign]


def split_vocabulary(embedding: nn.Embedding, group: MeshGroup, first: Callable[[], int]) -> None:
    """Make an embedding look up the tokens of this rank's part of the vocabulary.

    Args:
        first: returns the first token id of this part.
    """
    whole = embedding.forward  # a subclass may scale the embeddings

    def forward(input: Tensor) -> Tensor:
        ids, weight, start = input, _part(embedding, "weight"), first()
        is_here = (ids >= start) & (ids < start + len(weight))
        if not len(weight):
            return left(weight.new_zeros(*ids.shape, weight.shape[1]), group)
        with _computing(embedding, weight) as padding:
            embedded = whole(torch.where(is_here, ids - start, 0))
        if padding is not None:  # its row has no gradient
            embedded = torch.where((ids == padding)[..., None], embedded.detach(), embedded)
        return left(torch.where(is_here[..., None], embedded, 0.0), group)

    embedding.forward = forward  # type: ignore[method-assign]


@contextlib.contextmanager
def _computing(embedding: nn.Embedding, weight: Tensor) -> Iterator[int | None]:
    """Gives an embedding a part of its rows inside the context. Yields its padding id in the full vocabulary."""
    parameter, padding = embedding._parameters["weight"], embedding.padding_idx
    embedding._parameters["weight"], embedding.padding_idx = weight, None  # type: ignore[assignment]
    try:
        yield padding
    finally:
        embedding._parameters["weight"], embedding.padding_idx = parameter, padding  # type: ignore[assignment]


def _part(module: nn.Module, name: str) -> Tensor:
    part = part_of(module._parameters[name])
    assert part is not None, "a layer that is split has a weight"
    return part


__all__ = [
    "clear_gradient",
    "entered",
    "leaf_of",
    "left",
    "part_of",
    "split_inputs",
    "split_outputs",
    "split_vocabulary",
]
