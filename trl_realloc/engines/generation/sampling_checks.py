"""Checks before a generation: the ranges of a `requests.Sampling`, the user's further arguments of vLLM's
`SamplingParams`, and requests. Does not import vLLM.

What only vLLM can check, such as a regular expression, it checks before anything is generated (`VLLMEngine.start`). The
arguments of an engine are checked in `vllm` and `vllm_support`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ...common.errors import shown, unknown_keys
from ...common.settings import MAX_TEMPERATURE, MIN_TEMPERATURE, read_settings
from ..base import EngineError
from ..requests import GenerationRequest, Sampling, SamplingMask
from .vllm_support import annotated_fields


SETTING = "generation_kwargs"  # TRL's name of the argument that becomes `Sampling.extra`

_FIELDS = tuple(field.name for field in fields(Sampling) if field.name not in ("extra", "regex"))
_EOS = "responses end with the tokenizer's and the model's eos tokens; set these"
_ONE = "every request has one response; set num_generations for the responses of a prompt"
_LOGPROBS = "each token comes with its own log-probability, and nothing reads others"
_OWN = "this package uses it to take tokens and log-probabilities from vLLM; leave it out"

# Arguments of SamplingParams that the user cannot set: the reason, and what to set instead.
RESERVED_SAMPLING_ARGUMENTS: Mapping[str, str] = {
    **{name: f"it has a separate setting; set {name}" for name in _FIELDS},
    "max_tokens": "it has a separate setting; set max_completion_length",
    **dict.fromkeys(("stop_token_ids", "ignore_eos"), _EOS),
    "n": _ONE,
    "seed": "every sample has a separate seed; set the run's seed",
    **dict.fromkeys(("logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs"), _LOGPROBS),
    **dict.fromkeys(("detokenize", "output_kind", "stream_interval", "skip_clone", "extra_args"), _OWN),
    **dict.fromkeys(("output_text_buffer_length", "routed_experts_prompt_start"), _OWN),
    "repetition_detection": "a response ends with a stop token or at its limit of tokens; leave it out",
}

# Arguments that need a tokenizer in the engine.
_NEED_TOKENIZER = ("stop", "bad_words", "structured_outputs", "thinking_token_budget")
# Arguments whose effect depends on the response's tokens so far, but not on the prompt's. vLLM would count the tokens
# that another engine has begun as tokens of the prompt.
_COUNT_RESPONSE = (*_NEED_TOKENIZER, "presence_penalty", "frequency_penalty", "min_tokens")
# Arguments that end a response or make its text; they do not change the distribution of a token.
_SAME_DISTRIBUTION = ("stop", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens")


def sampling_problems(sampling: Sampling, vocabulary: int | None) -> list[str]:
    """A sentence for each field whose value is outside its range.

    Args:
        vocabulary: number of the model's tokens; `None` if unknown.
    """
    names = ("top_p", "top_k", "min_p", "repetition_penalty")
    problems = read_settings({name: getattr(sampling, name) for name in names})[1]
    if sampling.top_k in (-1, None):  # values of the trainers' settings
        problems.append(f"top_k must be a whole number from 0, not {sampling.top_k}.")
    if sampling.max_tokens < 1:
        problems.append(f"max_tokens is {sampling.max_tokens}; it must be at least 1.")
    outside = [token for token in sampling.stop_token_ids if token < 0 or (vocabulary and token >= vocabulary)]
    if outside:
        problems.append(f"stop token {outside[0]} is outside the model's vocabulary of {vocabulary}.")
    return problems


def vllm_problems(sampling: Sampling, vocabulary: int | None, has_tokenizer: bool) -> list[str]:
    """A sentence for each setting that a vLLM engine does not support.

    Args:
        has_tokenizer: whether the engine can read text.
    """
    problems = sampling_problems(sampling, vocabulary)
    if not sampling.temperature >= MIN_TEMPERATURE:
        problems.append(f"temperature {sampling.temperature} is below vLLM's {MIN_TEMPERATURE}.")
    if sampling.temperature > MAX_TEMPERATURE:
        problems.append(f"temperature {sampling.temperature} is above vLLM's {MAX_TEMPERATURE}.")
    problems += argument_problems(sampling.extra)
    if sampling.regex is not None and "structured_outputs" in sampling.extra:
        problems.append(f"regex and {SETTING}: structured_outputs are both set; keep one of them.")
    if not has_tokenizer:
        reading = [name for name in _NEED_TOKENIZER if sampling.extra.get(name)]
        reading += ["regex"] if sampling.regex is not None else []
        problems += [f"{name} needs the text of responses, and the engine has no tokenizer." for name in reading]
    return problems


def needs_tokenizer(sampling: Sampling) -> bool:
    """True if an engine needs a tokenizer for these settings."""
    return sampling.regex is not None or any(sampling.extra.get(name) for name in _NEED_TOKENIZER)


def transformers_problems(sampling: Sampling, vocabulary: int | None) -> list[str]:
    """A sentence for each setting that generation with Transformers does not support."""
    problems = sampling_problems(sampling, vocabulary)
    if not sampling.temperature > 0:
        problems.append(f"temperature is {sampling.temperature}; it must be greater than 0.")
    if sampling.regex is not None:
        problems.append(
            "generation with Transformers has no structured outputs, so responses cannot be made to match "
            f"{shown(sampling.regex)}; use vLLM, or leave the regular expression out."
        )
    if sampling.extra:
        problems.append(
            f"generation with Transformers has no {', '.join(map(str, sampling.extra))} ({SETTING}); "
            "use vLLM, or leave it out."
        )
    return problems


def engine_only_settings(sampling: Sampling, *, full_vocabulary: bool = False) -> list[str]:
    """The user's names of the settings that change the distribution of an engine's tokens but not the trainer's
    log-probabilities. With one of them the two differ by more than rounding.

    Args:
        full_vocabulary: the trainer's log-probabilities are over the whole vocabulary, without top-p, top-k and min-p.
    """
    names = [] if sampling.regex is None else ["vllm_structured_outputs_regex"]
    names += ["repetition_penalty"] if sampling.repetition_penalty != 1.0 else []
    names += [
        f"{SETTING}: {name}" for name, value in sampling.extra.items() if value and name not in _SAME_DISTRIBUTION
    ]
    if full_vocabulary and sampling.mask is not None:
        names += [f"{name} with full_vocabulary_logprobs" for name in _changed(sampling.mask)]
    return names


def _changed(sampling_mask: SamplingMask) -> list[str]:
    return [field.name for field in fields(sampling_mask) if getattr(sampling_mask, field.name) != field.default]


def why_not_moved(sampling: Sampling) -> str | None:
    """The reason why a response with this sampling cannot be begun by one engine and ended by another; `None` if it
    can. A repetition penalty counts prompt and response alike, so it allows this."""
    names = ["regex"] if sampling.regex is not None else [n for n in _COUNT_RESPONSE if sampling.extra.get(n)]
    if not names:
        return None
    return f"{names[0]} depends on all tokens of the response, and vLLM would count the earlier ones as the prompt's"


def argument_problems(arguments: object) -> list[str]:
    """A sentence for each of the user's arguments of vLLM's `SamplingParams` that cannot be passed on.

    Args:
        arguments: the future `Sampling.extra`.
    """
    if not isinstance(arguments, Mapping):
        return [f"{SETTING} is a mapping like {{frequency_penalty: 0.5}}, or None, not {shown(arguments)}."]
    problems = [
        f"{SETTING} cannot set {name}: {RESERVED_SAMPLING_ARGUMENTS[name]}."
        for name in arguments
        if name in RESERVED_SAMPLING_ARGUMENTS
    ]
    names = argument_names()
    if names:
        unknown = [name for name in arguments if name not in RESERVED_SAMPLING_ARGUMENTS]
        free = sorted({*names} - {*RESERVED_SAMPLING_ARGUMENTS})
        problems += unknown_keys(unknown, free, f"{SETTING}: vLLM's SamplingParams has no argument")
    for name, value in arguments.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            problems.append(f"{SETTING}: {name} has {shown(value)}; give numbers, texts, lists and mappings of these.")
    return problems


def with_generation_kwargs(sampling: Sampling, arguments: Mapping[str, Any] | None) -> Sampling:
    """The sampling with TRL's `generation_kwargs`: fields of `Sampling` are replaced, as in TRL; all others go to
    `extra`."""
    remaining = dict(arguments or {})
    fields = {name: remaining.pop(name) for name in _FIELDS if name in remaining}
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = tuple(fields["stop_token_ids"])
    return replace(sampling, **fields, extra={**sampling.extra, **remaining})


@functools.cache
def argument_names() -> tuple[str, ...]:
    """The names of the arguments of vLLM's `SamplingParams`, from the source of the installed release; empty if it
    cannot be read, so that vLLM itself refuses a wrong one."""
    return annotated_fields("sampling_params.py", "SamplingParams")


# --- requests -------------------------------------------------------------------------------------------------------


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
            if problem := self._begun_problem(request, sampling):
                raise EngineError(f"{self.name}: request {request.index} {problem}")

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

    def _begun_problem(self, request: GenerationRequest, sampling: Sampling) -> str | None:
        """The reason why the tokens that the request has begun with cannot be continued; `None` if they can."""
        begun, limit = request.begun, sampling.limit_of(request)
        if begun is None:
            return None
        if begun.index != request.index:
            return f"continues tokens of request {begun.index}."
        count = len(begun.token_ids)
        for values, what in ((begun.logprobs, "log-probabilities"), (begun.versions, "versions")):
            if count != len(values):
                return f"has begun with {count} tokens and {len(values)} {what}; each token needs one."
        if count >= limit:
            return f"has begun with {count} tokens, and max_tokens is {limit}: there is nothing left to generate."
        if count and begun.token_ids[-1] in sampling.stop_token_ids:
            return "has begun with a stop token: there is nothing left to generate."
        if count and (why := why_not_moved(sampling)):
            return (
                f"was begun by another engine and cannot be continued: {why}. "
                "Choose a plan without migration, or leave the setting out."
            )
        if count and not self._in_vocabulary(begun.token_ids):
            return (
                f"has begun with a token outside the model's vocabulary of {self.vocabulary}; is it from another model?"
            )
        return None

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
