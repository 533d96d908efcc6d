"""Generation with Transformers' `generate` in the model of a training engine (in place). No parameters are copied: the
training engine's are gathered while it generates (`base.InPlaceEngine`). Generation with vLLM is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from ..base import Bucket, EngineError, GenerationEngine, SourceDigests
from ..requests import Completion, GenerationRequest, Sampling
from .sampling_checks import check_request, transformers_problems
from .token_draw import draw, keep_likely, keep_nucleus, keep_top, penalize_repetition


class _SeededDraw(LogitsProcessor):
    """Samples the next token of each row by the row's seed, and sets the logits of all other tokens to -inf.

    One uniform number per token is mapped through the inverse of the cumulative distribution, so a sample depends on
    its seed and not on the other samples, the batch size or the number of processes. Stores one log-probability per
    token; `output_scores` would store the full vocabulary. Changes logits in vLLM's order (`requests.Sampling`).

    Args:
        prompts: (rows, tokens), with `mask` (rows, tokens), 0 for padding.
        tokens: most tokens to sample.
    """

    def __init__(self, seeds: Sequence[int], sampling: Sampling, tokens: int, prompts: Tensor, mask: Tensor) -> None:
        uniform = np.stack([np.random.default_rng(seed).random(tokens) for seed in seeds])
        self.uniform = torch.from_numpy(uniform).to(prompts.device)
        self.sampling, self.prompts, self.mask = sampling, prompts, mask
        self.seen: Tensor | None = None  # (rows, vocabulary) bool
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = torch.log_softmax(self._logits(scores.float()), -1)
        token = draw(logprobs, self.uniform[:, len(self.logprobs), None])[:, None]
        self._keep(logprobs, token)
        return torch.full_like(scores, -torch.inf).scatter_(-1, token, 0.0)

    def take(self, logits: Tensor, tokens: Tensor) -> None:
        """Store the log-probabilities of `tokens` (rows, tokens) that were not sampled here, from the model's `logits`
        (rows, tokens, vocabulary)."""
        self.seen, self.logprobs = None, []
        for position in range(tokens.size(1)):
            self._keep(torch.log_softmax(self._logits(logits[:, position].float()), -1), tokens[:, position, None])

    def _keep(self, logprobs: Tensor, token: Tensor) -> None:
        """Store a token (rows, 1) and its log-probability among those of the vocabulary (rows, vocabulary)."""
        self.logprobs.append(logprobs.gather(-1, token).squeeze(-1))
        if self.seen is not None:
            self.seen.scatter_(-1, token, True)

    def _logits(self, logits: Tensor) -> Tensor:
        """Logits of the sampling distribution: (rows, vocabulary) float32."""
        sampling = self.sampling
        if sampling.repetition_penalty != 1.0:
            if self.seen is None:
                # padding is token 0, which must not count; a count per token, because a row may write it several times
                counts = torch.zeros_like(logits).scatter_add_(-1, self.prompts, self.mask.to(logits.dtype))
                self.seen = counts > 0
            logits = penalize_repetition(logits, self.seen, sampling.repetition_penalty)
        logits = keep_likely(logits / sampling.temperature, sampling.min_p)
        if sampling.top_k:
            logits = keep_top(logits, torch.full((len(logits),), sampling.top_k, device=logits.device))
        if sampling.top_p < 1.0:
            logits = keep_nucleus(logits, torch.full((len(logits),), sampling.top_p, device=logits.device))
        return logits


class TransformersEngine:
    """Implements `base.GenerationEngine`.

    Args:
        whole_model: `InPlaceEngine.whole_model` of the actor's engine; collective under ZeRO-3.
        device: the actor's device.
        batch_size: most prompts per call of the model's `generate`.
    """

    def __init__(
        self,
        whole_model: Callable[[], AbstractContextManager[nn.Module]],
        device: torch.device,
        *,
        batch_size: int,
    ) -> None:
        self.whole_model, self.device = whole_model, device
        self.batch_size = batch_size
        self.version = -1

    def kept(self, frozen: SourceDigests) -> frozenset[str]:
        return frozenset(frozen)

    def load(self, buckets: Iterable[Bucket], version: int, frozen: SourceDigests | None = None) -> None:
        """Set the version. The buckets are not read, because the parameters are the training engine's."""
        self.version = version

    def narrower(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Empty, because the model is the training engine's."""
        return {}

    def sleep(self) -> None:
        """Does nothing, because the model is the training engine's."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Completion]:
        """See `base.GenerationEngine`. Collective if `whole_model` is: then a rank without requests calls it too. It
        runs in the trainer's process, so it takes no samples from other engines."""
        if continued := [request.index for request in requests if request.begun is not None]:
            raise EngineError(
                f"request {continued[0]} was begun by another engine, and generation by Transformers cannot continue "
                "it; samples move only between vLLM engines (generation_engine: vllm)."
            )
        if problems := transformers_problems(sampling, None):
            raise EngineError(" ".join(problems))
        for request in requests:
            check_request("generation with Transformers", request, sampling)
        # similar lengths in a batch need little padding
        by_length = sorted(requests, key=lambda request: len(request.prompt_ids))
        with self.whole_model() as model, torch.no_grad():
            for start in range(0, len(by_length), self.batch_size):
                yield from self._batch(model, by_length[start : start + self.batch_size], sampling)

    def _batch(
        self, model: PreTrainedModel, requests: Sequence[GenerationRequest], sampling: Sampling
    ) -> Iterator[Completion]:
        width = max(len(request.prompt_ids) for request in requests)
        # Padded with token 0, which the attention mask hides. The tokenizer's padding token may be outside the model's
        # vocabulary, if it was added without resizing the embeddings.
        ids = torch.zeros((len(requests), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        limits = [sampling.limit_of(request) for request in requests]
        draws = _SeededDraw([request.seed for request in requests], sampling, max(limits), ids, mask)
        # without the model's own generation config, whose penalties would change the sampling but not the loss
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        model_config, base.generation_config = base.generation_config, GenerationConfig()
        try:
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=GenerationConfig(
                    max_new_tokens=max(limits),
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=list(sampling.stop_token_ids) or None,
                ),
                logits_processor=[draws],
                # in a job launched with ZeRO-3, Transformers would call an all-reduce of all ranks of the job per token
                synced_gpus=False,
            )
            if len(draws.logprobs) != out.size(1) - width:  # a user's own `generate` did not use the processor
                draws.take(_logits(model, out, mask), out[:, width:])
        finally:
            base.generation_config = model_config
        logprobs, stops = torch.stack(draws.logprobs, 1).cpu(), torch.tensor(sampling.stop_token_ids, dtype=torch.long)
        for request, limit, row, values in zip(requests, limits, out[:, width:].cpu(), logprobs, strict=True):
            ends = torch.isin(row[:limit], stops).nonzero()
            stopped = len(ends) > 0
            length = int(ends[0]) + 1 if stopped else min(limit, len(row))
            tokens, logprobs_of = tuple(row[:length].tolist()), tuple(values[:length].tolist())
            yield Completion(request.index, tokens, logprobs_of, stopped, (self.version,) * length)

    def close(self) -> None:
        pass


def _logits(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """(rows, tokens - width, vocabulary): logits of the tokens after the prompts, for `ids` (rows, tokens) of prompts
    and responses and the prompts' `mask` (rows, width), 0 for padding."""
    whole = torch.nn.functional.pad(mask, (0, ids.size(1) - mask.size(1)), value=1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    logits: Tensor = model(input_ids=ids, attention_mask=whole, position_ids=positions, use_cache=False).logits
    return logits[:, mask.size(1) - 1 : -1]


if TYPE_CHECKING:  # the type checker verifies that the protocol is implemented
    _GENERATES: type[GenerationEngine] = TransformersEngine
