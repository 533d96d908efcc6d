"""Calls for the loop of another trainer under plans that stream: scoring while samples are generated gives what scoring
afterwards gives (`tests/multiprocess`: on two processes)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from trainer_driven import GRAPH, PROMPTS, drive, rows, start

from trl_realloc import Cluster
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.presets import flatten
from trl_realloc.plan.streams import Streams
from trl_realloc.runtime.call_server import CallServer
from trl_realloc.runtime.calls.generate_and_score import TEXTS
from trl_realloc.runtime.samples.known_outputs import KnownOutputs


WHOLE = flatten(Cluster(1, 1), generation_engine="transformers", graph=GRAPH)
SCORING = {"actor.forward", "reference.forward"}


def streamed(*calls: str) -> CallServer:
    return start(replace(WHOLE, streams=Streams(calls or None)), 0)


@pytest.mark.parametrize("calls", [(), ("reference.forward",)], ids=["all", "one"])
def test_an_update_is_what_it_is_without_streams(calls: tuple[str, ...]) -> None:
    found, expected = drive(streamed(*calls), slice(None), False), drive(start(WHOLE, 0), slice(None), False)
    assert found.responses == expected.responses
    for column in ("logprobs", "reference"):
        for row, other in zip(getattr(found, column), getattr(expected, column), strict=True):
            assert row == pytest.approx(other, abs=1e-5)
    for name, tensor in expected.weights.items():
        assert torch.allclose(found.weights[name], tensor, atol=1e-6), name


def test_scoring_calls_run_with_the_generation_and_not_again_when_they_are_asked_for() -> None:
    calls = streamed()
    calls.at(0)
    responses = rows(calls.generate(PROMPTS), "responses")
    assert {span.call for span in calls.take_spans()} == {"actor.generate", *SCORING}
    columns = {"prompts": Ragged.of(PROMPTS, torch.long), "responses": Ragged.of(responses, torch.long)}
    samples = Rollouts(**columns)
    for name in SCORING:
        assert len(calls.forward(name, samples)) == len(PROMPTS)
    assert calls.take_spans() == ()
    cut = samples.plus(responses=Ragged.of([row[:1] for row in responses], torch.long))
    whole = [rows(calls.forward("reference.forward", part), "ref_logprobs") for part in (samples, cut)]
    assert [row[:1] for row in whole[0]] == [pytest.approx(row, abs=1e-5) for row in whole[1]]
    assert {span.call for span in calls.take_spans()} == {"reference.forward"}, "for the samples that were changed"


def test_the_policy_is_asked_again_after_its_training_and_the_reference_is_not() -> None:
    calls = streamed()
    before = drive(calls, slice(None), False)
    calls.take_spans()
    columns = {"prompts": Ragged.of(PROMPTS, torch.long), "responses": Ragged.of(before.responses, torch.long)}
    after = rows(calls.forward("actor.forward", Rollouts(**columns)), "policy_logprobs")
    calls.forward("reference.forward", Rollouts(**columns))
    assert {span.call for span in calls.take_spans()} == {"actor.forward"}
    assert after != before.logprobs


def as_text(samples: Rollouts) -> dict[str, Ragged]:
    """What the reward model reads of samples: a letter of the prompt's text, and the response backwards."""
    rows = zip(samples.ragged(TEXTS).rows(), samples.ragged("responses").rows(), strict=True)
    return {"model": Ragged.of([torch.cat([text[:1].long() - 90, row.flip(0)]) for text, row in rows], torch.long)}


def test_a_reward_model_scores_texts_with_the_generation_and_others_when_they_are_asked_for() -> None:
    graph, texts = grpo_graph(), [bytes([97 + at]) for at in range(len(PROMPTS))]
    plan = replace(flatten(Cluster(1, 1), generation_engine="transformers", graph=graph), streams=Streams())
    calls = start(plan, 0)
    calls.executor.runner.settings = replace(calls.executor.runner.settings, reward_tokens=as_text)
    calls.at(0)
    responses = rows(calls.generate(PROMPTS, texts), "responses")
    assert {span.call for span in calls.take_spans()} == {"actor.generate", "reward.forward", *SCORING}
    tokens = [[7 + at, *row[::-1]] for at, row in enumerate(responses)]
    scores = calls.score("reward.forward", "model", tokens)
    assert calls.take_spans() == ()
    others = [[9, 9], [8]]
    again = calls.score("reward.forward", "model", [others[0], tokens[2], others[1]])
    assert [span.samples for span in calls.take_spans()] == [2], "the texts that were not scored before"
    later = start(replace(plan, streams=None), 0).score("reward.forward", "model", [*tokens, *others])
    assert [*scores, again[0], again[2]] == pytest.approx(later, abs=1e-5) and again[1] == scores[2]


def test_outputs_are_known_by_the_tokens_of_their_samples() -> None:
    def of(*pairs: tuple[list[int], list[int]]) -> Rollouts:
        prompts, responses = zip(*pairs, strict=True)
        return Rollouts(prompts=Ragged.of(prompts, torch.long), responses=Ragged.of(responses, torch.long))

    first, second, third = ([1], [2, 3]), ([1, 2], [3]), ([1], [2])
    known = KnownOutputs()
    known.add(of(first, second), Rollouts(found=torch.tensor([1.0, 2.0])))
    asked: list[list[int]] = []

    def compute(samples: Rollouts) -> Rollouts:
        asked.append(samples.ragged("responses").values.tolist() if len(samples) else [])
        return Rollouts(found=torch.full((len(samples),), 3.0))

    found = known.complete(of(third, first, third, second), compute)
    assert found.tensor("found").tolist() == [3.0, 1.0, 3.0, 2.0]
    assert known.complete(of(third, first), compute).tensor("found").tolist() == [3.0, 1.0]
    assert not len(known.complete(Rollouts(), compute))
    known.forget()
    known.complete(of(first, second), compute)
    assert asked == [[2], [], [], [2, 3, 3]]
