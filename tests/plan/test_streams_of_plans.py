"""Which calls a plan with streams streams, and which may begin early."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.dataflow import Call, CallKind, DataflowGraph, Role
from trl_realloc.plan.execution_plan import ExecutionPlan, PlanError
from trl_realloc.plan.presets import flatten
from trl_realloc.plan.streams import Migration, Streams, early_call, streamed_calls


SCORING = ("reference.forward", "reward.forward", "critic.forward")


def two_generations() -> DataflowGraph:
    """ReMax as the executor runs it: the greedy responses are generated and scored by calls of their own."""
    greedy = ("prompts", "greedy")
    return DataflowGraph(
        (
            Call(Role.ACTOR, CallKind.GENERATE, ("prompts",), ("responses", "logprobs")),
            Call(Role.ACTOR, CallKind.GENERATE, ("prompts",), ("greedy", "greedy_logprobs"), label="greedy"),
            Call(Role.REWARD, CallKind.FORWARD, ("prompts", "responses"), ("scores",)),
            Call(Role.REWARD, CallKind.FORWARD, greedy, ("baselines",), label="greedy"),
            Call(Role.ACTOR, CallKind.TRAIN, ("prompts", "responses", "logprobs", "scores", "baselines")),
        )
    )


def test_the_first_generation_alone_is_streamed() -> None:
    plan, graph = flatten(Cluster(1, 4)), two_generations()
    assignments = {name: plan[".".join(name.split(".")[:2])] for name in graph.order}
    assert streamed_calls(graph, assignments, Streams()) == ("actor.generate", "reward.forward")
    ExecutionPlan(Cluster(1, 4), assignments, graph, streams=Streams(migration=Migration(0.2)))


def test_a_dropped_copy_is_not_streamed() -> None:
    plan = flatten(Cluster(1, 4))
    one = replace(
        plan["critic.forward"], mesh=Cluster(1, 1).mesh, strategy=replace(plan["critic.forward"].strategy, dp=1)
    )
    assignments = {**plan.assignments, "critic.forward": replace(one, drop=True)}
    assert "critic.forward" not in streamed_calls(ppo_graph(), assignments, Streams())
    with pytest.raises(PlanError, match="critic.forward cannot be streamed, because drop frees"):
        replace(plan, assignments=assignments, streams=Streams(calls=SCORING))


@pytest.mark.parametrize(
    ("streams", "sentence"),
    [
        ({"calls": []}, "calls is empty"),
        ({"calls": ["reference.fowrard"]}, "did you mean 'reference.forward'"),
        ({"calls": ["actor.train"]}, "it does not score"),
        ({"migration": {"threshold": 1.5}}, "between 0 and 1"),
        ({"migration": {"engines": 1}}, "threshold: 0.2"),
        ({"migration": {"threshold": 0.2, "engines": 4}}, "has 4 engines"),
        ({"migration": {"threshold": 0.2}, "deterministic": True}, "leave out one of them"),
        ({"migrate": 1}, "did you mean 'migration'"),
        (3, "true, false or a table"),
    ],
)
def test_streams_that_cannot_run_are_refused_with_the_remedy(streams: object, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        ExecutionPlan.from_dict({**flatten(Cluster(1, 4)).to_dict(), "streams": streams})


def test_a_sleeping_engine_does_not_begin_early() -> None:
    plan = flatten(Cluster(1, 4))
    assert early_call(plan.graph, plan.assignments) == "actor.generate"
    asleep = {**plan.assignments, "actor.generate": replace(plan["actor.generate"], drop=True)}
    assert early_call(plan.graph, asleep) is None
    in_place = {**plan.assignments, "actor.generate": replace(plan["actor.generate"], engine="transformers")}
    assert early_call(plan.graph, in_place) is None
