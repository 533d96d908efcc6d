"""Tensor-parallel forwards of linear layers, of experts, and of the embedding. A block (attention, MLP) has one
all-reduce of hidden states at the end of its forward, and one of their gradient at the end of its backward (Shoeybi et
al. 2019, arXiv 1909.08053, section 3).

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
    part of its gradient, and the backward sums the parts.

    The backward reads a saved tensor before it sums. Checkpointing computes a layer again when the first saved tensor
    is read, with sums over the group. A rank without tokens for its experts has read none of the experts', and would
    sum the gradient before it, the other ranks after it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: MeshGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x.new_empty(0))
        # not a view, which holds its base: the base has it as an attribute (`entered`), so neither would be freed
        return x.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        assert len(ctx.saved_tensors) == 1
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Leave(torch.autograd.Function):
    """The sum of the ranks' parts, on every rank. Overwrites its input. `inputs` get no gradient here, but autograd
    comes to the sums of their gradients (`_Enter`) on a rank whose part does not depend on them too."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: MeshGroup, *inputs: Tensor) -> Tensor:
        ctx.inputs = len(inputs)
        dist.all_reduce(part, group=group)
        ctx.mark_dirty(part)
        return part

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, *[None] * ctx.inputs


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


def left(part: Tensor, group: MeshGroup, *inputs: Tensor) -> Tensor:
    """The sum over the ranks of their results of a layer whose inputs are divided. Overwrites `part`.

    Args:
        inputs: entered tensors that `part` depends on, if it does not on every rank.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (part, *inputs)):
        result: Tensor = _Leave.apply(part, group.group, *inputs)
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
        padding = embedding.padding_idx  # in the full vocabulary
        with _replaced(embedding, {"weight": weight}, padding_idx=None):
            embedded = whole(torch.where(is_here, ids - start, 0))
        if padding is not None:  # its row has no gradient
            embedded = torch.where((ids == padding)[..., None], embedded.detach(), embedded)
        return left(torch.where(is_here[..., None], embedded, 0.0), group)

    embedding.forward = forward  # type: ignore[method-assign]


def split_experts(experts: nn.Module, group: MeshGroup, held: Callable[[], tuple[int, int]]) -> None:
    """Make a mixture's experts compute this rank's experts, of all tokens, and sum the results over the group.

    The module's own forward computes them, in the implementation that the model was loaded with, from one row for each
    pair of a token and one of these experts. The number of rows waits for the device once.

    Args:
        held: returns the first of this rank's experts and the end of their range.
    """
    whole = experts.forward

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        first, stop = held()
        trained = torch.is_grad_enabled() and top_k_weights.requires_grad
        # not by `entered`, which would round the weights under autocast
        weights: Tensor = _Enter.apply(top_k_weights, group.group) if trained else top_k_weights
        x, result = entered(hidden_states, group), torch.zeros_like(hidden_states)
        tokens, places = ((top_k_index >= first) & (top_k_index < stop)).nonzero(as_tuple=True)
        if len(tokens):
            parts = {name: part_of(parameter) for name, parameter in experts._parameters.items()}
            with _replaced(experts, parts, num_experts=stop - first):
                rows = x[tokens].to(hidden_states.dtype)
                part = whole(rows, top_k_index[tokens, places, None] - first, weights[tokens, places, None])
            result = result.index_add(0, tokens, part)
        return left(result.to(x.dtype), group, x, weights)

    experts.forward = forward  # type: ignore[assignment]


def split_norm(norm: nn.Module, group: MeshGroup, size: int) -> None:
    """Make an RMS norm over the channels of all heads normalize this rank's channels.

    Args:
        size: number of channels of all ranks.
    """

    def forward(hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.float32)
        squares = left(wide.pow(2).sum(-1, keepdim=True), group)
        if squares.requires_grad:  # each rank's channels depend on the sum
            squares = _Enter.apply(squares, group.group)
        scaled = wide * torch.rsqrt(squares / size + norm.variance_epsilon)  # type: ignore[operator]
        return _part(norm, "weight") * scaled.to(hidden_states.dtype)

    norm.forward = forward  # type: ignore[assignment]


@contextlib.contextmanager
def _replaced(module: nn.Module, parameters: dict[str, Tensor | None], **settings: int | None) -> Iterator[None]:
    """Gives a module other parameters and settings inside the context."""
    before = dict(module._parameters), {name: getattr(module, name) for name in settings}
    module._parameters.update(parameters)  # type: ignore[arg-type]
    vars(module).update(settings)
    try:
        yield
    finally:
        module._parameters.update(before[0])
        vars(module).update(before[1])


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
    "split_experts",
    "split_inputs",
    "split_norm",
    "split_outputs",
    "split_vocabulary",
]
