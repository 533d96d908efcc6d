"""Samples tokens by each sample's seed inside vLLM's worker, in place of vLLM's sampler. vLLM loads this module
(`logits_processors`), so it imports little of this package. The arithmetic is in `token_draw`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.sampling_params import SamplingParams

from .token_draw import draw, keep_nucleus, keep_top, uniforms
from .vllm_compat import BatchUpdate, LogitsProcessor, process_dict_updates


if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SeededRows(LogitsProcessor):
    """Stores the random numbers of each request as vLLM moves it between the rows of its batch. Does not change logits.

    vLLM's per-request seeds are not used: on the CPU they generate a random number for each token of the vocabulary (57
    of 70 ms per step with 64 rows of 32,000; this class takes 0.8 ms), and a prompt that is prefilled in two steps
    raises, because CPU generators have no offset that could be reset.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[np.ndarray[Any, Any], list[int]]] = {}  # row -> (uniforms, tokens sampled so far)

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
        numbers = (uniform[min(len(output), len(uniform) - 1)] for uniform, output in rows)
        return torch.from_numpy(np.fromiter(numbers, np.float64, count))[:, None]


class SeededDraw(nn.Module):
    """Replaces vLLM's `TopKTopPSampler`: maps one uniform number per token through the inverse of the cumulative
    distribution, so a sample depends on its seed and not on the other samples.

    Before it, vLLM's sampler applies the masks of structured outputs, penalties, temperature and min-p, in this order.
    """

    def __init__(self, rows: SeededRows) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, logits: Tensor, generators: object, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sample one token per row.

        Args:
            logits: (rows, vocabulary) float32, after temperature and min-p.
            k: (rows,) top-k, the size of the vocabulary for all tokens; `None` if no row has one.
            p: (rows,) top-p; `None` if no row has one.

        Returns:
            The tokens (rows,) int64, and all log-probabilities (rows, vocabulary) of the sampling distribution: -inf
            for excluded tokens.
        """
        if k is not None:
            logits = keep_top(logits, k)
        if p is not None:
            logits = keep_nucleus(logits, p)
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        return draw(logprobs, self.rows.uniforms(len(logits)).to(logits.device)), logprobs
