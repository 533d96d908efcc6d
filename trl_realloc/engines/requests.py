"""The input and output of a generation engine: settings of sampling, requests, and responses. The protocols of engines
are in `base`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import numpy as np

    # (tokens, layers times k) uint8 or int16: the experts that the routers chose for each token, of the prompt's first
    # token on. The last token of a response has none, because the engine has not computed it.
    Routes = np.ndarray[Any, np.dtype[np.integer[Any]]]


MOST_IN_A_BYTE = 256  # experts that a byte of `Completion.routes` can number


@dataclass(frozen=True)
class SamplingMask:
    """Rules for which tokens may be sampled, in the order in which they exclude tokens: min-p, top-k, top-p. The fields
    are those of `Sampling`."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. The defaults sample from the whole vocabulary, as PPO does.

    The distribution of a token is computed in vLLM's order: `regex` excludes tokens, the repetition penalty changes
    logits, they are divided by the temperature, and min-p, top-k and top-p exclude tokens; the remaining probabilities
    sum to 1. Transformers' own `generate` applies min-p after top-p, so it keeps other tokens if both are set.

    A `Completion` has the log-probabilities under this distribution (vLLM's `processed_logprobs`, which TRL uses too).
    A training engine computes log-probabilities with the same temperature and `sampling_mask`, but ignores the regular
    expression, penalties and `extra`. Where these exclude tokens, the log-probabilities of the two engines differ by
    the logarithm of the remaining probability, so importance ratios are biased (TRL's issue 6789).

    Args:
        max_tokens: most response tokens, including the stop token and the tokens that a request has `begun` with.
        temperature: divisor of the logits; greater than 0.
        stop_token_ids: tokens that end a response, each as its last token; empty for responses of `max_tokens` tokens.
        top_p: total probability of the most probable tokens, which are kept; in (0, 1].
        top_k: number of most probable tokens, which are kept; 0 keeps all.
        min_p: least probability of a token that is kept, as a share of the greatest one; in [0, 1].
        repetition_penalty: divisor of positive logits, and factor of negative logits, of tokens that are in the prompt
            or in the response so far; greater than 0.
        regex: regular expression that the response's text matches (vLLM's structured outputs). The tokenizer's eos
            token ends a response too. vLLM only, and only an engine that has a tokenizer.
        extra: further arguments of vLLM's `SamplingParams`. vLLM only; checked by `generation/sampling_checks`.
    """

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    regex: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mask(self) -> SamplingMask | None:
        """The rules that exclude tokens by their probability alone; `None` if none does."""
        sampling_mask = SamplingMask(self.top_p, self.top_k, self.min_p)
        return None if sampling_mask == SamplingMask() else sampling_mask

    def limit_of(self, request: GenerationRequest) -> int:
        """Most response tokens of this request."""
        return self.max_tokens if request.max_tokens is None else request.max_tokens


@dataclass(frozen=True)
class Unfinished:
    """A response before its end: withdrawn, or still being generated (`Generation.peek`).

    Args:
        index: index of its request.
        token_ids: all tokens sampled so far, including those of earlier engines.
        logprobs: log-probability of each token, as in `Completion`.
        versions: parameter version of each token, as in `Completion`.
        routes: experts of each token, as in `Completion`.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    routes: Routes | None = field(default=None, compare=False)


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue.

    Args:
        index: index in the global batch.
        seed: seed of the response's random draws.
        begun: tokens that another engine has already sampled; the generation continues after them.
        max_tokens: most response tokens of this request, at most `Sampling.max_tokens`; `None` for that number.
    """

    index: int
    prompt_ids: tuple[int, ...]
    seed: int
    begun: Unfinished | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Completion:
    """One finished response.

    Args:
        index: index of its request.
        token_ids: the response, including the stop token, if it `stopped`, and the tokens that the request had `begun`
            with.
        logprobs: natural log-probability of each token under the distribution that it was sampled from (`Sampling`).
        stopped: whether it ended with a stop token, or by a rule of `Sampling.regex` or `extra`; otherwise its limit of
            tokens ended it.
        versions: the engine's `version` when each token was sampled.
        cached_tokens: number of tokens of the prompt and of `begun` whose keys and values came from the engine's cache.
        ended_at: end time in seconds of `time.time`; `None` if the engine does not report it.
        routes: the experts of the tokens; `None` if they are not recorded.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool
    versions: tuple[int, ...]
    cached_tokens: int = field(default=0, compare=False)
    ended_at: float | None = field(default=None, compare=False)
    routes: Routes | None = field(default=None, compare=False)
