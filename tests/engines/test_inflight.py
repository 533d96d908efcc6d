"""Real vLLM engines that take new parameters while they generate. The log-probability of every token is computed again
by Transformers, with the parameters and with the keys and values that the engine had when it drew the token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch
from generating import buckets, llama, requests, samples
from transformers import DynamicCache, LlamaForCausalLM

from trl_realloc.engines.base import (
    Completion,
    EngineError,
    Generation,
    GenerationRequest,
    Sampling,
    Unfinished,
    Updates,
)
from trl_realloc.engines.generation.vllm import VLLMEngine
from trl_realloc.engines.generation.vllm_support import is_vllm_available


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed"),
]

Start = Callable[..., VLLMEngine]
Models = Mapping[int, LlamaForCausalLM]  # by version

ROWS = 16  # that the engine generates at the same time
TEMPERATURE = 0.7
LONG = Sampling(max_tokens=200, temperature=TEMPERATURE)
STOPPING = Sampling(max_tokens=200, temperature=TEMPERATURE, stop_token_id=3)
TAKING = [Updates.KEEP, Updates.RECOMPUTE]


@pytest.fixture(scope="module")
def models() -> Models:
    return {version: llama(20 + version) for version in range(1, 7)}


@pytest.fixture(scope="module")
def shared(start: Start) -> VLLMEngine:
    return start(max_num_seqs=ROWS)


@pytest.fixture
def engine(shared: VLLMEngine, models: Models) -> VLLMEngine:
    """The engine with version 1, whatever the test before it has done."""
    shared.load(buckets(models[1]), 1)
    return shared


def wait_for(generation: Generation, tokens: int, more: Sequence[Completion] = ()) -> list[Unfinished]:
    """Look at a generation until a request has drawn so many tokens."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        so_far = generation.peek()
        if max(len(unfinished.token_ids) for unfinished in so_far) >= tokens:
            return so_far
    raise AssertionError(f"no request has {tokens} tokens")


def the_rest(generation: Generation) -> list[Completion]:
    """All completions that a generation still has to give, by index."""
    completions: list[Completion] = []
    while generation.unfinished:
        completions += generation.poll(30)
    return sorted(completions, key=lambda completion: completion.index)


def kept_keys(
    models: Models, prompt: Sequence[int], tokens: Sequence[int], versions: Sequence[int], already: int = 0
) -> torch.Tensor:
    """The distribution of each token (tokens, vocabulary), where the keys of a position stay those of the parameters
    that first computed it.

    Args:
        already: the number of tokens whose keys were computed with the first token's parameters after them.
    """
    cache, rows, ids = DynamicCache(), [], torch.tensor([[*prompt, *tokens]])
    computed = 0  # positions whose keys are in the cache
    for version, run in groupby(range(already, len(tokens)), key=lambda place: versions[place]):
        end = len(prompt) + max(run)  # the last of the run's tokens is drawn at the position before its own
        with torch.no_grad():
            logits = models[version](ids[:, computed:end], past_key_values=cache, use_cache=True).logits[0]
        rows.append(logits[max(0, len(prompt) + already - 1 - computed) :])
        computed = end
    return (torch.cat(rows) / TEMPERATURE).log_softmax(-1)


def recomputed_keys(
    models: Models, prompt: Sequence[int], tokens: Sequence[int], versions: Sequence[int]
) -> torch.Tensor:
    """The distribution of each token (tokens, vocabulary), where the keys of all positions are of its parameters."""
    ids, rows = torch.tensor([[*prompt, *tokens]]), torch.empty(0)
    with torch.no_grad():
        by_version = {v: models[v](ids).logits[0, len(prompt) - 1 : -1] for v in set(versions)}
    rows = torch.stack([by_version[version][place] for place, version in enumerate(versions)])
    return (rows / TEMPERATURE).log_softmax(-1)


REFERENCE = {Updates.KEEP: kept_keys, Updates.RECOMPUTE: recomputed_keys}


def error_of(expected: torch.Tensor, logprobs: Sequence[float], tokens: Sequence[int]) -> float:
    own = expected.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return float((own - torch.tensor(logprobs)).abs().max())


def drawn_by(seed: int, expected: torch.Tensor) -> tuple[int, ...]:
    """The tokens that a sample's random numbers give: number j belongs to token j."""
    cumulative = expected.double().exp().cumsum(-1)
    point = torch.from_numpy(np.random.default_rng(seed).random(len(expected)))[:, None] * cumulative[:, -1:]
    return tuple(torch.searchsorted(cumulative, point, right=True)[:, 0].tolist())


def shifted(versions: Sequence[int]) -> list[int]:
    """As if each update had come a token later."""
    return [versions[0], *versions[:-1]]


def assert_exact(
    models: Models, asked: Sequence[GenerationRequest], got: Sequence[Completion], updates: Updates
) -> None:
    """Each token is of its version, and drawn with the random number of its place."""
    wrong = []
    for request, completion in zip(asked, got, strict=True):
        assert completion.index == request.index
        assert len(completion.versions) == len(completion.token_ids) == len(completion.logprobs)
        assert list(completion.versions) == sorted(completion.versions)
        tokens, versions = completion.token_ids, completion.versions
        expected = REFERENCE[updates](models, request.prompt_ids, tokens, versions)
        assert error_of(expected, completion.logprobs, tokens) < 1e-4
        assert drawn_by(request.seed, expected) == tokens
        if len(set(versions)) > 1:
            other = REFERENCE[updates](models, request.prompt_ids, tokens, shifted(versions))
            wrong.append(error_of(other, completion.logprobs, tokens))
    assert not wrong or min(wrong) > 1e-2, "a version that is a token off would not be noticed"


@pytest.mark.parametrize("updates", TAKING)
def test_every_token_is_of_its_version_and_those_before_an_update_are_as_if_it_had_not_come(
    engine: VLLMEngine, models: Models, updates: Updates
) -> None:
    asked = requests(ROWS + 12)  # the last ones wait until others have finished
    untouched = samples(engine, asked, LONG)
    generation = engine.start(asked, LONG, updates)
    for version in (2, 3):
        wait_for(generation, 60 * (version - 1))
        engine.load(buckets(models[version]), version)
        assert engine.version == version
        assert 0 < engine.stopped_s < 5
    got = the_rest(generation)
    assert [completion.versions[0] for completion in got] == [1] * ROWS + [3] * 12
    assert all(set(completion.versions) == {1, 2, 3} for completion in got[:ROWS])
    for before, after in zip(untouched[:ROWS], got[:ROWS], strict=True):
        drawn = after.versions.index(2)
        assert drawn >= 60
        assert after.token_ids[:drawn] == before.token_ids[:drawn]
        assert after.logprobs[:drawn] == before.logprobs[:drawn]
        assert after.token_ids != before.token_ids
    assert_exact(models, asked, got, updates)
    generation.close()
    assert {version for sample in samples(engine, asked[:2], LONG) for version in sample.versions} == {3}


@pytest.mark.parametrize("updates", TAKING)
def test_updates_come_with_and_without_requests_and_several_one_after_the_other(
    engine: VLLMEngine, models: Models, updates: Updates
) -> None:
    generation = engine.start([], LONG, updates)
    for version in (2, 3):
        engine.load(buckets(models[version]), version)
        assert engine.stopped_s == 0
    asked = requests(8)
    generation.add(asked)
    wait_for(generation, 20)
    for version in (4, 5):
        engine.load(buckets(models[version]), version)
    got = the_rest(generation)
    assert {version for completion in got for version in completion.versions} <= {3, 4, 5}
    assert all({3, 5} <= set(completion.versions) for completion in got)
    assert_exact(models, asked, got, updates)
    engine.load(buckets(models[6]), 6)
    generation.add(asked)
    again = the_rest(generation)
    assert {version for completion in again for version in completion.versions} == {6}
    assert_exact(models, asked, again, updates)
    generation.close()


@pytest.mark.parametrize("updates", TAKING)
def test_a_new_request_finds_no_keys_of_earlier_parameters(
    engine: VLLMEngine, models: Models, updates: Updates
) -> None:
    """Prompts longer than a block of the prefix cache, and the same ones again: running, waiting, and after updates."""
    short = Sampling(max_tokens=60, temperature=TEMPERATURE)
    asked = requests(ROWS, length=150)
    waiting = [replace(request, index=request.index + 500) for request in asked]
    generation = engine.start([*asked, *waiting], short, updates)
    wait_for(generation, 5)
    engine.load(buckets(models[2]), 2)
    later = [replace(request, index=request.index + 1000) for request in asked]
    generation.add(later)
    got = the_rest(generation)
    assert_exact(models, [*asked, *waiting, *later], got, updates)
    assert {version for completion in got[ROWS:] for version in completion.versions} == {2}
    generation.close()


@pytest.mark.parametrize("updates", TAKING)
def test_samples_are_withdrawn_and_come_back_after_an_update(
    engine: VLLMEngine, models: Models, updates: Updates
) -> None:
    asked = requests(8)
    generation = engine.start(asked, LONG, updates)
    wait_for(generation, 50)
    moved = generation.withdraw([request.index for request in asked[:4]])
    assert all(set(unfinished.versions) == {1} for unfinished in moved)
    assert all(len(unfinished.versions) == len(unfinished.token_ids) >= 40 for unfinished in moved)
    engine.load(buckets(models[2]), 2)
    by_index = {request.index: request for request in asked}
    generation.add([replace(by_index[unfinished.index], begun=unfinished) for unfinished in moved])
    wait_for(generation, 120)
    engine.load(buckets(models[3]), 3)
    got = the_rest(generation)
    assert_exact(models, asked[4:], got[4:], updates)
    for request, completion, unfinished in zip(asked, got[:4], moved, strict=False):
        count = len(unfinished.token_ids)
        assert completion.token_ids[:count] == unfinished.token_ids
        assert completion.logprobs[:count] == unfinished.logprobs
        assert completion.versions[:count] == unfinished.versions
        assert set(completion.versions) == {1, 2, 3}
        tokens, versions = completion.token_ids, completion.versions
        if updates is Updates.KEEP:  # version 2 has computed the keys of what it was given
            expected = kept_keys(models, request.prompt_ids, tokens, versions, already=count)
        else:
            expected = recomputed_keys(models, request.prompt_ids, tokens, versions)[count:]
        assert error_of(expected, completion.logprobs[count:], tokens[count:]) < 1e-4
    generation.close()


def test_peek_shows_all_that_is_unfinished_and_stops_nothing(engine: VLLMEngine, models: Models) -> None:
    asked = requests(ROWS + 4)
    expected = samples(engine, asked, STOPPING)
    generation = engine.start(asked, STOPPING, Updates.KEEP)
    assert generation.poll(0) == []
    finished: dict[int, Completion] = {}
    peeks = 0
    while generation.unfinished:
        so_far = generation.peek()
        finished |= {completion.index: completion for completion in generation.poll(0)}
        peeks += len(so_far)
        assert {unfinished.index for unfinished in so_far} | finished.keys() == {r.index for r in asked}
        for unfinished in so_far:
            whole = expected[unfinished.index - asked[0].index]
            count = len(unfinished.token_ids)
            assert unfinished.token_ids == whole.token_ids[:count]
            assert unfinished.logprobs == whole.logprobs[:count]
            assert unfinished.versions == (1,) * count
    assert peeks > ROWS
    assert [finished[request.index] for request in asked] == expected
    assert generation.peek() == []
    generation.close()
    with pytest.raises(EngineError, match="this generation was closed"):
        generation.peek()


def test_samples_that_finish_before_the_first_bucket_comes_are_not_lost(engine: VLLMEngine, models: Models) -> None:
    asked = requests(8)
    short = Sampling(max_tokens=24, temperature=TEMPERATURE)
    expected = samples(engine, asked, short)
    generation = engine.start(asked, short, Updates.KEEP)

    def late() -> Iterator[list[tuple[str, torch.Tensor]]]:
        time.sleep(1)  # the engine decodes meanwhile
        yield from buckets(models[2])

    engine.load(late(), 2)
    assert engine.stopped_s == 0
    assert the_rest(generation) == expected
    generation.close()


@pytest.mark.parametrize("updates", TAKING)
def test_no_token_is_drawn_while_the_engine_has_a_part_of_the_parameters(
    engine: VLLMEngine, models: Models, updates: Updates
) -> None:
    asked = requests(ROWS)
    generation = engine.start(asked, LONG, updates)
    wait_for(generation, 20)

    def slow() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for number, bucket in enumerate(buckets(models[2])):
            time.sleep(0.3 if number in (1, 2) else 0)
            yield bucket

    engine.load(slow(), 2)
    assert 0.6 <= engine.stopped_s < 3
    got = the_rest(generation)
    assert all(set(completion.versions) == {1, 2} for completion in got)
    assert_exact(models, asked, got, updates)
    generation.close()


def without_the_head(model: LlamaForCausalLM) -> Iterator[list[tuple[str, torch.Tensor]]]:
    yield [(name, parameter) for name, parameter in model.named_parameters() if name != "lm_head.weight"]


def torn(model: LlamaForCausalLM) -> Iterator[list[tuple[str, torch.Tensor]]]:
    yield next(buckets(model))
    raise ConnectionError("the trainer lost a rank")


def torn_at_the_end(model: LlamaForCausalLM) -> Iterator[list[tuple[str, torch.Tensor]]]:
    yield from buckets(model)
    raise ConnectionError("the trainer lost a rank")


def nothing(model: LlamaForCausalLM) -> Iterator[list[tuple[str, torch.Tensor]]]:
    yield from ()


@pytest.mark.parametrize(
    ("broken", "error", "reason"),
    [
        (without_the_head, EngineError, r"lm_head\.weight"),
        (torn, ConnectionError, "lost a rank"),
        (torn_at_the_end, ConnectionError, "lost a rank"),
        (nothing, EngineError, "no bucket held"),
    ],
)
@pytest.mark.parametrize("updates", TAKING)
def test_a_failed_update_closes_the_generation_with_its_reason(
    engine: VLLMEngine,
    models: Models,
    broken: Callable[[LlamaForCausalLM], Iterator[list[tuple[str, torch.Tensor]]]],
    error: type[Exception],
    reason: str,
    updates: Updates,
) -> None:
    generation = engine.start(requests(ROWS + 4), LONG, updates)
    wait_for(generation, 20)
    with pytest.raises(error, match=reason):
        engine.load(broken(models[2]), 2)
    assert engine.version == -1
    for call in (lambda: generation.poll(1), lambda: generation.add(requests(1, seed=9)), generation.peek):
        with pytest.raises(EngineError, match=f"(?s)did not get the weights of version 2.*{reason}"):
            call()
    generation.close()
    with pytest.raises(EngineError, match="no complete weights"):
        engine.start(requests(1), LONG, updates)
    engine.load(buckets(models[3]), 3)
    asked = requests(4)
    generation = engine.start(asked, LONG, updates)
    assert_exact(models, asked, the_rest(generation), updates)
    generation.close()
