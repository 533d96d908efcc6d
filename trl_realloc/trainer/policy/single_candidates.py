"""`SingleCandidates`: tokens whose sampling left the engine one candidate, in the losses of GRPO and RLOO.

A grammar, a minimum number of tokens or top-p may leave a single candidate. The engine's log-probability of it is 0, so
the trainer's log-probability and gradient are set to 0 too. If rules by probability leave several tokens, see
`engines/training/sampling_mask`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...engines.generation.sampling_checks import engine_only_settings
from ...engines.requests import Sampling


SAMPLED = "sampling_per_token_logps"  # TRL's name: the engine's log-probabilities, (rows, tokens)
ENGINE = "engine_per_token_logps"  # the same, if TRL has none or must not correct its loss with them


def engine_logprobs(inputs: Mapping[str, Any]) -> Tensor | None:
    """The engine's log-probabilities, (rows, tokens), among TRL's tensors of a generation or a micro-batch; `None` if
    they are not known."""
    return inputs.get(SAMPLED, inputs.get(ENGINE))


class SingleCandidates:
    """The forced tokens of a generation, and then of its training micro-batches.

    Args:
        sampling: sampling parameters of the generations.
        full_vocabulary: log-probabilities are over the whole vocabulary, so no token is forced.
        by_vllm: whether vLLM generates. Other engines give no log-probabilities.
    """

    def __init__(self, sampling: Sampling, *, full_vocabulary: bool, by_vllm: bool = True) -> None:
        self._may_be = (
            by_vllm and not full_vocabulary and (sampling.mask is not None or bool(engine_only_settings(sampling)))
        )
        self._sampled: Sequence[Sequence[float | None] | Tensor] | Tensor = ()

    def begin_generation(self, sampled: Sequence[Sequence[float | None] | Tensor]) -> None:
        """Treat the next log-probabilities as those of a generation.

        Args:
            sampled: the engine's log-probabilities of each row; empty if there are none.
        """
        self._sampled = sampled

    def end_generation(self) -> None:
        """The generation's log-probabilities have been computed."""
        self._sampled = ()

    @contextlib.contextmanager
    def of_loss(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Context of the loss of a micro-batch, given TRL's tensors."""
        sampled = engine_logprobs(inputs)
        generation_rows, self._sampled = self._sampled, () if sampled is None else sampled
        try:
            yield
        finally:
            self._sampled = generation_rows

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
    for index, row in enumerate(rows):
        values = row if isinstance(row, Tensor) else [float("nan") if value is None else value for value in row]
        out[index, : len(row)] = torch.as_tensor(values, dtype=out.dtype)[: out.size(1)]
    return out.to(like.device)
