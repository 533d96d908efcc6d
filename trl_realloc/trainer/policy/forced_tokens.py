"""`ForcedTokens`: tokens that an engine could not have drawn otherwise, in the losses of GRPO and RLOO.

A grammar, a least number of tokens or top-p may leave one token alone. The engine's log-probability of it is 0, and so
are the trainer's and its gradient, whatever the model says. Where rules by probability leave several tokens, see
`engines/training/token_support`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...engines.base import Sampling


SAMPLED = "sampling_per_token_logps"  # TRL's name: the engine's log-probabilities, (rows, tokens)
# arguments of vLLM's SamplingParams that exclude tokens
_EXCLUDE = {"structured_outputs", "allowed_token_ids", "bad_words", "min_tokens", "logit_bias", "thinking_token_budget"}


class ForcedTokens:
    """The tokens of a generation, and then of the micro-batches that it is trained in.

    Args:
        sampling: of the generations.
        full_vocabulary: log-probabilities are over the whole vocabulary, so no token is forced.
    """

    def __init__(self, sampling: Sampling, *, full_vocabulary: bool) -> None:
        excludes = sampling.support is not None or sampling.regex is not None or bool(_EXCLUDE & sampling.extra.keys())
        self._may_be = excludes and not full_vocabulary
        self._sampled: Sequence[Sequence[float | None] | Tensor] | Tensor = ()

    def begin_generation(self, sampled: Sequence[Sequence[float | None] | Tensor] | None) -> None:
        """The rows of the next log-probabilities are those of a generation.

        Args:
            sampled: the engine's log-probabilities of each row; `None` if there are none.
        """
        self._sampled = () if sampled is None else sampled

    def end_generation(self) -> None:
        """The generation's log-probabilities have been computed."""
        self._sampled = ()

    @contextlib.contextmanager
    def of_loss(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Around the loss of a micro-batch, with TRL's tensors."""
        kept, self._sampled = self._sampled, inputs.get(SAMPLED, ())
        try:
            yield
        finally:
            self._sampled = kept

    def zeroed(self, values: Tensor) -> Tensor:
        """Log-probabilities or entropies of a model, (rows, tokens), with zeros for forced tokens."""
        if not self._may_be or not len(self._sampled):
            return values
        sampled = self._sampled if isinstance(self._sampled, Tensor) else padded(self._sampled, values)
        return values.masked_fill(sampled[:, : values.size(1)] == 0, 0.0)


def padded(rows: Sequence[Sequence[float | None] | Tensor], like: Tensor) -> Tensor:
    """(rows, tokens) float32: the rows, padded with zeros on the right to the shape of `like`, on its device; NaN for
    `None`, and in rows after the last."""
    out = torch.zeros(like.shape)
    out[len(rows) :] = torch.nan
    for at, row in enumerate(rows):
        values = row if isinstance(row, Tensor) else [float("nan") if value is None else value for value in row]
        out[at, : len(row)] = torch.as_tensor(values, dtype=out.dtype)[: out.size(1)]
    return out.to(like.device)
