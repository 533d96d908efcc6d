"""Draws tokens by each sample's seed inside vLLM's worker, in place of vLLM's sampler.

vLLM loads this module (`logits_processors`), so it imports little of this package. Weights are in `vllm_worker`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.sampling_params import SamplingParams

from .sample_seeds import uniforms
from .vllm_compat import BatchUpdate, LogitsProcessor, process_dict_updates


class SeededRows(LogitsProcessor):
    """Keeps the random numbers of each request as vLLM moves it between the rows of its batch. Does not change logits.

    vLLM's per-request seeds are not used: on the CPU they draw a random number for each token of the vocabulary (57 of
    70 ms per step with 64 rows of 32,000; this class takes 0.8 ms), and a prompt that is prefilled in two steps raises,
    because generators on the CPU have no offset that could be reset.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[np.ndarray[Any, Any], list[int]]] = {}  # row -> (uniforms, tokens drawn so far)

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def new_row(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> Any:
            numbers = uniforms(params.extra_args or {}, params.max_tokens or 0)
            return numbers, output  # vLLM appends to `output`, also when it resumes a preempted request

        process_dict_updates(self.rows, batch_update, new_row)

    def uniforms(self, count: int) -> Tensor:
        """One number in [0, 1) for each of the first `count` rows: (count, 1) float64."""
        rows = (self.rows[row] for row in range(count))
        return torch.tensor([uniform[min(len(output), len(uniform) - 1)] for uniform, output in rows])[:, None]


class SeededDraw(nn.Module):
    """Replaces vLLM's `TopKTopPSampler`: maps one uniform number per token through the inverse of the cumulative
    distribution, so a sample depends on its seed and not on the other samples."""

    def __init__(self, rows: SeededRows) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draw one token per row.

        Args:
            logits: (rows, vocabulary) float32, after temperature.

        Returns:
            The tokens (rows,) int64, and all log-probabilities (rows, vocabulary).
        """
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        return draw(logprobs, self.rows.uniforms(len(logits)).to(logits.device)), logprobs


def draw(logprobs: Tensor, uniform: Tensor, block: int = 256) -> Tensor:
    """The first token at which the cumulative probability exceeds `uniform` times the total.

    Sums are in float64, because in float32 tokens with a probability below 6e-8 would never be drawn. They are computed
    over blocks, and then over the tokens of one block: 0.7 ms, where a cumulative sum over 64 rows of 32,000 takes 5.3.

    Args:
        logprobs: (rows, vocabulary) float32.
        uniform: (rows, 1) float64 in [0, 1).

    Returns:
        (rows,) int64.
    """
    rows, vocabulary = logprobs.shape
    probs = nn.functional.pad(logprobs.exp(), (0, -vocabulary % block)).view(rows, -1, block)
    ends = probs.sum(-1, dtype=torch.float64).cumsum(-1)  # (rows, blocks)
    point = uniform * ends[:, -1:]
    chosen = torch.searchsorted(ends, point, right=True).clamp_(max=ends.shape[1] - 1)  # (rows, 1)
    start = torch.where(chosen > 0, ends.gather(1, (chosen - 1).clamp(min=0)), 0.0)
    inside = probs.gather(1, chosen[:, :, None].expand(rows, 1, block)).squeeze(1).cumsum(-1, dtype=torch.float64)
    token = chosen * block + torch.searchsorted(inside, point - start, right=True).clamp_(max=block - 1)
    return token.squeeze(1).clamp_(max=vocabulary - 1)
