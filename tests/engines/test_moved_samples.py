"""Generations of real vLLM engines in the background, and samples that move between two engines before their end."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from generating import ENDLESS, MANY, buckets, llama, requests, samples, worst_difference
from holding import held
from limits import patience
from rescoring import wait_for
from transformers import LlamaForCausalLM

from trl_realloc.engines.base import BackgroundEngine, EngineDied, EngineError, Generation
from trl_realloc.engines.generation.transformers import TransformersEngine
from trl_realloc.engines.generation.vllm import VLLMEngine
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.requests import Completion, GenerationRequest, Sampling, Unfinished


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed"),
]

Start = Callable[..., VLLMEngine]

# Of log-probabilities that are computed in another batch, or from keys and values that a prefill has computed again.
# This model's logits are large, and an attention without AVX-512 rounds more: 1.8e-5 at most in 637 moves there.
ROUNDING = 4e-5
ROWS = 16  # that an engine generates at the same time
LONG = Sampling(max_tokens=64, temperature=0.7)
STOPPING = Sampling(max_tokens=64, temperature=0.7, stop_token_ids=(3,))


@pytest.fixture(scope="module")
def engines(start: Start, model: LlamaForCausalLM) -> list[VLLMEngine]:
    cores = sorted(os.sched_getaffinity(0))
    pair = [start(max_num_seqs=ROWS, cpu_cores=[core]) for core in (cores[0], cores[-1])]
    for engine in pair:
        engine.load(buckets(model), 1)
    return pair


@pytest.fixture
def one(engines: list[VLLMEngine]) -> VLLMEngine:
    return engines[0]


def the_rest(generation: Generation) -> dict[int, Completion]:
    """All completions that a generation still has to give, by index."""
    completions: list[Completion] = []
    while generation.unfinished:
        completions += generation.poll(30)
    assert len({completion.index for completion in completions}) == len(completions)
    return {completion.index: completion for completion in completions}


def continued(asked: Sequence[GenerationRequest], withdrawn: Sequence[Unfinished]) -> list[GenerationRequest]:
    by_index = {request.index: request for request in asked}
    return [replace(by_index[unfinished.index], begun=unfinished) for unfinished in withdrawn]


def assert_same(got: dict[int, Completion], expected: Sequence[Completion]) -> None:
    assert got.keys() == {completion.index for completion in expected}
    for completion in expected:
        other = got[completion.index]
        assert (other.token_ids, other.stopped) == (completion.token_ids, completion.stopped)
        assert len(other.versions) == len(other.token_ids)
        assert other.logprobs == pytest.approx(completion.logprobs, abs=ROUNDING)


class Moves:
    """Two generations between which samples move. Counts the tokens that the engines decode."""

    def __init__(self, engines: Sequence[VLLMEngine], asked: Sequence[GenerationRequest], sampling: Sampling) -> None:
        self.asked = asked
        self.generations = [
            engine.start(asked[number :: len(engines)], sampling) for number, engine in enumerate(engines)
        ]
        self.begun: dict[int, int] = {}  # by index: the tokens that the engine that has the sample did not decode
        self.decoded: list[int] = []
        self.moves: dict[int, int] = {}
        self.completions: dict[int, Completion] = {}

    def poll(self, timeout_s: float) -> None:
        for generation in self.generations:
            for completion in generation.poll(timeout_s):
                assert completion.index not in self.completions
                self.completions[completion.index] = completion
                self.decoded.append(len(completion.token_ids) - self.begun.get(completion.index, 0))

    def move(self, source: int, indices: Sequence[int]) -> None:
        withdrawn = self.generations[source].withdraw(indices)
        self.generations[1 - source].add(continued(self.asked, withdrawn))
        for unfinished in withdrawn:
            self.decoded.append(len(unfinished.token_ids) - self.begun.get(unfinished.index, 0))
            self.begun[unfinished.index] = len(unfinished.token_ids)
            self.moves[unfinished.index] = self.moves.get(unfinished.index, 0) + 1


@pytest.mark.oldest  # what is used of vLLM to withdraw samples is private
def test_samples_that_move_at_random_moments_are_those_that_do_not_move(engines: list[VLLMEngine]) -> None:
    chance, moved, again = random.Random(5), 0, 0
    for number in range(200):
        asked = requests(48, seed=1000 * number)
        expected = samples(engines[number % 2], asked, STOPPING)
        with held(engines[0], 0) as hold, held(engines[1], 0) as hold_other:
            moves = Moves(engines, asked, STOPPING)
            for limit in itertools.accumulate(chance.choice([1, 2, 9]) for _ in range(STOPPING.max_tokens)):
                hold(limit)
                hold_other(limit)
                moves.poll(chance.choice([0.0, 0.002, 0.01]))
                unfinished = [request.index for request in asked if request.index not in moves.completions]
                moves.move(chance.randrange(2), chance.sample(unfinished, min(len(unfinished), chance.randrange(12))))
        while len(moves.completions) < len(asked):
            moves.poll(30)
        assert_same(moves.completions, expected)
        assert all(decoded >= 0 for decoded in moves.decoded)
        assert sum(moves.decoded) == sum(len(completion.token_ids) for completion in expected)
        moved += sum(moves.moves.values())
        again += sum(count > 1 for count in moves.moves.values())
        if moved >= 500 and again >= 50:
            break
    print(f"{moved} samples moved, {again} of them several times, in {number + 1} generations")
    assert moved >= 500
    assert again >= 50


def test_a_sample_can_be_continued_after_each_of_its_tokens(one: VLLMEngine) -> None:
    asked = requests(48, seed=7)
    whole = next(c for c in samples(one, asked, STOPPING) if c.stopped and 8 <= len(c.token_ids) <= 40)
    (request,) = (request for request in asked if request.index == whole.index)
    generation = one.start([], STOPPING)
    for count in range(len(whole.token_ids)):  # the last one has the stop token alone left to draw
        begun = Unfinished(whole.index, whole.token_ids[:count], whole.logprobs[:count], whole.versions[:count])
        generation.add([replace(request, begun=begun)])
        assert_same(the_rest(generation), [whole])
    generation.close()


def test_what_is_withdrawn_before_it_is_decoded_has_no_tokens(engines: list[VLLMEngine]) -> None:
    asked = requests(ROWS + 24)
    expected = samples(engines[0], asked, LONG)
    with held(engines[0], 2):
        source, target = engines[0].start(asked, LONG), engines[1].start([], LONG)
        wait_for(source, 2)
        withdrawn = source.withdraw([request.index for request in asked])
    assert len(withdrawn) == len(asked)
    assert source.unfinished == 0
    assert [unfinished.token_ids for unfinished in withdrawn[ROWS:]] == [()] * 24
    target.add(continued(asked, withdrawn))
    assert_same(the_rest(target), expected)


def test_what_has_finished_comes_out_of_poll_and_not_of_withdraw(one: VLLMEngine) -> None:
    asked = requests(12)
    shortest = min(len(completion.token_ids) for completion in samples(one, asked, STOPPING))
    with held(one, shortest):
        began = time.time()
        generation = one.start(asked, STOPPING)
        started = generation.ended_at
        assert began - 0.01 <= started <= time.time()
        (first, *others) = generation.poll(30)
        assert generation.unfinished == 11 - len(others) > 0
        assert generation.withdraw([first.index, 999]) == []
    indices = [request.index for request in asked]
    while generation.peek():
        assert generation.withdraw(indices, LONG.max_tokens + 1) == []
    ended = time.time() + 0.01
    assert generation.withdraw(indices) == []
    assert started < generation.ended_at < ended
    assert generation.unfinished > 0
    rest = the_rest(generation)
    assert {first.index, *(other.index for other in others), *rest} == {request.index for request in asked}
    assert generation.poll(30) == []  # without waiting for what will not come
    assert time.time() - ended < patience(10)


def test_what_has_few_tokens_left_goes_on(engines: list[VLLMEngine]) -> None:
    asked, longer = requests(8), replace(LONG, max_tokens=200)
    indices = [request.index for request in asked]
    expected = samples(engines[0], asked, longer)
    with held(engines[0], 161), held(engines[1], 1):
        generation = engines[0].start(asked, longer)
        wait_for(generation, 160)
        assert generation.withdraw(indices, 41) == []
        withdrawn = generation.withdraw(indices[:4], 39)
        assert len(withdrawn) == 4
        other = engines[1].start(continued(asked, withdrawn), longer)
        # a sample's tokens count from its beginning, not from its move
        assert other.withdraw(indices, 201 - min(len(unfinished.token_ids) for unfinished in withdrawn)) == []
    assert_same(the_rest(generation) | the_rest(other), expected)


def test_requests_can_be_added_when_all_others_have_finished(one: VLLMEngine) -> None:
    assert isinstance(one, BackgroundEngine)
    asked = requests(24)
    expected = samples(one, asked, LONG)
    generation = one.start([], LONG)
    assert generation.unfinished == 0
    assert generation.poll(30) == []
    got = {}
    for begin in range(0, 24, 8):
        generation.add(asked[begin : begin + 8])
        assert generation.unfinished == 8
        with pytest.raises(EngineError, match=f"request {asked[begin].index} is in this generation already"):
            generation.add(asked[begin : begin + 1])
        # comes back to the engine that it was withdrawn from
        generation.add(continued(asked, generation.withdraw([asked[begin].index])))
        got |= the_rest(generation)
    assert_same(got, expected)


def test_a_generation_closed_in_its_middle_leaves_the_engine_free(one: VLLMEngine, model: LlamaForCausalLM) -> None:
    expected = samples(one, requests(8), LONG)
    with held(one, 8):
        generation = one.start(requests(64), LONG)
        wait_for(generation, 8)
        generation.close()
    generation.close()
    for call in (lambda: generation.poll(1), lambda: generation.add(requests(1)), lambda: generation.withdraw([100])):
        with pytest.raises(EngineError, match="this generation was closed"):
            call()
    other = llama(2)
    one.load(buckets(other), 2)
    assert worst_difference(other, requests(8), samples(one, requests(8), LONG), 0.7) < 1e-4
    left = one.start(requests(MANY), LONG)
    one.load(buckets(model), 1)
    with pytest.raises(EngineError, match="was ended by a later call"):
        left.poll(1)
    left.close()
    assert samples(one, requests(8), LONG) == expected


@pytest.mark.parametrize(
    ("begun", "complaint"),
    [
        (
            Unfinished(100, (5,) * 64, (-1.0,) * 64, (1,) * 64),
            "request 100 has begun with 64 tokens, and max_tokens is 64: there is nothing left",
        ),
        (Unfinished(100, (5, 3), (-1.0, -1.0), (1, 1)), "request 100 has begun with a stop token"),
        (Unfinished(101, (5,), (-1.0,), (1,)), "request 100 continues tokens of request 101"),
        (Unfinished(100, (5, 6), (-1.0,), (1, 1)), "2 tokens and 1 log-probabilities"),
        (Unfinished(100, (5, 6), (-1.0, -1.0), (1,)), "2 tokens and 1 versions"),
        (Unfinished(100, (5, 128), (-1.0, -1.0), (1, 1)), "outside the model's vocabulary of 128"),
    ],
)
def test_what_has_finished_elsewhere_or_is_torn_is_refused(one: VLLMEngine, begun: Unfinished, complaint: str) -> None:
    (request,) = requests(1)
    with pytest.raises(EngineError, match=complaint):
        one.start([replace(request, begun=begun)], STOPPING)
    generation = one.start(requests(3)[1:], STOPPING)
    with pytest.raises(EngineError, match=complaint):
        generation.add([replace(request, begun=begun)])
    assert len(the_rest(generation)) == 2


def test_generation_by_transformers_takes_no_samples_of_others(model: LlamaForCausalLM) -> None:
    engine = TransformersEngine(lambda: pytest.fail("loads the model"), torch.device("cpu"), batch_size=8)
    assert not isinstance(engine, BackgroundEngine)
    (request,) = requests(1)
    with pytest.raises(EngineError, match="request 100 was begun by another engine"):
        list(engine.generate([replace(request, begun=Unfinished(100, (5,), (-1.0,), (1,)))], LONG))


def test_another_releases_vllm_fails_loudly_and_steps_under_way_are_waited_for(
    run_with_vllm: Callable[..., str],
) -> None:
    """With doubles of vLLM's objects: a release that is not installed, and asynchronous scheduling, which vLLM switches
    off on a CPU. In a process of their own, because vLLM stays out of this one."""
    code = """
        from collections import defaultdict, deque
        from types import SimpleNamespace as Double
        from trl_realloc.engines.generation.vllm_compat import drain, drawn_so_far

        def engine(tokens, logprobs):
            state = Double(detokenizer=tokens, logprobs_processor=Double(logprobs=Double(logprobs=logprobs)))
            return Double(output_processor=Double(
                external_req_ids=defaultdict(list, {"0": ["0-a"]}), request_states={"0-a": state}))

        assert drawn_so_far(engine(Double(output_token_ids=[5, 6]), [-1.0, -2.0]), "0") == ([5, 6], [-1.0, -2.0])
        for other in (engine(Double(ids=[5]), [-1.0]), engine(Double(output_token_ids=[5, 6]), [-1.0]), Double(),
                      Double(output_processor=Double(external_req_ids=defaultdict(list), request_states={}))):
            try:
                drawn_so_far(other, "0")
            except RuntimeError as error:
                assert "cannot move samples between engines; install vLLM" in str(error), error
            else:
                raise AssertionError("no error")

        under_way, calls = deque([["a sample"], []]), []
        core = Double(batch_queue=under_way, resume_scheduler=lambda: calls.append("resume"),
                      pause_scheduler=lambda mode, clear_cache: calls.append((mode, clear_cache)))
        assert drain(Double(engine_core=Double(engine_core=core), step=under_way.pop)) == ["a sample"]
        assert not under_way and calls == [("keep", False), "resume"]
        assert drain(Double(engine_core=Double(engine_core=Double(batch_queue=None)))) == []
        """
    run_with_vllm(code)


@pytest.fixture
def impatient(start: Start, model: LlamaForCausalLM) -> Iterator[VLLMEngine]:
    engine = start(step_timeout_s=2)
    engine.load(buckets(model), 1)
    yield engine
    engine.close()


def test_an_engine_may_be_silent_while_it_has_nothing_to_do_and_not_otherwise(impatient: VLLMEngine) -> None:
    expected = samples(impatient, requests(8), LONG)
    generation = impatient.start([], LONG)
    time.sleep(3)
    assert generation.poll(0) == []
    generation.add(requests(8))
    time.sleep(3)  # its messages wait meanwhile
    assert_same(the_rest(generation), expected)
    generation.add(requests(MANY, seed=1))
    os.kill(impatient.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(EngineDied, match="no sign of life for 2 s, while generating"):
        while True:
            generation.poll(0.05)
    assert time.monotonic() - began < patience(8)


# --- the last tests of this file end the engines of the others ---


@pytest.mark.parametrize("busy", [True, False])
def test_a_killed_engine_is_reported_by_its_generation_at_once(
    start: Start, engines: list[VLLMEngine], model: LlamaForCausalLM, busy: bool
) -> None:
    engine = engines[0] if busy else start()
    engine.load(buckets(model), 1)
    generation = engine.start(requests(MANY) if busy else [], ENDLESS)
    os.kill(engine.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDied, match="SIGKILL, while generating"):
        while time.monotonic() - began < patience(20):
            generation.poll(0.1)
    assert time.monotonic() - began < patience(5)
    with pytest.raises(EngineDied):
        generation.withdraw([100])
    generation.close()
    generation.close()


def test_an_engine_that_is_closed_while_it_generates_ends_at_once(engines: list[VLLMEngine]) -> None:
    generation = engines[1].start(requests(MANY), ENDLESS)
    generation.poll(0)
    began = time.monotonic()
    engines[1].close()
    assert time.monotonic() - began < 5, "it was not waited for in vain, and then killed"
    with pytest.raises(EngineError, match="the engine is closed"):
        generation.poll(1)
    generation.close()
