"""A plan is fitted to the calls of a run, and what was changed is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graphs import DPO, REMAX
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import grpo_graph, ppo_graph
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.dataflow import DataflowGraph
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.fitting import plan_of_run
from trl_realloc.plan.presets import flatten, resolve_plan, separate
from trl_realloc.plan.streams import Streams


TWO = Cluster(1, 2)
FORMS = [grpo_graph(reference=r, reward_models=m) for r in (True, False) for m in (True, False)]
FULL, _, _, BARE = FORMS
forms = st.sampled_from(FORMS)


def written(plan: ExecutionPlan, *left_out: str) -> dict[str, Any]:
    """The plan as a user writes it, without a graph and without some calls."""
    plain = plan.to_dict()
    plain.pop("graph", None)
    plain["calls"] = {name: call for name, call in plain["calls"].items() if name not in left_out}
    return plain


@given(forms)
def test_a_plan_without_a_graph_is_read_for_the_runs_calls(graph: DataflowGraph) -> None:
    plan = separate(TWO, graph=graph)
    assert resolve_plan(written(plan), TWO, graph=graph) == plan


def test_a_plan_in_a_file_is_read_for_the_runs_calls_and_its_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = flatten(TWO, graph=BARE).to_yaml()
    path.write_text(text[: text.index("graph:")] + text[text.rindex("calls:") :])
    assert "graph" not in path.read_text() and resolve_plan(path, TWO, graph=BARE).graph == BARE
    path.write_text(path.read_text().replace("actor.train", "actor.trian"))
    with pytest.raises(PlanError) as refusal:
        resolve_plan(path, TWO, graph=BARE)
    assert refusal.value.problems == (f"{path}: there is no call 'actor.trian'; did you mean 'actor.train'?",)


@given(forms, forms)
def test_one_plan_serves_runs_with_and_without_a_reference(has: DataflowGraph, needs: DataflowGraph) -> None:
    plan = separate(TWO, graph=has)
    for given_as in (plan, plan.to_dict(), written(plan)):
        if "reward.forward" in needs.order and "reward.forward" not in has.order:
            with pytest.raises(PlanError, match=r"reward\.forward"):
                resolve_plan(given_as, TWO, graph=needs)
            continue
        fitted = resolve_plan(given_as, TWO, graph=needs)
        assert fitted.graph == needs
        assert all(fitted[name] == plan[name] for name in needs.order if name in has.order)
        if "reference.forward" in needs.order and "reference.forward" not in has.order:
            assert fitted["reference.forward"] == plan["actor.train"]


@pytest.mark.parametrize("graph", [FULL, BARE, ppo_graph(proximal=True)])
def test_the_shortest_plan_has_the_calls_that_cannot_be_in_place_of_the_training(
    graph: DataflowGraph, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = flatten(TWO, graph=graph)
    left_out = ("actor.forward",) if graph == ppo_graph(proximal=True) else ("actor.forward", "reference.forward")
    assert resolve_plan(written(plan, *left_out), TWO, graph=graph) == plan
    told = capsys.readouterr().err
    for name in set(left_out).intersection(graph.order):
        assert f"the plan has no {name}" in told
    assert told.count("it runs on the mesh of actor.train and in its layout, 0-1 (dp2)") == len(told.splitlines())


@pytest.mark.parametrize("proximal", [False, True])
def test_a_plan_of_ppo_serves_grpo_without_its_critic(proximal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    plan = flatten(TWO, graph=ppo_graph(proximal=proximal))
    for given_as in (plan, plan.to_dict()):
        assert resolve_plan(given_as, TWO, graph=FULL) == flatten(TWO, graph=FULL)
        told = capsys.readouterr().err
        for call in ("critic.forward", "critic.train"):
            assert f"the plan's {call} is left out, because this run does not have it\n" in told
        assert ("the plan has no actor.forward, which this run needs" in told) != proximal
    resolve_plan(plan, TWO, graph=BARE)
    assert (
        "the plan's reference.forward is left out, because this run does not have it (beta)" in capsys.readouterr().err
    )


def test_a_pair_that_trains_together_is_parted_when_one_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    plan = flatten(TWO).to_dict()
    for name in ("actor.train", "critic.train", "critic.forward"):
        plan["calls"][name] = {"mesh": "0-1", "engine": "megatron", "dp": 1, "pp": 2}
    plan["fused"] = ["actor.train", "critic.train"]
    assert resolve_plan(plan, TWO, graph=ppo_graph()).fused
    assert resolve_plan(plan, TWO, graph=BARE).fused == ()
    assert "actor.train and critic.train do not train together (fused)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "graph", "told"),
    [
        (
            flatten(TWO, graph=FULL),
            ppo_graph(),
            "this trainer runs PPO, .* It has no critic.forward and no critic.train",
        ),
        (flatten(TWO, graph=BARE), FULL, "this trainer runs GRPO or RLOO, .* It has no .*reward.forward"),
        (flatten(TWO, graph=REMAX), FULL, "leave graph out of the plan"),
        (flatten(TWO, graph=DPO), FULL, "It has no actor.generate"),
    ],
)
def test_a_plan_that_does_not_say_enough_is_refused(plan: ExecutionPlan, graph: DataflowGraph, told: str) -> None:
    for given_as in (plan, plan.to_dict()):
        with pytest.raises(PlanError, match=told):
            resolve_plan(given_as, TWO, graph=graph)


def test_a_plan_of_ppo_says_where_the_reference_is() -> None:
    with pytest.raises(PlanError) as refusal:
        resolve_plan(written(flatten(TWO), "reference.forward"), TWO, graph=ppo_graph(proximal=True))
    assert refusal.value.problems == ("reference.forward is missing; set its mesh and engine.",)


@pytest.mark.parametrize(
    "training", [{"tp": 2, "dp": 1, "zero_stage": 0}, {"pp": 2, "dp": 1, "micro_batch_tokens": 64}]
)
def test_a_forward_in_place_of_the_training_has_its_layout(training: dict[str, Any]) -> None:
    plan = flatten(TWO).to_dict()
    plan["calls"]["actor.train"] = {"mesh": "0-1", "engine": "megatron", **training}
    placed = resolve_plan(plan, TWO, graph=ppo_graph(proximal=True))
    assert placed["actor.forward"] == placed["actor.train"]
    assert "actor.forward" not in {edge.target for edge in placed.reallocations}


def test_a_call_that_is_left_out_is_not_streamed() -> None:
    plan = separate(TWO, graph=ppo_graph(proximal=True))
    both = replace(plan, streams=Streams(("actor.forward", "reference.forward")))
    assert plan_of_run(both, ppo_graph()).streams == Streams(("reference.forward",))
    assert plan_of_run(replace(plan, streams=Streams()), ppo_graph()).streams == Streams()
    with pytest.raises(PlanError, match="the plan streams actor.forward alone, which this run does not have"):
        plan_of_run(replace(plan, streams=Streams(("actor.forward",))), ppo_graph())


def test_in_a_plan_of_grpo_that_runs_ahead_the_reference_may_be_where_the_policy_trains() -> None:
    """Also where the run has no reference: the plan is read as one of GRPO, and its generation alone runs ahead."""
    calls = {name: {"mesh": "1", "engine": "zero"} for name in ("actor.forward", "reference.forward", "actor.train")}
    value = {
        "cluster": {"nodes": 1, "devices_per_node": 2},
        "calls": {"actor.generate": {"mesh": "0", "engine": "vllm"}, **calls},
        "staleness": 1,
    }
    for reference in (True, False):
        graph = grpo_graph(reference=reference, reward_models=False)
        plan = resolve_plan(value, Cluster(1, 2), graph=graph)
        assert plan.graph == graph and plan.staleness.versions == 1
