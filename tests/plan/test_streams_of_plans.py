"""Which calls a plan with streams streams, and which may begin early."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trl_realloc.plan.algorithm_graphs import grpo_graph, ppo_graph
from trl_realloc.plan.assignment import ParallelStrategy
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
        ({"first_epoch": "critic.train"}, "first_epoch names calls that train, like"),
        ({"first_epoch": []}, "first_epoch names calls that train, like"),
        ({"first_epoch": ["critic.tain"]}, "did you mean 'critic.train'"),
        ({"first_epoch": ["critic.forward"]}, "critic.forward does not train"),
        ({"first_epoch": ["critic.train"], "deterministic": True}, "order in which samples arrive"),
        (
            {"first_epoch": ["critic.train"], "calls": ["critic.forward"]},
            "it reads what reference.forward and reward.forward makes of whole batches",
        ),
    ],
)
def test_streams_that_cannot_run_are_refused_with_the_remedy(streams: object, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        ExecutionPlan.from_dict({**flatten(Cluster(1, 4)).to_dict(), "streams": streams})


def test_a_first_epoch_on_arrival_is_written_and_read() -> None:
    plan = replace(flatten(Cluster(1, 4)), streams=Streams(first_epoch=("critic.train",)))
    assert plan.on_arrival == ("critic.train",)
    assert "critic.train" not in plan.streamed
    assert ExecutionPlan.from_yaml(plan.to_yaml()) == plan
    assert "critic.train trains its first epoch on samples as they arrive" in str(plan.streams)


def test_a_first_epoch_on_arrival_is_for_every_engine_and_not_for_calls_that_train_together() -> None:
    streams = Streams(first_epoch=("critic.train",))
    for stage in range(4):
        sharded = replace(flatten(Cluster(1, 4), zero_stage=stage), streams=streams)
        assert sharded.on_arrival == ("critic.train",)
    plan = flatten(Cluster(1, 4))
    split = replace(plan["critic.train"], strategy=ParallelStrategy(tp=2, pp=2, zero_stage=0), engine="megatron")
    assignments = {**plan.assignments, "critic.train": split, "critic.forward": split}
    assert replace(plan, assignments=assignments, streams=streams).on_arrival == ("critic.train",)
    both = {**assignments, "actor.train": split}
    fused = replace(plan, assignments=both, fused=("actor.train", "critic.train"))
    with pytest.raises(PlanError, match="fused trains whole mini-batches"):
        replace(fused, streams=streams)


def test_the_loop_of_another_library_trains_whole_batches() -> None:
    plan = flatten(Cluster(1, 2), graph=grpo_graph())
    with pytest.raises(PlanError, match="TRL's loop trains when a whole batch"):
        replace(plan, streams=Streams(first_epoch=("actor.train",)))


def test_a_sleeping_engine_does_not_begin_early() -> None:
    plan = flatten(Cluster(1, 4))
    assert early_call(plan.graph, plan.assignments) == "actor.generate"
    asleep = {**plan.assignments, "actor.generate": replace(plan["actor.generate"], drop=True)}
    assert early_call(plan.graph, asleep) is None
    in_place = {**plan.assignments, "actor.generate": replace(plan["actor.generate"], engine="transformers")}
    assert early_call(plan.graph, in_place) is None
