"""The language head and the log-probabilities in one function, slice by slice, so that the logits of all tokens are
never in memory.

Log-probabilities from logits that are in memory are in `packed_forward`, from logits that are split over a
tensor-parallel group in `vocab_parallel`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...plan.assignment import LOGITS_SLICE, MOST_LOGITS


# `MOST_LOGITS` and `LOGITS_SLICE` of a CPU: 256 MiB and 64 MiB in float32. More logits are computed in slices, and
# again in the backward, which is a third more work of the head.
MOST_WHOLE_ON_CPU, SLICE_ON_CPU = 1 << 26, 1 << 24


class SlicedLogprobs(torch.autograd.Function):
    """Log-probability of each target and entropy of each distribution, from the input of a linear language head.

    Neither direction holds more logits than those of one slice of rows. The backward computes them again.

    Args (of `apply`):
        hidden: (tokens, width), the input of the head.
        weight, bias: (vocabulary, width) and (vocabulary,) or `None`, of the head.
        targets: (tokens,) int64.
        temperature: the logits are divided by it.
        dtype: of the products, as autocast or the head's own dtype say.

    Returns:
        `logprobs` and `entropy`, (tokens,) float32, natural logarithms, of softmax(logits / temperature). The entropy
        has no gradient.
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
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        matrix = weight.to(dtype)
        for rows in row_slices(hidden, weight):
            x = _logits(hidden[rows], matrix, bias).float() / temperature
            normalizer[rows] = torch.logsumexp(x, -1)
            logprobs[rows] = x.gather(-1, targets[rows, None]).squeeze(-1) - normalizer[rows]
            x -= normalizer[rows, None]
            p = torch.exp(x)
            entropy[rows] = -(p.mul_(x)).nan_to_num_(nan=0.0).sum(-1)  # for a logit of -inf, 0 * -inf counts as 0
        ctx.save_for_backward(hidden, targets, normalizer)
        # as attributes: ZeRO-3 frees a gathered weight after the forward and gathers it again before the backward,
        # which the check of saved tensors takes for a change
        ctx.weight, ctx.bias, ctx.temperature, ctx.dtype = weight, bias, temperature, dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden, targets, normalizer = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = torch.zeros_like(weight) if needs_weight else None
        of_bias = torch.zeros_like(bias) if needs_bias and bias is not None else None
        matrix, scale = weight.to(ctx.dtype), gradients[0] / ctx.temperature
        for rows in row_slices(hidden, weight):
            part = hidden[rows].to(ctx.dtype)
            p = torch.exp(_logits(part, matrix, bias).float() / ctx.temperature - normalizer[rows, None])
            p.neg_().scatter_add_(-1, targets[rows, None], torch.ones_like(p[:, :1])).mul_(scale[rows, None])
            of_logits = p.to(ctx.dtype)
            if of_hidden is not None:
                of_hidden[rows] = (of_logits @ matrix).to(hidden.dtype)
            if of_weight is not None:
                of_weight += of_logits.T @ part
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return of_hidden, of_weight, of_bias, None, None, None


def _logits(hidden: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    hidden = hidden.to(matrix.dtype)
    return hidden @ matrix.T if bias is None else torch.addmm(bias.to(matrix.dtype), hidden, matrix.T)


def row_slices(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Slices of the rows of `hidden` with at most `LOGITS_SLICE` logits each, or one row."""
    step = max(1, (SLICE_ON_CPU if hidden.device.type == "cpu" else LOGITS_SLICE) // weight.shape[0])
    for start in range(0, hidden.shape[0], step):
        yield slice(start, start + step)


def works_in_slices(model: Any, tokens: int) -> bool:
    """Whether the model's head is computed in slices for so many tokens: their logits are many, and the head is a plain
    linear layer that this process has whole. An adapter's head, a split one and one with hooks of Accelerate are not.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or isinstance(head.weight, DTensor) or hasattr(head, "_hf_hook"):
        return False
    most = MOST_WHOLE_ON_CPU if head.weight.device.type == "cpu" else MOST_LOGITS
    return tokens * head.out_features > most


@contextlib.contextmanager
def sliced(
    head: nn.Linear, pick: Callable[[Tensor], Tensor], targets: Tensor, temperature: float
) -> Iterator[list[Tensor]]:
    """Inside, the forward of a language head returns log-probabilities and entropies, (tokens, 2) float32, in place of
    logits. It is still a call of the module, so DeepSpeed gathers its weight as for any other.

    Args:
        pick: from the head's input to its rows for `targets`, (tokens, width).

    Yields:
        A list to which each such result is appended. If the model's logits are not that tensor, the model changes its
        logits after the head (a soft cap, a scale), and they mean nothing.
    """
    results: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
        with torch.autocast(kind, enabled=False):
            columns = SlicedLogprobs.apply(pick(hidden), head.weight, head.bias, targets, temperature, dtype)
        results.append(torch.stack(columns, -1))
        return results[-1]

    before = vars(head).get("forward")
    head.forward = forward  # type: ignore[assignment]
    try:
        yield results
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before  # type: ignore[method-assign]
