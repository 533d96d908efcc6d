"""How generation engines draw tokens: every setting of `Sampling`, against Transformers' logits processors; limits of
requests; and what is computed of prompts that have been computed before.

One real vLLM engine, with a tokenizer whose tokens are letters.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from engine_forks import EngineForks
from generating import LENGTH, SAMPLING, VOCABULARY, buckets, llama, requests, samples, tokens
from holding import held, holdable
from rescoring import wait_for
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trl_realloc.engines.base import EngineError, Updates
from trl_realloc.engines.generation import engine_process
from trl_realloc.engines.generation.transformers import TransformersEngine
from trl_realloc.engines.generation.vllm import VLLMEngine
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.requests import Completion, GenerationRequest, Sampling
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import flatten
from trl_realloc.runtime.placement.engine_options import EngineOptions
from trl_realloc.runtime.placement.vllm_start import start_vllm


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed"),
]

BLOCK = 32  # tokens of a block of the prefix cache
EOS = VOCABULARY - 1

SAMPLINGS: dict[str, Sampling] = {
    "neutral": SAMPLING,
    "top-p": replace(SAMPLING, top_p=0.6),
    "top-k": replace(SAMPLING, top_k=3),
    "min-p": replace(SAMPLING, min_p=0.2),
    "repetition penalty": replace(SAMPLING, repetition_penalty=1.4),
    "a reward for repetition": replace(SAMPLING, repetition_penalty=0.7),
    "all together": Sampling(24, 1.3, (3, 9), top_p=0.8, top_k=20, min_p=0.02, repetition_penalty=1.2),
}


def letters() -> PreTrainedTokenizerFast:
    """Token i is one character; the last is eos."""
    vocabulary = {chr(ord("0") + i): i for i in range(VOCABULARY - 1)}
    tokenizer = Tokenizer(models.WordLevel({**vocabulary, "</s>": EOS}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, forks: EngineForks) -> Iterator[VLLMEngine]:
    """As a run starts it, with a tokenizer. The model's config has another eos token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    letters().save_pretrained(folder)
    llama(0).config.save_pretrained(folder)  # vLLM looks for it, twice
    settings = {"max_num_seqs": 64, "kv_cache_gib": 0.25, "step_timeout_s": 30, "engine_kwargs": {"block_size": BLOCK}}
    given = {**settings, "tokenizer": folder}
    options = EngineOptions(torch.device("cpu"), 1.0, 1, LENGTH, 1, 1, 0, torch.optim.Adam, vllm=given)
    plan = flatten(Cluster(1, 2))  # of two ranks, this is the first
    with contextlib.ExitStack() as stack, mock.patch.object(engine_process, "spawn", forks.spawn):
        yield holdable(lambda: start_vllm(plan, "actor.generate", 0, llama(0).config, options, stack), folder)


@pytest.fixture
def loaded(engine: VLLMEngine, model: LlamaForCausalLM) -> VLLMEngine:
    engine.load(buckets(model), 1)
    return engine


def in_place(model: LlamaForCausalLM) -> TransformersEngine:
    return TransformersEngine(lambda: contextlib.nullcontext(model), torch.device("cpu"), batch_size=5)


def processors(sampling: Sampling) -> LogitsProcessorList:
    """Transformers' own, in vLLM's order."""
    result: list[Any] = [
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        TemperatureLogitsWarper(sampling.temperature),
    ]
    result += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    result += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    result += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    return LogitsProcessorList(result)


def distribution(
    model: LlamaForCausalLM, prompt: Sequence[int], response: Sequence[int], sampling: Sampling
) -> torch.Tensor:
    """The log-probabilities of all tokens at each place of a response: (tokens, vocabulary)."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    rows = [processors(sampling)(ids[:, : len(prompt) + at], row[None].clone()) for at, row in enumerate(logits)]
    return torch.cat(rows).log_softmax(-1)


def assert_drawn_so(
    model: LlamaForCausalLM, asked: Sequence[GenerationRequest], got: Sequence[Completion], sampling: Sampling
) -> None:
    for request, completion in zip(asked, got, strict=True):
        expected = distribution(model, request.prompt_ids, completion.token_ids, sampling)
        own = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), own, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_have_transformers_log_probabilities(loaded: VLLMEngine, model: LlamaForCausalLM, name: str) -> None:
    sampling, asked = SAMPLINGS[name], requests(24)
    got = samples(loaded, asked, sampling)
    assert_drawn_so(model, asked, got, sampling)
    if name != "neutral":
        with pytest.raises(AssertionError):
            assert_drawn_so(model, asked, got, replace(SAMPLING, temperature=sampling.temperature))
    generated = samples(in_place(model), asked, sampling)
    assert tokens(generated) == tokens(got), "generation with Transformers draws the same tokens"
    assert_drawn_so(model, asked, generated, sampling)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_sample_is_the_same_alone_and_in_any_batch(loaded: VLLMEngine, model: LlamaForCausalLM, name: str) -> None:
    asked = requests(40)
    for engine in (loaded, in_place(model)):
        whole = tokens(samples(engine, asked, SAMPLINGS[name]))
        assert tokens(samples(engine, asked[30:33], SAMPLINGS[name])) == whole[30:33]
        assert tokens(samples(engine, asked[5:6], SAMPLINGS[name])) == whole[5:6]


def test_a_response_ends_with_any_stop_token_or_at_its_limit(loaded: VLLMEngine, model: LlamaForCausalLM) -> None:
    asked = [replace(request, max_tokens=(None, 1, 7, 23)[i % 4]) for i, request in enumerate(requests(24))]
    for engine in (loaded, in_place(model)):
        free = samples(engine, requests(24))
        stops = {free[0].token_ids[1], free[4].token_ids[0]}
        got = samples(engine, asked, replace(SAMPLING, stop_token_ids=tuple(stops)))
        ended = set()
        for request, whole, cut in zip(asked, free, got, strict=True):
            limit = request.max_tokens or SAMPLING.max_tokens
            ends = [at for at, token in enumerate(whole.token_ids[:limit]) if token in stops]
            length = ends[0] + 1 if ends else limit
            assert (cut.token_ids, cut.stopped) == (whole.token_ids[:length], bool(ends))
            ended |= {cut.token_ids[-1]} & stops
        assert ended == stops


def test_a_moved_sample_goes_on_with_its_penalty_and_its_limit(loaded: VLLMEngine, model: LlamaForCausalLM) -> None:
    sampling = replace(SAMPLINGS["all together"], max_tokens=100, stop_token_ids=())
    asked = [replace(request, max_tokens=90 + i % 11) for i, request in enumerate(requests(16))]
    expected = samples(loaded, asked, sampling)
    with held(loaded, 20):
        generation = loaded.start(asked, sampling, Updates.KEEP)
        wait_for(generation, 20)
        moved = generation.withdraw([request.index for request in asked[:8]])
        assert len(moved) == 8
        loaded.load(buckets(model), 2)  # the same parameters: keys that are kept are right
    generation.add([replace(asked[part.index - 100], begun=part) for part in moved])
    got = []
    while generation.unfinished:
        got += generation.poll(30)
    generation.close()
    got.sort(key=lambda completion: completion.index)
    assert tokens(got) == tokens(expected)
    assert_drawn_so(model, asked, got, sampling)
    assert {version for completion in got for version in completion.versions} == {1, 2}


@pytest.mark.oldest
def test_tokens_match_a_regular_expression_by_its_distribution(loaded: VLLMEngine, model: LlamaForCausalLM) -> None:
    asked, tokenizer = requests(24), letters()
    sampling = replace(SAMPLING, regex="[a-e]{3}([0-9]|x)+", stop_token_ids=(EOS,))
    got = samples(loaded, asked, sampling)
    texts = [tokenizer.decode(completion.token_ids, skip_special_tokens=True) for completion in got]
    assert all(re.fullmatch("[a-e]{3}([0-9]|x)+", text) for text in texts)
    assert len(set(texts)) > 12
    for completion in got:
        assert completion.stopped == (completion.token_ids[-1] == EOS)
        assert len(completion.token_ids) == 24 or completion.stopped
    first = tokenizer.convert_tokens_to_ids(list("abcde"))
    for request, completion in zip(asked, got, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt_ids])).logits[0, -1] / sampling.temperature
        own = logits[first].log_softmax(-1)[first.index(completion.token_ids[0])]
        assert completion.logprobs[0] == pytest.approx(own.item(), abs=1e-4)
    exact = samples(loaded, asked, replace(SAMPLING, regex="ab"))
    assert {completion.token_ids for completion in exact} == {(*tokenizer.convert_tokens_to_ids(["a", "b"]), EOS)}
    assert all(completion.stopped for completion in exact), "the eos token that a grammar ends with"
    with pytest.raises(EngineError, match="vLLM refuses these sampling settings: "):
        loaded.generate(asked, replace(SAMPLING, regex="[a-"))
    assert len(samples(loaded, asked)) == len(asked), "the engine goes on"
    with pytest.raises(EngineError, match="no structured outputs"):
        list(in_place(model).generate(asked, sampling))


def test_further_arguments_reach_vllm(loaded: VLLMEngine) -> None:
    asked, tokenizer = requests(24), letters()
    free = samples(loaded, asked)
    word = tokenizer.decode(free[0].token_ids[3:5])
    got = samples(loaded, asked, replace(SAMPLING, extra={"stop": [word]}))
    assert got[0].token_ids == free[0].token_ids[:5] and got[0].stopped
    assert tokens(samples(loaded, asked, replace(SAMPLING, extra={"frequency_penalty": 2.0}))) != tokens(free)
    assert tokens(samples(loaded, asked, replace(SAMPLING, extra={"logit_bias": {3: 100.0}}))) == [(3,) * 24] * 24
    structured = {"structured_outputs": {"choice": ["ab", "cd"]}}
    got = samples(loaded, asked, replace(SAMPLING, extra=structured))
    assert {tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in got} == {"ab", "cd"}
    with pytest.raises(EngineError, match=r"frequency_penalty must be in \[-2, 2\]"):
        loaded.generate(asked, replace(SAMPLING, extra={"frequency_penalty": 7.0}))
    with pytest.raises(EngineError, match="did you mean 'frequency_penalty'"):
        loaded.generate(asked, replace(SAMPLING, extra={"frequncy_penalty": 1.0}))
    assert tokens(samples(loaded, asked)) == tokens(free)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 37 + j * j * 11 + j) % VOCABULARY for j in range(length))


def computed(asked: Sequence[GenerationRequest], got: Sequence[Completion]) -> int:
    """The tokens of the prompts that vLLM computed, by its own count of those that it found in its cache."""
    return sum(len(request.prompt_ids) - c.cached_tokens for request, c in zip(asked, got, strict=True))


def test_several_responses_to_a_prompt_compute_it_once(loaded: VLLMEngine, model: LlamaForCausalLM) -> None:
    length, group, prompts = 6 * BLOCK + 5, 8, 12
    asked = [GenerationRequest(100 + i, prompt(i // group, length), i) for i in range(prompts * group)]
    got = samples(loaded, asked)
    # what lies behind the last whole block is computed for each
    assert computed(asked, got) == prompts * (length + (group - 1) * (length % BLOCK))
    assert_drawn_so(model, asked[:20], got[:20], SAMPLING)
    short = [GenerationRequest(i, prompt(99, BLOCK), i) for i in range(group)]
    assert computed(short, samples(loaded, short)) == group * BLOCK, "less than a block and a token is not shared"


def test_the_next_turn_computes_the_new_and_new_parameters_all(loaded: VLLMEngine, model: LlamaForCausalLM) -> None:
    first = [GenerationRequest(i, prompt(i, 2 * BLOCK + 9), i) for i in range(8)]
    got = samples(loaded, first)
    assert computed(first, got) == sum(len(request.prompt_ids) for request in first)
    suffix = (5, 6, 7)
    turn = [replace(r, prompt_ids=(*r.prompt_ids, *c.token_ids, *suffix)) for r, c in zip(first, got, strict=True)]
    again = samples(loaded, turn)
    length = len(turn[0].prompt_ids)
    assert computed(turn, again) == 8 * (length % BLOCK) < 8 * BLOCK
    assert_drawn_so(model, turn, again, SAMPLING)
    other = llama(7)
    for version in (1, 2):  # also if they have the number of those before
        loaded.load(buckets(other if version == 1 else model), version)
        anew = samples(loaded, turn)
        assert computed(turn, anew) == 8 * length
        assert_drawn_so(other if version == 1 else model, turn, anew, SAMPLING)


def test_after_updates_in_flight_no_earlier_keys_are_used(loaded: VLLMEngine, model: LlamaForCausalLM) -> None:
    asked = [GenerationRequest(i, prompt(i, 3 * BLOCK + 1), i) for i in range(8)]
    generation = loaded.start(asked, replace(SAMPLING, max_tokens=80), Updates.KEEP)
    other = llama(8)
    loaded.load(buckets(other), 2)
    while generation.unfinished:
        generation.poll(30)
    generation.close()
    for weights, version in ((other, 3), (model, 4)):
        if weights is model:
            loaded.load(buckets(model), version)
        assert_drawn_so(weights, asked, samples(loaded, asked), SAMPLING)


def test_an_engine_without_a_tokenizer_refuses_what_reads_text(vllm_engine: VLLMEngine) -> None:
    vllm_engine.load(buckets(llama(1)), 1)
    with pytest.raises(EngineError, match="regex needs the text of responses, and the engine has no tokenizer"):
        vllm_engine.generate(requests(1), replace(SAMPLING, regex="a+"))
