"""The runtime knows no algorithm: another one than PPO, without a critic, a reference and a reward model, whose
iteration has two calls of one role and kind, runs whole and call by call."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from custom_algorithm import one_device_plan
from remax import GRAPH, GREEDY, call_by_call, learned, place, prompts, whole_run

from trl_realloc import Cluster, ExecutionPlan, PlanError
from trl_realloc.algorithms.nonfinite import NonFiniteError
from trl_realloc.algorithms.trainer_loss import LINEAR_LOSS, TrainerLoss
from trl_realloc.plan.dataflow import Call, CallKind, DataflowGraph, Role
from trl_realloc.plan.presets import resolve_plan
from trl_realloc.runtime.calls.generate_and_score import Step
from trl_realloc.runtime.executor import Executor
from trl_realloc.runtime.placement.roles import RoleModels, Roles


def one_process() -> Executor:
    return place(one_device_plan(), 0)


def test_an_iteration_gives_the_same_whole_and_call_by_call() -> None:
    whole, driven = one_process(), one_process()
    before = learned(whole)
    ran, performed = whole_run(whole), call_by_call(driven)
    for column in ("responses", "greedy_responses"):
        assert torch.equal(ran.ragged(column).values, performed.ragged(column).values)
    for column in ("scores", "baselines"):
        assert torch.equal(ran.tensor(column), performed.tensor(column))
    after, other = learned(whole), learned(driven)
    assert any(not torch.equal(before[name], after[name]) for name in after), "nothing was learned"
    assert all(torch.equal(after[name], other[name]) for name in after)
    gap = math.sqrt(sum(float((after[name] - before[name]).square().sum()) for name in after))
    norms = performed.tensor("grad_norm")
    assert 0.1 * float(norms[0]) == pytest.approx(gap, rel=1e-4), "SGD at 0.1 moves by a tenth of the gradient"
    assert torch.equal(norms, norms[:1].expand(len(norms)))


def test_a_role_is_trained_by_the_token_gradients_of_a_loss_that_is_computed_outside() -> None:
    direct, by_grads = one_process(), one_process()
    samples = call_by_call(direct)
    call_by_call(by_grads)
    scores, baselines = samples.tensor("scores").clone(), samples.tensor("baselines")
    scores[1] = baselines[1]  # a sample without token gradients, which is left out
    samples = samples.only(n for n in samples if n != "grad_norm").plus(scores=scores)
    step = Step(1, prompts().rows, {Role.ACTOR: 0.1})
    expected = direct.perform(step, "actor.train", samples)
    by_grads.runner.algorithm = TrainerLoss(GRAPH)
    responses = samples.ragged("responses")
    given = responses.like(responses.spread((baselines - scores) / len(samples)))
    broken = given.like(torch.where(given.row_of == 3, torch.nan, given.values))
    with pytest.raises(NonFiniteError, match="the loss's derivative by a log-probability of sample 3 of the .* is nan"):
        by_grads.perform(step, "actor.train", samples.plus(logprob_grads=broken))
    steps = by_grads.perform(step, "actor.train", samples.plus(logprob_grads=given))
    after, other = learned(direct), learned(by_grads)
    assert all(torch.allclose(after[name], other[name], rtol=1e-6, atol=1e-6) for name in after)
    assert set(steps) == {"index", "update", LINEAR_LOSS, "grad_norm"}
    assert steps.tensor("index").tolist() == [0, 2, 3, 4]
    assert float(steps.tensor("grad_norm")[0]) == pytest.approx(float(expected.tensor("grad_norm")[0]), rel=1e-5)


def test_two_calls_of_one_role_draw_apart_and_as_each_is_told_to() -> None:
    executor = one_process()
    samples = whole_run(executor)
    greedy, sampled = samples.ragged("greedy_responses"), samples.ragged("responses")
    assert greedy.values.tolist() != sampled.values.tolist()
    assert float(samples.ragged("greedy_logprobs").values.min()) > -1e-3, "a greedy token is all but certain"


def test_the_second_output_of_a_policys_forward_is_the_entropy() -> None:
    graph = GRAPH.without([GREEDY, "reward.forward.greedy"])
    forward = Call(Role.ACTOR, CallKind.FORWARD, ("prompts", "responses"), ("policy_logprobs", "entropies"))
    graph = DataflowGraph((*graph.calls, forward))
    plan = resolve_plan("flatten", Cluster(1, 1), generation_engine="transformers", graph=graph)
    executor, batch = place(plan, 0), prompts()
    step = Step(0, batch.rows)
    samples = batch.prompts.plus(**executor.perform(step, "actor.generate", batch.prompts))
    scored = executor.perform(step, "actor.forward", samples)
    assert torch.allclose(scored.ragged("policy_logprobs").values, samples.ragged("logprobs").values, atol=1e-5)
    entropies, words = scored.ragged("entropies"), tiny.policy().config.vocab_size
    assert torch.equal(entropies.lengths, samples.ragged("responses").lengths)
    assert float(entropies.values.min()) > 0 and float(entropies.values.max()) < math.log(words)


def test_a_role_cannot_copy_a_role_that_no_call_trains() -> None:
    scorer = RoleModels("score", [], copy_of=Role.CRITIC)
    with pytest.raises(ValueError, match=r"the reward's model is a copy of the critic's .* no call trains the critic"):
        Roles({Role.REWARD: scorer}).check(GRAPH)


def test_a_plan_with_labelled_calls_is_a_file_like_any_other() -> None:
    plan = one_process().plan
    again = ExecutionPlan.from_yaml(plan.to_yaml())
    assert again == plan and GREEDY in again.order and again.graph.call(GREEDY).label == "greedy"


def test_a_label_that_is_no_word_and_a_role_trained_twice_are_refused() -> None:
    with pytest.raises(PlanError, match=r"actor\.generate: a label has lower-case letters"):
        Call(Role.ACTOR, CallKind.GENERATE, label="Two words")
    trains = Call(Role.ACTOR, CallKind.TRAIN, ("prompts",))
    with pytest.raises(PlanError, match=r"actor\.train and actor\.train\.again both train the actor"):
        DataflowGraph((trains, Call(Role.ACTOR, CallKind.TRAIN, ("prompts",), label="again")))
