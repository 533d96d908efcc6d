"""Log-probabilities and entropies of tokens from logits in memory, and their gradient with respect to logits.

`sliced_head` computes them without the logits in memory, `vocab_parallel` from logits that are split over a
tensor-parallel group. Both use the gradient from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..device import is_accelerator
from ..requests import SamplingMask
from .sampling_mask import keep_above, keep_mask


class TokenLogprobs(torch.autograd.Function):
    """Log-probability of each target and entropy of each distribution, from logits (tokens, vocabulary).

    Works on slices of rows and writes the gradient into the memory of the logits, so the peak is one copy of them and a
    slice, or two slices if the loss depends on the entropy, where `log_softmax` and autograd hold three copies.
    Backward overwrites the logits, so it runs once.

    Args (of `apply`):
        targets: (tokens,) int64.
        temperature: divisor of the logits.
        sampling_mask: rules for the tokens of the distribution, which always has the target; `None` for the whole
            vocabulary.

    Returns:
        `logprobs` and `entropy`, (tokens,), natural logarithms, of softmax(logits / temperature) over the sampling
        mask: float32, or float64 for logits in float64.
    """

    # elements of the float32 working copy: 16 MiB, which fits a CPU's caches; 64 MiB where each operation is a kernel
    SLICE, SLICE_ON_ACCELERATOR = 1 << 22, 1 << 24

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, sampling_mask: SamplingMask | None = None
    ) -> tuple[Tensor, Tensor]:
        dtype = precise(logits.dtype)
        logprobs = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        least = None if sampling_mask is None else torch.empty_like(logprobs)
        for rows, (x, p) in TokenLogprobs.slices(logits, dtype, 2):
            x.copy_(logits[rows]).div_(temperature)
            highest = x.amax(-1, keepdim=True)
            x.sub_(highest)
            if sampling_mask is not None and least is not None:
                least[rows] = keep_mask(x, targets[rows], sampling_mask)
            sums = torch.exp(x, out=p).sum(-1, keepdim=True)
            x -= torch.log(sums)
            normalizer[rows] = (highest + torch.log(sums)).squeeze(-1)
            logprobs[rows] = x.gather(-1, targets[rows, None]).squeeze(-1)
            # for a logit of -inf, 0 * -inf counts as 0
            entropy[rows] = -p.div_(sums).mul_(x).nan_to_num_(nan=0.0).sum(-1)
            if least is not None:
                least[rows] -= torch.log(sums).squeeze(-1)
        ctx.save_for_backward(logits, targets, normalizer, entropy)
        ctx.temperature, ctx.least = temperature, least
        ctx.set_materialize_grads(False)  # the gradient of an output that the loss does not use is `None`
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, targets, normalizer, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = scaled(gradients, normalizer, ctx.temperature)
        for rows, (log_p,) in TokenLogprobs.slices(logits, normalizer.dtype, 1):
            log_p.copy_(logits[rows]).div_(ctx.temperature).sub_(normalizer[rows, None])
            if ctx.least is not None:
                keep_above(log_p, ctx.least[rows], targets[rows])
            of_rows = None if of_entropy is None else (of_entropy[rows], entropy[rows])
            logits[rows] = logits_gradient(log_p, targets[rows], of_logprobs[rows], of_rows).to(logits.dtype)
        return logits, None, None, None

    @staticmethod
    def slices(logits: Tensor, dtype: torch.dtype, copies: int) -> Iterator[tuple[slice, list[Tensor]]]:
        """Slices of the rows, each with working memory for its copies. All slices share this memory, because on a CPU
        the first use of new memory takes longer than the arithmetic."""
        slices = TokenLogprobs.rows(logits, logits.shape[1])
        longest = slices[0].stop if slices else 0
        work = [logits.new_empty((longest, logits.shape[1]), dtype=dtype) for _ in range(copies)]
        for rows in slices:
            yield rows, [memory[: rows.stop - rows.start] for memory in work]

    @staticmethod
    def rows(logits: Tensor, ids: int) -> list[slice]:
        """The slices of the rows of logits, with at most this number of ids in each."""
        size = TokenLogprobs.SLICE_ON_ACCELERATOR if is_accelerator(logits.device) else TokenLogprobs.SLICE
        tokens, step = len(logits), max(1, size // max(ids, 1))
        return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which log-probabilities are computed from logits of this dtype: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def scaled(gradients: tuple[Tensor | None, ...], like: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
    """The gradients of log-probabilities and entropies, (tokens,) each, divided by the temperature.

    Args:
        gradients: gradients of log-probabilities and entropies; `None` if the loss does not depend on them.
        like: (tokens,) tensor with the dtype and device of the result.
    """
    of_logprobs, of_entropy = gradients
    return (
        torch.zeros_like(like) if of_logprobs is None else of_logprobs / temperature,
        None if of_entropy is None else of_entropy / temperature,
    )


def logits_gradient(
    log_p: Tensor,
    targets: Tensor,
    of_logprobs: Tensor,
    entropy: tuple[Tensor, Tensor] | None = None,
    is_here: Tensor | None = None,
) -> Tensor:
    """The gradient with respect to the logits x of a loss of log-probabilities l and entropies H:
    dl/dx_i = [i is the target] - p_i and dH/dx_i = -p_i (log p_i + H).

    Without `entropy` it is computed in the memory of `log_p`, otherwise in it and another tensor of its size.

    Args:
        log_p: (rows, ids), log-probabilities of all ids, or of the rank's part of the vocabulary. Overwritten.
        targets: (rows,) int64, index into the ids; any index where `is_here` is False.
        of_logprobs: (rows,), derivative of the loss by each l.
        entropy: derivative of the loss by each H, and H, (rows,) each; `None` if the loss does not depend on H.
        is_here: (rows,) bool, whether the target is in the rank's part of the vocabulary; `None` for everywhere.
    """
    ones = torch.ones_like(of_logprobs) if is_here is None else is_here.to(of_logprobs.dtype)
    if entropy is None:
        return log_p.exp_().neg_().scatter_add_(-1, targets[:, None], ones[:, None]).mul_(of_logprobs[:, None])
    of_entropy, values = entropy
    p = log_p.exp()
    # log_p is infinite for a logit of -inf, where p = 0. A gradient that is not finite must stay so
    second = log_p.masked_fill_(p == 0, 0.0).add_(values[:, None]).mul_(p).mul_(of_entropy[:, None])
    return p.neg_().scatter_add_(-1, targets[:, None], ones[:, None]).mul_(of_logprobs[:, None]).sub_(second)
