"""A plan's fused calls: how they are written, in which order calls are run, where stages are, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.dataflow import Call, CallKind, DataflowGraph, Role
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten
from trl_realloc.profiling.replanning import suits


PAIR = ("actor.train", "critic.train")


def split(mesh: str = "0-3", engine: str = "megatron", **degrees: int) -> Assignment:
    return Assignment(DeviceMesh.parse(mesh), ParallelStrategy(**degrees), engine)


def apart(**changed: Assignment) -> ExecutionPlan:
    """Every call that learns in four stages, but for those that are changed (`actor_train` is `actor.train`)."""
    plan = flatten(Cluster(1, 4))
    calls = {name: split(pp=4) for name in plan.order if not name.endswith("generate")}
    calls |= {name.replace("_", "."): assignment for name, assignment in changed.items()}
    return replace(plan, assignments={**plan.assignments, **calls})


def fused(**changed: Assignment) -> ExecutionPlan:
    return replace(apart(**changed), fused=PAIR)


@pytest.mark.parametrize(
    "plan",
    [
        fused(),
        fused(critic_train=split(dp=2, pp=2)),
        fused(actor_train=split(tp=2, pp=2), critic_train=split(tp=2, pp=2, zero_stage=0)),
        replace(apart(), fused=PAIR[::-1]),
        apart(),
    ],
)
def test_a_plan_that_fuses_is_read_as_it_was_written(plan: ExecutionPlan) -> None:
    assert ExecutionPlan.from_yaml(plan.to_yaml()) == plan
    assert ExecutionPlan.from_dict(plan.to_dict()) == plan
    assert ("\nfused:" in plan.to_yaml()) == bool(plan.fused)
    assert hash(plan) == hash(ExecutionPlan.from_yaml(plan.to_yaml()))


def test_fused_calls_are_run_together_in_the_place_of_the_later_one() -> None:
    plan = replace(apart(), fused=PAIR[::-1])
    assert plan.runs_of(plan.order)[-1] == PAIR[::-1]
    assert [name for names in plan.runs_of(plan.order)[:-1] for name in names] == list(plan.order[:-2])
    assert plan.runs_of(["critic.forward", "actor.train"]) == (("critic.forward",), ("actor.train",))
    assert apart().runs_of(PAIR) == (("actor.train",), ("critic.train",))
    assert plan.runs_of([]) == ()


def test_the_second_role_is_reversed_where_it_trains() -> None:
    plan = fused(critic_forward=split(dp=2, pp=2))
    assert [name for name in plan.order if plan.is_reversed(name)] == ["critic.train"]
    assert [name for name in plan.order if fused().is_reversed(name)] == ["critic.forward", "critic.train"]
    assert not any(apart().is_reversed(name) for name in plan.order)


def test_engines_of_a_plan_that_fuses_do_not_suit_one_that_does_not() -> None:
    """The stages lie elsewhere."""
    assert suits(fused(), replace(fused(), barrier=True), 8)
    assert not suits(fused(), apart(), 8)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"critic_train": split("0-1", pp=2)},
            "actor.train is on mesh 0-3 and critic.train on 0-1; give both the same",
        ),
        (
            {"critic_train": split(engine="zero", dp=4)},
            "critic.train runs on zero, and only the stages of engine megatron",
        ),
        ({"critic_train": split(tp=4)}, "critic.train has pp: 1; fusing fills the time"),
        ({"critic_train": split(tp=2, pp=2)}, "tp 1 of actor.train and tp 2 of critic.train; give both the same tp"),
    ],
)
def test_calls_that_cannot_be_fused_are_refused(changed: dict[str, Assignment], sentence: str) -> None:
    assert apart(**changed).fused == ()
    with pytest.raises(PlanError, match=sentence):
        fused(**changed)


def test_stages_that_do_not_divide_each_other_are_refused() -> None:
    plan = flatten(Cluster(6, 1))
    calls = {name: split("0-5", dp=2, pp=3) for name in plan.order if not name.endswith("generate")}
    plan = replace(plan, assignments={**plan.assignments, **calls, "critic.train": split("0-5", dp=3, pp=2)})
    with pytest.raises(PlanError, match="pp 3 of actor.train and pp 2 of critic.train: one must divide the other"):
        replace(plan, fused=PAIR)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (True, r"fused names two calls, like fused: \[actor.train, critic.train\], not True"),
        (["actor.train"], "fused names two calls"),
        (["actor.train", 3], "fused names two calls"),
        ("actor.train", "fused names two calls"),
        (["actor.train", "critic.trian"], "there is no call 'critic.trian'; did you mean 'critic.train'"),
        (["actor.train", "actor.train"], "actor.train is named twice"),
        (["critic.forward", "critic.train"], "critic.forward does not train"),
    ],
)
def test_a_wrong_value_is_refused(value: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        ExecutionPlan.from_dict({**apart().to_dict(), "fused": value})


def test_a_graph_that_trains_one_role_has_nothing_to_fuse() -> None:
    mesh = Cluster(1, 4).mesh
    calls = {name: Assignment(mesh, ParallelStrategy(dp=4), "zero") for name in grpo_graph().order}
    calls["actor.generate"] = Assignment(mesh, ParallelStrategy(dp=4), "transformers")
    with pytest.raises(PlanError, match="there is no call 'critic.train'"):
        ExecutionPlan(Cluster(1, 4), calls, grpo_graph(), fused=PAIR)


def test_a_call_that_needs_what_the_first_has_trained_cannot_come_before_the_second() -> None:
    ppo = apart().graph
    between = Call(Role.ACTOR, CallKind.FORWARD, ("prompts", "responses"), ("after",), label="after")
    *calls, actor, critic = ppo.calls
    calls = [*calls, replace(actor, outputs=("trained",)), replace(between, inputs=("prompts", "responses", "trained"))]
    graph = DataflowGraph((*calls, replace(critic, inputs=(*critic.inputs, "after"))))
    plan = replace(apart(), graph=graph, assignments={**apart().assignments, "actor.forward.after": split(pp=4)})
    with pytest.raises(PlanError, match="actor.forward.after needs the parameters that actor.train has trained"):
        replace(plan, fused=PAIR)
