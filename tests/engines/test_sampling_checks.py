"""Which settings of sampling are refused, and with what words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trl_realloc.engines.base import EngineError
from trl_realloc.engines.generation.sampling_checks import (
    RESERVED_SAMPLING_ARGUMENTS,
    RequestChecks,
    argument_names,
    transformers_problems,
    vllm_problems,
    why_not_moved,
    with_generation_kwargs,
)
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.requests import GenerationRequest, Sampling, Unfinished


NEUTRAL = Sampling(8, 1.0)
BEGUN = Unfinished(1, (5, 6), (-1.0, -2.0), (1, 1))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"top_p": 0.0}, "top_p must be a finite number above 0 to 1, not 0.0"),
        ({"top_p": 1.5}, "top_p must be"),
        ({"top_k": -1}, "top_k must be a whole number from 0, not -1"),
        ({"top_k": 2.5}, "top_k must be"),
        ({"min_p": 1.2}, "min_p must be a finite number from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number above 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop_token_ids": (3, 100)}, "stop token 100 is outside the model's vocabulary of 100"),
        ({"temperature": 0.0}, "temperature 0.0 is below vLLM's 0.01"),
        ({"temperature": 2.5}, "temperature 2.5 is above vLLM's 2.0"),
        ({"extra": {"max_tokens": 3}}, "generation_kwargs cannot set max_tokens.*max_completion_length"),
        ({"extra": {"n": 3}}, "generation_kwargs cannot set n.*num_generations"),
        ({"extra": {"top_p": 0.5}}, "generation_kwargs cannot set top_p.*set top_p"),
        ({"extra": {"seed": 3}}, "cannot set seed"),
        ({"extra": {"frequency_penalty": object()}}, "frequency_penalty has <object.*give numbers"),
        ({"extra": {"stop": ["end"]}}, "stop needs the text of responses, and the engine has no tokenizer"),
        ({"regex": "a+"}, "regex needs the text of responses"),
        ({"regex": "a+", "extra": {"structured_outputs": {"regex": "a"}}}, "regex and .*structured_outputs are both"),
    ],
    ids=str,
)
def test_what_vllm_cannot_do_is_said_in_a_sentence(changes: dict[str, Any], told: str) -> None:
    assert vllm_problems(NEUTRAL, 100, has_tokenizer=False) == []
    with pytest.raises(EngineError, match=f"^actor.generate: .*{told}"):
        RequestChecks("actor.generate", 64, 100).check([], replace(NEUTRAL, **changes))


@pytest.mark.skipif(not is_vllm_available(), reason="the names are those of the installed vLLM")
def test_a_misspelt_argument_of_vllms_is_refused_with_the_nearest_name() -> None:
    (problem,) = vllm_problems(replace(NEUTRAL, extra={"frequncy_penalty": 0.5}), 100, has_tokenizer=True)
    assert problem.endswith("SamplingParams has no argument 'frequncy_penalty'; did you mean 'frequency_penalty'?")
    free = {"frequency_penalty": 0.5, "stop": ["a"], "min_tokens": 2, "logit_bias": {3: 1.0}, "bad_words": ["b"]}
    assert vllm_problems(replace(NEUTRAL, extra=free), 100, has_tokenizer=True) == []
    assert {"temperature", "stop", "structured_outputs"} < {*argument_names()}
    assert {*RESERVED_SAMPLING_ARGUMENTS} <= {*argument_names()}


def test_trls_generation_kwargs_replace_settings_as_they_do_in_trl() -> None:
    given = {"top_p": 0.5, "stop_token_ids": [3, 4], "frequency_penalty": 0.1}
    got = with_generation_kwargs(replace(NEUTRAL, top_p=0.9, top_k=4), given)
    assert got == Sampling(8, 1.0, (3, 4), top_p=0.5, top_k=4, extra={"frequency_penalty": 0.1})
    assert with_generation_kwargs(NEUTRAL, None) == NEUTRAL
    assert given.keys() == {"top_p", "stop_token_ids", "frequency_penalty"}


def test_generation_with_transformers_refuses_what_only_vllm_has() -> None:
    assert transformers_problems(Sampling(8, 3.0, (1,), 0.5, 3, 0.1, 1.2), 100) == []
    (regex,) = transformers_problems(replace(NEUTRAL, regex="a+"), 100)
    assert "has no structured outputs" in regex and "use vLLM" in regex
    (extra,) = transformers_problems(replace(NEUTRAL, extra={"frequency_penalty": 0.5}), 100)
    assert "has no frequency_penalty" in extra


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (GenerationRequest(1, (1,), 0, max_tokens=9), "request 1 has a max_tokens of 9.*from 1 to the sampling's 8"),
        (GenerationRequest(1, (1,), 0, max_tokens=0), "request 1 has a max_tokens of 0"),
        (GenerationRequest(1, (1,) * 62, 0, max_tokens=3), "request 1 has 62 tokens; with up to 3 new ones"),
        (GenerationRequest(1, (1,), 0, BEGUN, max_tokens=2), "begun with 2 tokens, and max_tokens is 2"),
    ],
    ids=["more than the sampling's", "none", "too long with its prompt", "has begun with as many"],
)
def test_a_limit_of_a_request_of_its_own_is_checked(request_: GenerationRequest, told: str) -> None:
    checks = RequestChecks("actor.generate", 64, 100)
    checks.check([GenerationRequest(2, (1,) * 61, 0, max_tokens=3)], NEUTRAL)
    with pytest.raises(EngineError, match=told):
        checks.check([request_], NEUTRAL)


def test_a_response_that_another_engine_has_begun_goes_on_only_where_its_tokens_count_as_the_prompts_do() -> None:
    checks, moved = RequestChecks("actor.generate", 64, 100, has_tokenizer=True), GenerationRequest(1, (1,), 0, BEGUN)
    checks.check([moved], replace(NEUTRAL, repetition_penalty=1.3, top_p=0.9, stop_token_ids=(7, 8)))
    with pytest.raises(EngineError, match="begun with a stop token"):
        checks.check([moved], replace(NEUTRAL, stop_token_ids=(7, 6)))
    for changes in ({"regex": "a+"}, {"extra": {"presence_penalty": 0.5}}, {"extra": {"min_tokens": 3}}):
        sampling = replace(NEUTRAL, **changes)  # type: ignore[arg-type]
        assert why_not_moved(sampling) is not None
        with pytest.raises(EngineError, match="request 1 was begun by another engine.*without migration"):
            checks.check([moved], sampling)
        checks.check([GenerationRequest(1, (1,), 0)], sampling)
    assert why_not_moved(replace(NEUTRAL, extra={"presence_penalty": 0.0, "logit_bias": {3: 1.0}})) is None
