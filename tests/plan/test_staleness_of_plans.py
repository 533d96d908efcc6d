"""A plan's staleness: which calls run ahead, how it is written, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from graphs import DPO, REMAX

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import grpo_graph, ppo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten, separate
from trl_realloc.plan.staleness import Staleness, calls_ahead, devices_ahead
from trl_realloc.plan.streams import Streams


def stale(versions: int = 1) -> ExecutionPlan:
    return replace(separate(Cluster(1, 4)), staleness=Staleness(versions))


def test_generation_and_frozen_roles_run_ahead_and_the_critic_does_not() -> None:
    assert calls_ahead(ppo_graph()) == ("actor.generate", "reference.forward", "reward.forward")
    assert calls_ahead(grpo_graph()) == ("actor.generate",), "TRL's loop asks for the scoring"
    assert calls_ahead(REMAX) == ("actor.generate", "reference.forward", "reward.forward")
    assert calls_ahead(DPO) == ()
    plan = separate(Cluster(1, 4))
    assert devices_ahead(plan.graph, plan.assignments) == {2, 3}


@pytest.mark.parametrize("plan", [stale(), stale(4), separate(Cluster(1, 4))])
def test_a_plan_with_a_staleness_is_read_as_it_was_written(plan: ExecutionPlan) -> None:
    assert ExecutionPlan.from_yaml(plan.to_yaml()) == plan
    assert ExecutionPlan.from_dict(plan.to_dict()) == plan
    assert ("\nstaleness:" in plan.to_yaml()) == (plan.staleness.versions > 0)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (-1, "from 0 to 64 updates, not -1"),
        (65, "from 0 to 64"),
        (1.5, "a number of updates, like 1, not 1.5"),
        (True, "a number of updates"),
        ("much", "a number of updates"),
        ({"versions": 1, "kv_cache": "recompute"}, "a number of updates, like 1, not .*'recompute'"),
    ],
)
def test_a_wrong_value_is_refused(value: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        ExecutionPlan.from_dict({**separate(Cluster(1, 4)).to_dict(), "staleness": value})


def changed(name: str, **fields: Any) -> ExecutionPlan:
    plan = separate(Cluster(1, 4))
    return replace(plan, assignments={**plan.assignments, name: replace(plan[name], **fields)})


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (flatten(Cluster(1, 2)), "actor.train trains on device 0, on which actor.generate runs ahead"),
        (flatten(Cluster(1, 1)), "actor.train trains on device 0"),
        (separate(Cluster(1, 4), generation_engine="transformers"), "only a vLLM engine generates while others train"),
        (changed("actor.generate", drop=True), "its engine cannot sleep; leave out offload and drop"),
        (
            changed("critic.forward", mesh=DeviceMesh(0, 4), strategy=ParallelStrategy(dp=4)),
            r"critic.forward runs on devices that run ahead and on others.*\(2, 3 run ahead\)",
        ),
        (replace(separate(Cluster(1, 4)), streams=Streams()), "leave out streams, or the staleness"),
        (
            replace(separate(Cluster(1, 4), graph=grpo_graph()), streams=Streams(calls=("reference.forward",))),
            "samples do not stream where generation runs ahead of the training",
        ),
        (replace(separate(Cluster(1, 4)), barrier=True), "barrier requires iterations one after the other"),
    ],
)
def test_a_plan_that_cannot_run_ahead_is_refused(plan: ExecutionPlan, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        replace(plan, staleness=Staleness(1))
    assert replace(plan, staleness=Staleness(0)).staleness == Staleness()


def test_a_graph_without_generation_is_refused() -> None:
    mesh = Cluster(1, 1).mesh
    calls = {name: Assignment(mesh, ParallelStrategy(), "zero") for name in DPO.order}
    with pytest.raises(PlanError, match="no call of this plan generates from the data set alone"):
        ExecutionPlan(Cluster(1, 1), calls, DPO, staleness=Staleness(1))
