"""Turns of samples that are generated ahead: stopped, saved and resumed anywhere, they become what they would have
become, and neither a token is drawn nor a tool called again."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_streams import Tokens

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.requests import Completion, GenerationRequest, Sampling, Unfinished
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.runtime.calls.generate_and_score import CallSettings, Step, TurnSource
from trl_realloc.runtime.overlap.turns_in_flight import TurnsInFlight
from trl_realloc.runtime.samples.partial_rollouts import PartialRollouts


CALL = grpo_graph(reference=False, reward_models=False).call("actor.generate")
SETTINGS = CallSettings(Sampling(64, 1.0), 3, None, Tokens(), (), {})
TOTAL, OWN = 6, (1, 3, 4)  # samples of the global batch, and those of this rank
VERSION = 2


class Killed(Exception):
    """The run ends here."""


class Engine:
    """Draws tokens that follow from prompt and seed.

    Args:
        draw: how many tokens each request gets between two looks.
        lives: looks until the run is killed.
    """

    turns: TurnsInFlight

    def __init__(self, draw: random.Random, lives: float) -> None:
        self.draw, self.lives = draw, lives
        self.running: dict[int, tuple[GenerationRequest, int]] = {}  # by key: tokens so far
        self.drawn = Counter[tuple[Any, ...]]()

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            assert request.index not in self.running
            begun = 0 if request.begun is None else len(request.begun.token_ids)
            if request.begun is not None:
                assert request.begun.token_ids == self.tokens(request)[:begun]
            self.running[request.index] = request, begun

    def tokens(self, request: GenerationRequest) -> tuple[int, ...]:
        made = random.Random(f"{request.prompt_ids} {request.seed}")
        return tuple(made.randrange(50) for _ in range(made.randrange(1, 9)))

    def collect(self) -> bool:
        self.lives -= 1
        if self.lives < 0:
            raise Killed
        for key, (request, begun) in list(self.running.items()):
            tokens = self.tokens(request)
            until = min(len(tokens), begun + self.draw.randrange(4))
            self.drawn.update((request.prompt_ids, request.seed, place) for place in range(begun, until))
            self.running[key] = request, until
            if until == len(tokens):
                del self.running[key]
                logprobs = tuple(-token / 10 for token in tokens)
                self.turns.end(key, Completion(key, tokens, logprobs, True, (VERSION,) * len(tokens)), 1.0)
        if self.draw.random() < 0.1:  # an evaluation
            for key, unfinished in self.peek().items():
                self.turns.stop(key, unfinished, 1.0)
            self.running.clear()
            self.begin(self.turns.requests())
        return True

    def peek(self) -> dict[int, Unfinished]:
        result = {}
        for key, (request, until) in self.running.items():
            tokens = self.tokens(request)[:until]
            result[key] = Unfinished(key, tokens, tuple(-token / 10 for token in tokens), (VERSION,) * until)
        return result


def agents(called: Counter[tuple[int, int]]) -> Any:
    """Code that takes up to five turns for each sample, with a tool between two."""

    def run(samples: Rollouts, source: TurnSource) -> list[bytes]:
        prompts = {at: row.tolist() for at, row in enumerate(samples.ragged("prompts").rows())}
        calls, asked = Counter[int](), dict(prompts)
        left = {at: 1 + sum(ids) % 5 for at, ids in prompts.items()}
        while any(left.values()):
            ended = source.draw(asked)
            assert ended is not None
            asked = {}
            for at, row in ended.items():
                left[at] -= 1
                prompts[at] = [*prompts[at], *row.ragged("responses").rows()[0].tolist()]
                if not left[at]:
                    continue
                result = source.result_of(at, calls[at])
                if result is None:
                    called[at, calls[at]] += 1
                    result = str(sum(prompts[at]) % 50)
                    source.keep_result(at, calls[at], result)
                calls[at] += 1
                asked[at] = prompts[at] = [*prompts[at], int(result)]
        return [str(ids).encode() for ids in prompts.values()]

    return run


def whole(turns: TurnsInFlight, called: Counter[tuple[int, int]]) -> list[bytes]:
    outcomes: list[bytes] = agents(called)(turns.samples, turns)
    return outcomes


def made(draw: random.Random, lives: float, restored: Any = None) -> tuple[TurnsInFlight, Engine]:
    prompts = Ragged.of([[index, 7 * index % 11] for index in OWN], torch.long)
    samples, engine = Rollouts(index=torch.tensor(OWN), prompts=prompts), Engine(draw, lives)
    turns = TurnsInFlight(samples, TOTAL, SETTINGS, CALL, Step(5), engine, threading.Condition())
    engine.turns = turns
    turns.restore(restored or {})
    return turns, engine


def saved(turns: TurnsInFlight, engine: Engine) -> Any:
    """The turns as a checkpoint has them."""
    content = PartialRollouts({5: turns.drawn(engine.peek())}, {5: 1}, {VERSION: 5}).to_tensors()
    return PartialRollouts.from_tensors(content).samples.get(5, {})


@given(seed=st.integers(0, 10**6), kills=st.lists(st.integers(0, 12), max_size=3))
@settings(max_examples=60, deadline=None)
def test_turns_go_on_after_any_kill_as_if_there_had_been_none(seed: int, kills: list[int]) -> None:
    draw, called, drawn = random.Random(seed), Counter[tuple[int, int]](), Counter[tuple[Any, ...]]()
    expected = whole(made(random.Random(0), float("inf"))[0], Counter())
    restored, outcomes = None, None
    for lives in [*kills, float("inf")]:
        turns, engine = made(draw, lives, restored)
        try:
            outcomes = whole(turns, called)
        except Killed:
            restored = saved(turns, engine)
        drawn += engine.drawn
        if outcomes is not None:
            break
    assert outcomes == expected
    assert set(drawn.values()) == {1}, "each token was drawn once"
    assert set(called.values()) <= {1}, "each tool was called once"
    for index in OWN:
        completion, _ = turns.joined(index)
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) > 0


def test_turns_that_are_asked_for_with_another_prompt_are_drawn_anew() -> None:
    turns, engine = made(random.Random(0), float("inf"))
    whole(turns, Counter())
    restored = saved(turns, engine)
    index = OWN[0]
    restored[index] = replace(restored[index], before=(), prompt_ids=(0, 0))
    again, engine = made(random.Random(1), float("inf"), restored)
    whole(again, Counter())
    assert {prompt[0] for prompt, _, _ in engine.drawn} == {index}
    assert again.joined(index)[0].token_ids == turns.joined(index)[0].token_ids


def test_more_responses_than_samples_have_seeds_of_their_own() -> None:
    turns, _ = made(random.Random(0), float("inf"))
    turns.draw({position: [5, 5] for position in range(3 * len(OWN))})
    requests = turns.requests()
    assert len({request.seed for request in requests}) == len(requests) == len(turns.asked)
    assert {key % TOTAL for key in turns.asked} <= set(OWN)


def test_a_batch_that_is_dropped_ends_its_thread() -> None:
    turns, _ = made(random.Random(0), float("inf"))
    ended, errors = threading.Event(), list[BaseException]()

    def run(samples: Rollouts, source: TurnSource) -> list[bytes]:
        try:
            while True:
                source.draw({})
        finally:
            ended.set()

    turns.begin(run, errors.append)
    turns.drop()
    assert ended.wait(10) and not errors and turns.outcomes is None


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_an_exception_of_the_trainers_code_is_passed_on(error: BaseException) -> None:
    turns, _ = made(random.Random(0), float("inf"))
    failed, errors = threading.Event(), list[BaseException]()

    def run(samples: Rollouts, source: TurnSource) -> list[bytes]:
        raise error

    turns.begin(run, lambda raised: (errors.append(raised), failed.set()))
    assert failed.wait(10) and errors == [error]
