"""The language head and the log-probabilities in one function, slice by slice, so that the logits of all tokens are
never in memory. Logits are computed again in the backward, which adds a third to the head's work. `heads` decides
when.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ...plan.assignment import LOGITS_SLICE
from ..mesh_group import MeshGroup
from ..requests import SamplingMask
from .packed_attention import backbone_of
from .sampling_mask import highest_of, keep_above, keep_mask
from .split_layers import part_of
from .tensor_parallel import box_of, is_split, local
from .token_logprobs import logits_gradient, precise, scaled


SLICE_ON_CPU = 1 << 24  # `LOGITS_SLICE` on a CPU: 64 MiB in float32


@dataclass
class EntropyUse:
    """Flag of one forward: whether the loss of the current backward depends on its entropies."""

    in_loss: bool = True


class SlicedLogprobs(torch.autograd.Function):
    """Log-probability of each target and entropy of each distribution, from the input of a linear language head, which
    may be a rank's part of the vocabulary.

    Forward and backward hold the logits of only one slice of rows; the backward computes them again. Over a
    tensor-parallel group the forward has two collectives of four numbers per token, and the backward one of the
    gradient of the head's input.

    Args (of `apply`):
        hidden: (tokens, width), input of the head.
        weight, bias: (ids, width) and (ids,) or `None`, of the head or of the rank's part of it, which may be empty.
        targets: (tokens,) int64, ids of the full vocabulary.
        temperature: divisor of the logits.
        dtype: dtype of the products, from autocast or the head.
        first: first id of the rank's part.
        group: tensor-parallel group; `None` for a whole head.
        use: flag that an `Unstacked` after this function sets; `None` if there is none.
        sampling_mask: tokens of the distribution, as in `vocab_parallel.SplitLogprobs`.

    Returns:
        `logprobs` and `entropy`, (tokens,), natural logarithms, of softmax(logits / temperature): float32, or float64
        if the products are float64.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
        first: int,
        group: MeshGroup | None,
        use: EntropyUse | None,
        sampling_mask: SamplingMask | None = None,
    ) -> tuple[Tensor, Tensor]:
        (tokens, ids), work = (hidden.shape[0], weight.shape[0]), precise(dtype)
        highest = torch.full((tokens,), float("-inf"), dtype=work, device=hidden.device)
        # for each token: sum of exponentials, sum of logits weighted by them, and the target's logit
        sums = torch.zeros(3, tokens, dtype=work, device=hidden.device)
        local_targets = targets - first
        is_here = (local_targets >= 0) & (local_targets < ids)
        matrix = weight.to(dtype)
        least = None if sampling_mask is None else torch.empty_like(highest)
        # all ranks compute a mask together, in the same slices
        together = None if sampling_mask is None or group is None else group.max(ids)
        for rows in row_slices(hidden, weight, together):
            x = logits_of_rows(hidden[rows], matrix, bias).to(work) / temperature
            highest[rows] = highest_of(x, None if sampling_mask is None else group)[:, 0]
            if sampling_mask is not None and least is not None:
                x -= highest[rows, None]
                columns = local_targets[rows].clamp(0, max(ids - 1, 0))
                least[rows] = highest[rows] + keep_mask(x, columns, sampling_mask, is_here[rows], group)
                x += highest[rows, None]
            if not ids:
                continue
            p = torch.exp(x - highest[rows, None].clamp(min=torch.finfo(work).min))
            sums[0, rows] = p.sum(-1)
            picked = x.gather(-1, local_targets[rows].clamp(0, ids - 1)[:, None]).squeeze(-1)
            sums[2, rows] = torch.where(is_here[rows], picked, 0.0)
            sums[1, rows] = p.mul_(x).nan_to_num_(nan=0.0).sum(-1)  # for a logit of -inf, 0 * -inf counts as 0
        if group is not None:
            local_highest = highest.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group.group)
            sums[:2] *= torch.exp(local_highest - highest)
            dist.all_reduce(sums, group=group.group)
        normalizer = highest + torch.log(sums[0])
        entropy = normalizer - sums[1] / sums[0]
        ctx.save_for_backward(hidden, local_targets, is_here, normalizer, entropy)
        # as attributes: ZeRO-3 frees a gathered weight after the forward and gathers it again before the backward,
        # which the check of saved tensors would report as a change
        ctx.weight, ctx.bias, ctx.temperature, ctx.dtype, ctx.group = weight, bias, temperature, dtype, group
        ctx.use, ctx.least = use, None if least is None else least - normalizer
        ctx.set_materialize_grads(False)  # the gradient of an output that the loss does not use is `None`
        return sums[2] - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, local_targets, is_here, normalizer, entropy = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.zeros_like(hidden) if needs_hidden else None
        # in float32, because the sum would be rounded after each slice
        of_weight = torch.zeros_like(weight, dtype=precise(weight.dtype)) if needs_weight else None
        of_bias = torch.zeros_like(bias) if needs_bias and bias is not None else None
        matrix, uses_entropy = weight.to(ctx.dtype), ctx.use is None or ctx.use.in_loss
        of_columns = gradients if uses_entropy else (gradients[0], None)
        of_logprobs, of_entropy = scaled(of_columns, normalizer, ctx.temperature)
        for rows in row_slices(hidden, weight):
            part = hidden[rows].to(ctx.dtype)
            log_p = logits_of_rows(part, matrix, bias).to(normalizer.dtype) / ctx.temperature - normalizer[rows, None]
            columns = local_targets[rows].clamp(0, weight.shape[0] - 1)
            if ctx.least is not None:
                keep_above(log_p, ctx.least[rows], columns, is_here[rows])
            of_rows = None if of_entropy is None else (of_entropy[rows], entropy[rows])
            of_logits = logits_gradient(log_p, columns, of_logprobs[rows], of_rows, is_here[rows]).to(ctx.dtype)
            if of_hidden is not None:
                of_hidden[rows] = (of_logits @ matrix).to(hidden.dtype)
            if of_weight is not None:
                of_weight += of_logits.T @ part
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        if of_hidden is not None and ctx.group is not None:
            dist.all_reduce(of_hidden, group=ctx.group.group)
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_hidden, of_weight, of_bias, None, None, None, None, None, None, None


class Unstacked(torch.autograd.Function):
    """The columns of a result of `sliced`, (tokens, 2): log-probabilities and entropies, (tokens,) each.

    The gradient of the result has a column of zeros if the loss does not depend on the entropies. Detecting the zeros
    would wait for the device, so this function, which runs before the backward of `SlicedLogprobs`, notes it in `use`.
    """

    @staticmethod
    def forward(ctx: Any, stacked: Tensor, use: EntropyUse) -> tuple[Tensor, Tensor]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        return stacked[:, 0].clone(), stacked[:, 1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        ctx.use.in_loss = gradients[1] is not None
        zeros = torch.zeros_like(next(column for column in gradients if column is not None))
        return torch.stack([zeros if column is None else column for column in gradients], -1), None


def logits_of_rows(hidden: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Logits (rows, vocabulary) of hidden states (rows, hidden), in the dtype of the head's `matrix`."""
    hidden = hidden.to(matrix.dtype)
    return hidden @ matrix.T if bias is None else torch.addmm(bias.to(matrix.dtype), hidden, matrix.T)


def row_slices(hidden: Tensor, weight: Tensor, ids: int | None = None) -> Iterator[slice]:
    """Slices of the rows of `hidden` with at most `LOGITS_SLICE` logits each, or one row; none for an empty head.

    Args:
        ids: number of ids of the head; by default those of `weight`.
    """
    ids = weight.shape[0] if ids is None else ids
    if not ids:
        return
    step = max(1, (SLICE_ON_CPU if hidden.device.type == "cpu" else LOGITS_SLICE) // ids)
    for start in range(0, hidden.shape[0], step):
        yield slice(start, start + step)


class _BackboneOutput(BaseModelOutput):
    """A backbone's output in which every field except the hidden states is `None`."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def logits_are_of_head(model: PreTrainedModel) -> bool:
    """True if a model returns the logits of its language head unchanged, without a scale or a cap.

    The model's own forward is called with stand-ins for the backbone and the head. No weight is read, and the result
    does not depend on the samples, so all ranks of a mesh get the same answer.
    """
    head, backbone, ids = model.get_output_embeddings(), backbone_of(model), torch.zeros(1, 1, dtype=torch.long)
    if type(head) is not nn.Linear or backbone is model:
        return False
    logits = torch.zeros(1, 1, 2)
    hidden = _BackboneOutput(last_hidden_state=torch.zeros(1, 1, head.in_features))
    with forward_replaced(backbone, lambda *args, **kwargs: hidden), forward_replaced(head, lambda *args: logits):
        try:
            return model(input_ids=ids, use_cache=False).logits is logits
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False  # the model does more than call the two


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Makes calls of a module run another function inside the context. Its hooks still run."""
    before = vars(module).get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before  # type: ignore[method-assign]


@contextlib.contextmanager
def sliced(
    head: nn.Linear,
    pick: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: float,
    use: EntropyUse,
    group: MeshGroup | None = None,
    sampling_mask: SamplingMask | None = None,
) -> Iterator[list[Tensor]]:
    """Makes the forward of a language head return log-probabilities and entropies, (tokens, 2) float32, instead of
    logits inside the context. It is still a call of the module, so DeepSpeed gathers its weight as usual. The result is
    one tensor for the hooks and for the model around the head; `Unstacked` divides it.

    Args:
        use: flag that the `Unstacked` sets.
        pick: returns the rows for `targets` of the head's input, (tokens, width).
        group: group over which the head is split, if it is. Transformers' forward of a split layer is replaced as well.
        sampling_mask: tokens of the distribution, see `TokenLogprobs`.

    Yields:
        A list to which each such result is appended.
    """
    results: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
        split_over = group if is_split(head.weight) else None
        weight, bias = part_of(head.weight), part_of(head.bias)
        first = box_of(head.weight)[0][0]
        with torch.autocast(kind, enabled=False):
            columns = SlicedLogprobs.apply(
                pick(local(hidden)), weight, bias, targets, temperature, dtype, first, split_over, use, sampling_mask
            )
        results.append(torch.stack(columns, -1))
        return results[-1]

    with forward_replaced(head, forward):
        yield results
