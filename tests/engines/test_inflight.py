"""Real vLLM engines that take new parameters while they generate. The log-probability of every token is computed again
by Transformers, with the parameters and with the keys and values that the engine had when it drew the token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from generating import buckets, requests, samples
from holding import held
from limits import patience
from rescoring import TEMPERATURE, Models, assert_exact, error_of, kept_keys, the_rest, wait_for, wait_until_idle
from transformers import LlamaForCausalLM

from trl_realloc.engines.base import EngineError, Updates
from trl_realloc.engines.generation.vllm import VLLMEngine
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.requests import Sampling


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed"),
]

Start = Callable[..., VLLMEngine]

ROWS = 16  # that the engine generates at the same time
LONG = Sampling(max_tokens=200, temperature=TEMPERATURE)
STOPPING = Sampling(max_tokens=200, temperature=TEMPERATURE, stop_token_ids=(3,))


@pytest.fixture(scope="module")
def shared(start: Start) -> VLLMEngine:
    return start(max_num_seqs=ROWS)


@pytest.fixture
def engine(shared: VLLMEngine, models: Models) -> VLLMEngine:
    """The engine with version 1, whatever the test before it has done."""
    shared.load(buckets(models[1]), 1)
    return shared


def test_every_token_is_of_its_version_and_earlier_ones_see_no_update(engine: VLLMEngine, models: Models) -> None:
    asked = requests(ROWS + 12)  # the last ones wait until others have finished
    untouched = samples(engine, asked, LONG)
    with held(engine, 60) as hold:
        generation = engine.start(asked, LONG, Updates.KEEP)
        for version in (2, 3):
            hold(60 * (version - 1))
            wait_for(generation, 60 * (version - 1))
            engine.load(buckets(models[version]), version)
            assert engine.version == version
            assert 0 < engine.stopped_s < patience(5)
    got = the_rest(generation)
    assert [completion.versions[0] for completion in got] == [1] * ROWS + [3] * 12
    assert all(set(completion.versions) == {1, 2, 3} for completion in got[:ROWS])
    for before, after in zip(untouched[:ROWS], got[:ROWS], strict=True):
        drawn = after.versions.index(2)
        assert drawn >= 60
        assert after.token_ids[:drawn] == before.token_ids[:drawn]
        assert after.logprobs[:drawn] == before.logprobs[:drawn]
        assert after.token_ids != before.token_ids
    assert_exact(models, asked, got)
    generation.close()
    assert {version for sample in samples(engine, asked[:2], LONG) for version in sample.versions} == {3}


def test_updates_come_with_and_without_requests_and_several_in_a_row(engine: VLLMEngine, models: Models) -> None:
    generation = engine.start([], LONG, Updates.KEEP)
    for version in (2, 3):
        engine.load(buckets(models[version]), version)
        assert engine.stopped_s == 0
    asked = requests(8)
    with held(engine, 20):
        generation.add(asked)
        wait_for(generation, 20)
        for version in (4, 5):
            engine.load(buckets(models[version]), version)
    got = the_rest(generation)
    assert {version for completion in got for version in completion.versions} <= {3, 4, 5}
    assert all({3, 5} <= set(completion.versions) for completion in got)
    assert_exact(models, asked, got)
    engine.load(buckets(models[6]), 6)
    generation.add(asked)
    again = the_rest(generation)
    assert {version for completion in again for version in completion.versions} == {6}
    assert_exact(models, asked, again)
    generation.close()


def test_a_new_request_finds_no_keys_of_earlier_parameters(engine: VLLMEngine, models: Models) -> None:
    """Prompts longer than a block of the prefix cache, and the same ones again: running, waiting, and after updates."""
    short = Sampling(max_tokens=60, temperature=TEMPERATURE)
    asked = requests(ROWS, length=150)
    waiting = [replace(request, index=request.index + 500) for request in asked]
    with held(engine, 5):
        generation = engine.start([*asked, *waiting], short, Updates.KEEP)
        wait_for(generation, 5)
        engine.load(buckets(models[2]), 2)
    later = [replace(request, index=request.index + 1000) for request in asked]
    generation.add(later)
    got = the_rest(generation)
    assert_exact(models, [*asked, *waiting, *later], got)
    assert {version for completion in got[ROWS:] for version in completion.versions} == {2}
    generation.close()


def test_samples_are_withdrawn_and_come_back_after_an_update(engine: VLLMEngine, models: Models) -> None:
    asked = requests(8)
    with held(engine, 50) as hold:
        generation = engine.start(asked, LONG, Updates.KEEP)
        wait_for(generation, 50)
        moved = generation.withdraw([request.index for request in asked[:4]])
        assert all(set(unfinished.versions) == {1} for unfinished in moved)
        assert all(len(unfinished.versions) == len(unfinished.token_ids) >= 40 for unfinished in moved)
        engine.load(buckets(models[2]), 2)
        by_index = {request.index: request for request in asked}
        generation.add([replace(by_index[unfinished.index], begun=unfinished) for unfinished in moved])
        hold(120)
        wait_for(generation, 120)
        engine.load(buckets(models[3]), 3)
    got = the_rest(generation)
    assert_exact(models, asked[4:], got[4:])
    for request, completion, unfinished in zip(asked, got[:4], moved, strict=False):
        count = len(unfinished.token_ids)
        assert completion.token_ids[:count] == unfinished.token_ids
        assert completion.logprobs[:count] == unfinished.logprobs
        assert completion.versions[:count] == unfinished.versions
        assert set(completion.versions) == {1, 2, 3}
        tokens, versions = completion.token_ids, completion.versions
        # version 2 has computed the keys of what it was given
        expected = kept_keys(models, request.prompt_ids, tokens, versions, already=count)
        assert error_of(expected, completion.logprobs[count:], tokens[count:]) < 1e-4
    generation.close()


def test_peek_shows_all_that_is_unfinished_and_stops_nothing(engine: VLLMEngine, models: Models) -> None:
    asked = requests(ROWS + 4)
    expected = samples(engine, asked, STOPPING)
    finished, peeks = {}, 0
    with held(engine, 5) as hold:
        generation = engine.start(asked, STOPPING, Updates.KEEP)
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
            hold(1 + max((len(unfinished.token_ids) for unfinished in so_far), default=0))
    assert peeks > 10 * ROWS
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
        wait_until_idle(engine)  # it decodes meanwhile
        yield from buckets(models[2])

    engine.load(late(), 2)
    assert engine.stopped_s == 0
    assert the_rest(generation) == expected
    generation.close()


def test_no_token_is_drawn_while_the_engine_has_a_part_of_the_parameters(engine: VLLMEngine, models: Models) -> None:
    asked = requests(ROWS)

    def slow() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for number, bucket in enumerate(buckets(models[2])):
            if number == 1:  # from the first bucket on it would be wrong to decode
                decode_on()
            time.sleep(0.3 if number in (1, 2) else 0)
            yield bucket

    with held(engine, 20) as hold:
        decode_on = partial(hold, LONG.max_tokens)
        generation = engine.start(asked, LONG, Updates.KEEP)
        wait_for(generation, 20)
        engine.load(slow(), 2)
    assert 0.6 <= engine.stopped_s < patience(3)
    got = the_rest(generation)
    assert all(set(completion.versions) == {1, 2} for completion in got)
    assert_exact(models, asked, got)
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
def test_a_failed_update_closes_the_generation_with_its_reason(
    engine: VLLMEngine,
    models: Models,
    broken: Callable[[LlamaForCausalLM], Iterator[list[tuple[str, torch.Tensor]]]],
    error: type[Exception],
    reason: str,
) -> None:
    with held(engine, 20):
        generation = engine.start(requests(ROWS + 4), LONG, Updates.KEEP)
        wait_for(generation, 20)
        with pytest.raises(error, match=reason):
            engine.load(broken(models[2]), 2)
    assert engine.version == -1
    for call in (lambda: generation.poll(1), lambda: generation.add(requests(1, seed=9)), generation.peek):
        with pytest.raises(EngineError, match=f"(?s)did not get the weights of version 2.*{reason}"):
            call()
    generation.close()
    with pytest.raises(EngineError, match="no complete weights"):
        engine.start(requests(1), LONG, Updates.KEEP)
    engine.load(buckets(models[3]), 3)
    asked = requests(4)
    generation = engine.start(asked, LONG, Updates.KEEP)
    assert_exact(models, asked, the_rest(generation))
    generation.close()
