"""Checks of requests and sampling parameters before a vLLM engine generates.

The arguments of the engine itself are checked in `vllm` and `vllm_support`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..base import EngineError
from ..requests import GenerationRequest, Sampling
from .sampling_checks import vllm_problems, why_not_moved


@dataclass(frozen=True)
class RequestChecks:
    """The limits of one engine.

    Args:
        name: name of the engine in messages.
        max_model_len: most tokens of a prompt and its response together.
        vocabulary: number of the model's tokens; `None` if unknown.
        has_tokenizer: whether the engine can read text.
    """

    name: str
    max_model_len: int
    vocabulary: int | None
    has_tokenizer: bool = False

    def check(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, unfinished: Collection[int] = ()
    ) -> None:
        """Check requests that are to be added to a generation.

        Args:
            unfinished: indices of the generation's unfinished requests.

        Raises:
            EngineError: a request cannot be served. The message names it and the reason.
        """
        if problems := vllm_problems(sampling, self.vocabulary, self.has_tokenizer):
            raise EngineError(f"{self.name}: {' '.join(problems)}")
        indices = set(unfinished)
        for request in requests:
            if request.index in indices:
                raise EngineError(f"{self.name}: request {request.index} is in this generation already.")
            indices.add(request.index)
            check_request(self.name, request, sampling)
            self._check_prompt(request, sampling)
            self._check_begun(request, sampling)

    def _check_prompt(self, request: GenerationRequest, sampling: Sampling) -> None:
        length = len(request.prompt_ids)
        limit = sampling.limit_of(request)
        if length + limit > self.max_model_len:
            raise EngineError(
                f"{self.name}: the prompt of request {request.index} has {length} tokens; with up to "
                f"{limit} new ones that is more than max_model_len {self.max_model_len}. "
                "Shorten the prompt or the response, or raise max_model_len (vllm_max_model_length of GRPO and RLOO)."
            )
        if not self._in_vocabulary(request.prompt_ids):
            raise EngineError(
                f"{self.name}: the prompt of request {request.index} holds a token outside the model's vocabulary "
                f"of {self.vocabulary}; is it from another tokenizer?"
            )

    def _check_begun(self, request: GenerationRequest, sampling: Sampling) -> None:
        begun = request.begun
        if begun is None:
            return
        if begun.index != request.index:
            raise EngineError(f"{self.name}: request {request.index} continues tokens of request {begun.index}.")
        if len(begun.token_ids) != len(begun.logprobs):
            raise EngineError(
                f"{self.name}: request {request.index} has begun with {len(begun.token_ids)} tokens and "
                f"{len(begun.logprobs)} log-probabilities; each token needs one."
            )
        if len(begun.token_ids) != len(begun.versions):
            raise EngineError(
                f"{self.name}: request {request.index} has begun with {len(begun.token_ids)} tokens and "
                f"{len(begun.versions)} versions; each token needs one."
            )
        if len(begun.token_ids) >= sampling.limit_of(request):
            raise EngineError(
                f"{self.name}: request {request.index} has begun with {len(begun.token_ids)} tokens, and max_tokens is "
                f"{sampling.limit_of(request)}: there is nothing left to generate."
            )
        if begun.token_ids and begun.token_ids[-1] in sampling.stop_token_ids:
            raise EngineError(
                f"{self.name}: request {request.index} has begun with a stop token: there is nothing left to generate."
            )
        if begun.token_ids and (why := why_not_moved(sampling)):
            raise EngineError(
                f"{self.name}: request {request.index} was begun by another engine and cannot be continued: {why}. "
                "Choose a plan without migration, or leave the setting out."
            )
        if begun.token_ids and not self._in_vocabulary(begun.token_ids):
            raise EngineError(
                f"{self.name}: request {request.index} has begun with a token outside the model's vocabulary of "
                f"{self.vocabulary}; is it from another model?"
            )

    def _in_vocabulary(self, token_ids: Sequence[int]) -> bool:
        return not self.vocabulary or 0 <= min(token_ids) <= max(token_ids) < self.vocabulary


def check_request(name: str, request: GenerationRequest, sampling: Sampling) -> None:
    """Check the conditions of every engine: a limit of tokens from 1 to that of `sampling`, and a prompt.

    Args:
        name: name of the engine in messages.

    Raises:
        EngineError: a condition is not met. The message names the request and the reason.
    """
    if not 1 <= sampling.limit_of(request) <= sampling.max_tokens:
        raise EngineError(
            f"{name}: request {request.index} has a max_tokens of {request.max_tokens}; it may be from 1 to the "
            f"sampling's {sampling.max_tokens}."
        )
    if not request.prompt_ids:
        raise EngineError(f"{name}: the prompt of request {request.index} is empty.")
