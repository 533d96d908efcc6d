"""The random numbers of a sample, the distribution that a token is sampled from, and the draw on rows of logits.

Each row is computed from itself alone, so a sample does not depend on its batch. Used by `transformers`, and in vLLM's
worker (`vllm_sampler`), where vLLM itself applies penalties and min-p. Imports nothing from this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


SEED, OFFSET = "trl_realloc_seed", "trl_realloc_offset"  # keys in vLLM's SamplingParams.extra_args
AT_ONCE = 2**21  # most probabilities per block of `draw` on a CPU, in float64 too
CANDIDATES = 512  # number of most probable tokens that `keep_nucleus` tries first on a CPU


def seed_arguments(seed: int, offset: int, by_seed: bool, by_position: bool) -> dict[str, Any]:
    """The arguments of vLLM's `SamplingParams` that give a request its seed.

    Args:
        offset: number of the response's tokens that were sampled before, perhaps by another engine.
        by_seed: result of `vllm_host.draws_by_seed`.
        by_position: result of `vllm_compat.draws_by_position`. If false, a continued response gets another seed,
            because the same seed would repeat the random numbers of the response's first tokens.
    """
    if by_seed:
        return {"extra_args": {SEED: seed, OFFSET: offset}}
    if by_position or not offset:
        return {"seed": seed}
    return {"seed": int(np.random.SeedSequence((seed, offset)).generate_state(1, np.uint64)[0] >> 1)}


def uniforms(arguments: Mapping[str, Any], count: int) -> np.ndarray[Any, Any]:
    """Numbers in [0, 1) for the next `count` tokens of a response: (count,) float64. The numbers of earlier tokens are
    skipped.

    Args:
        arguments: the `extra_args` of `seed_arguments`.
    """
    offset = arguments[OFFSET]
    return np.random.default_rng(arguments[SEED]).random(offset + count)[offset:]


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of tokens that have been seen by `penalty`, and multiply negative ones by it.

    The formula is from Keskar et al., "CTRL" (2019), as in vLLM and Transformers. Apply it before the temperature.

    Args:
        logits: (rows, vocabulary).
        seen: (rows, vocabulary) bool, whether the token is in the prompt or in the response so far.
        penalty: greater than 0; 1 changes nothing.
    """
    if penalty == 1.0:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_likely(logits: Tensor, min_p: float) -> Tensor:
    """Set the logits of tokens with less than `min_p` times the probability of the most probable token to -inf.

    Args:
        logits: (rows, vocabulary), after temperature.
        min_p: share of the greatest probability in [0, 1]; 0 changes nothing.
    """
    if min_p == 0.0:
        return logits
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < probs.amax(-1, keepdim=True) * min_p, -torch.inf)


def keep_top(logits: Tensor, k: Tensor) -> Tensor:
    """Set the logits of tokens that are less probable than the k-th to -inf. Tokens as probable as the k-th stay, so
    more than k may stay.

    Args:
        logits: (rows, vocabulary).
        k: (rows,) integers from 1.
    """
    k = k.long().clamp(max=logits.shape[-1])
    largest = logits.topk(int(k.max()), -1).values
    return logits.masked_fill(logits < largest.gather(-1, k[:, None] - 1), -torch.inf)


def keep_nucleus(logits: Tensor, p: Tensor) -> Tensor:
    """Keep a token if all more probable ones together have less than the probability `p`; set the other logits to -inf.
    Tokens as probable as the last one kept stay (vLLM and Transformers keep those that their sorting puts last, which
    depends on the batch).

    Sums are in float64. On a CPU only rows that need more than the `CANDIDATES` most probable tokens are sorted. On a
    GPU sorting all rows takes less time than waiting for the number of these rows.

    Args:
        logits: (rows, vocabulary), after temperature.
        p: (rows,) probabilities in (0, 1]; a row with 1 is unchanged.
    """
    vocabulary = logits.shape[-1]
    most = logits.amax(-1, keepdim=True)
    bound = p.double()[:, None] * (logits - most).exp().sum(-1, keepdim=True, dtype=torch.float64)
    largest = logits.topk(vocabulary if logits.is_cuda else min(vocabulary, CANDIDATES), -1).values
    least, enough = _least_inside(largest, most, bound)
    if largest.shape[-1] < vocabulary and (rows := (~enough & (p < 1)).nonzero()[:, 0]).numel():
        ordered = logits[rows].sort(-1, descending=True).values
        least[rows] = _least_inside(ordered, most[rows], bound[rows])[0]
    return logits.masked_fill((logits < least) & (p < 1)[:, None], -torch.inf)


def _least_inside(largest: Tensor, most: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """The least logit (rows, 1) before which the probabilities sum to less than `bound` (rows, 1) float64, among the
    `largest` (rows, n) in descending order, and whether (rows,) the next one is among them too, so that it is the least
    of all. `most` (rows, 1) is the logit whose probability counts as 1."""
    probs = (largest - most).exp().double()
    inside = probs.cumsum(-1) - probs < bound  # true for the first tokens of a row
    return largest.gather(-1, inside.sum(-1, keepdim=True).clamp(min=1) - 1), ~inside[:, -1]


def draw(logprobs: Tensor, uniform: Tensor, block: int = 256) -> Tensor:
    """The first token at which the cumulative probability exceeds `uniform` times the total. A token of probability 0
    is never chosen.

    Sums are in float64, because in float32 tokens with a probability below 6e-8 would never be chosen. They are taken
    over blocks, then over the tokens of one block: 0.7 ms, where a cumulative sum over 64 rows of 32,000 takes 5.3. On
    a CPU a few rows are processed at a time, because malloc maps memory of more than 32 MiB anew each time: 64 rows of
    128,000 took 44 ms of a core's time at once, and 13 in parts.

    Args:
        logprobs: (rows, vocabulary) float32.
        uniform: (rows, 1) float64 in [0, 1).

    Returns:
        (rows,) int64.
    """
    rows, vocabulary = logprobs.shape
    most = max(1, AT_ONCE // vocabulary)
    if not logprobs.is_cuda and rows > most:
        parts = zip(logprobs.split(most), uniform.split(most), strict=True)
        return torch.cat([draw(*part, block) for part in parts])
    probs = logprobs.exp()
    if vocabulary % block:  # without a remainder, padding would only copy them
        probs = nn.functional.pad(probs, (0, -vocabulary % block))
    probs = probs.view(rows, -1, block)
    ends = probs.sum(-1, dtype=torch.float64).cumsum(-1)  # (rows, blocks)
    point = _below(uniform * ends[:, -1:], ends)
    chosen = torch.searchsorted(ends, point, right=True).clamp_(max=ends.shape[1] - 1)  # (rows, 1)
    start = torch.where(chosen > 0, ends.gather(1, (chosen - 1).clamp(min=0)), 0.0)
    inside = probs.gather(1, chosen[:, :, None].expand(rows, 1, block)).squeeze(1).cumsum(-1, dtype=torch.float64)
    token = chosen * block + torch.searchsorted(inside, _below(point - start, inside), right=True).clamp_(max=block - 1)
    return token.squeeze(1).clamp_(max=vocabulary - 1)


def _below(point: Tensor, ends: Tensor) -> Tensor:
    """`point` (rows, 1), or the greatest number below the last of `ends` (rows, n) if rounding has put it there or
    above. Tokens after it have the probability 0."""
    last = ends[:, -1:]
    return torch.minimum(point, torch.nextafter(last, torch.zeros_like(last)))
