"""Calls for the loop of another trainer, on one process (`tests/multiprocess`: on two, with uneven samples)."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trainer_driven import GRAPH, PROMPTS, drive, rows, start

from trl_realloc import Cluster
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan.presets import flatten
from trl_realloc.runtime.call_server import CallServer
from trl_realloc.runtime.samples.partial_rollouts import PartialRollouts


PLAN = flatten(Cluster(1, 1), generation_engine="transformers", graph=GRAPH)


@pytest.fixture(scope="module")
def calls() -> CallServer:
    return start(PLAN, 0)


def drawn(calls: CallServer) -> list[list[int]]:
    return rows(calls.generate(PROMPTS), "responses")


def test_draws_depend_on_the_update_and_the_generation_in_it_and_on_nothing_else(calls: CallServer) -> None:
    calls.at(3)
    first, second = drawn(calls), drawn(calls)
    calls.at(4)
    other = drawn(calls)
    calls.at(3, evaluates=True)
    evaluated = drawn(calls)
    assert len({str(found) for found in (first, second, other, evaluated)}) == 4
    again = CallServer(calls.executor)
    again.at(3)
    calls.at(3)
    calls.at(3)  # said again in the same update, it changes nothing
    assert drawn(again) == first == drawn(calls)
    again.at(3)
    assert drawn(again) == second


def test_an_evaluation_of_an_update_is_repeated_with_or_without_training_calls_between(calls: CallServer) -> None:
    calls.at(7)
    of_training = [drawn(calls)]
    evaluations = []
    for trains_between in (False, True, False):
        calls.at(7, evaluates=True)
        calls.begin_evaluation()
        evaluations.append([drawn(calls), drawn(calls)])
        if trains_between:
            calls.at(7)
            of_training.append(drawn(calls))
    assert evaluations[0] == evaluations[1] == evaluations[2]
    every = [*evaluations[0], *of_training]
    assert len({str(found) for found in every}) == len(every) == 4


def test_a_call_of_nothing_gives_nothing(calls: CallServer) -> None:
    calls.at(5)
    assert not len(calls.generate([])) and not len(calls.forward("actor.forward", Rollouts()))
    calls.finish_turns()
    calls.finish_turns()


def test_an_update_trains_the_policy_that_the_next_calls_use(calls: CallServer) -> None:
    found = drive(calls, slice(None), second_turn=True)
    flat = [[sum(rows_of, []) for rows_of in (found.logprobs, found.reference)]]
    assert torch.allclose(*map(torch.tensor, flat[0])), "before training the policy is its reference"
    after = drive(calls, slice(None), second_turn=False)
    assert after.logprobs != found.logprobs and len(after.reference) == len(PROMPTS)


def test_each_call_is_timed_once(calls: CallServer) -> None:
    calls.take_spans()
    drive(calls, slice(None), second_turn=False)
    names = [span.call for span in calls.take_spans()]
    assert sorted(names) == ["actor.forward", "actor.generate", "actor.train", "reference.forward"]
    assert calls.take_spans() == ()


def test_equal_samples_are_computed_once(calls: CallServer) -> None:
    calls.at(6)
    columns = {
        "prompts": Ragged.of([[5, 6], [7], [5, 6]], torch.long),
        "responses": Ragged.of([[8], [9], [8]], torch.long),
    }
    calls.take_spans()
    first, second, again = rows(calls.forward("reference.forward", Rollouts(**columns)), "ref_logprobs")
    assert first == again != second
    assert [span.samples for span in calls.take_spans()] == [2]


def test_a_model_keeps_the_graphs_of_samples_that_it_may_be_trained_on_alone(calls: CallServer) -> None:
    def graphs() -> int:
        gc.collect()
        return sum(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in gc.get_objects())

    calls.at(8)
    before = graphs()
    for trained, response in ((False, 8), (True, 9)):
        columns = {"prompts": Ragged.of([[5, 6]], torch.long), "responses": Ragged.of([[response]], torch.long)}
        calls.forward("actor.forward", Rollouts(**columns), trained=trained)
        assert (graphs() > before) == trained


def test_the_context_is_around_each_call() -> None:
    entered = []

    class Around:
        def __enter__(self) -> None:
            entered.append(True)

        def __exit__(self, *_: object) -> None:
            entered.append(False)

    made = replace(PLAN, name="the same")
    calls = CallServer(start(made, 0).executor, Around)
    calls.at(0)
    calls.generate(PROMPTS)
    assert entered == [True, False]


def test_generations_go_on_being_counted_where_nothing_was_drawn_ahead(calls: CallServer) -> None:
    """As at the last generation of a run: a run that goes on draws no random numbers of its first generations again."""

    class Batches:
        def drawn(self, number: int) -> PartialRollouts:
            return PartialRollouts()

        def restore(self, drawn: PartialRollouts) -> None:
            assert not len(drawn)

    saved, resumed = CallServer(calls.executor, generation=5), CallServer(calls.executor)
    saved.ahead = resumed.ahead = SimpleNamespace(batches=Batches())  # type: ignore[assignment]
    resumed.go_on_with(saved.samples_under_way(again=1))
    assert resumed.generation == 4
