"""vLLM engines that give their memory back between their calls, in a plan."""

from __future__ import annotations

import pytest

from trl_realloc.plan.assignment import sleeps
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten, with_sleeping_engines


@pytest.mark.parametrize("word", ["drop", "offload"])
def test_a_vllm_engine_may_sleep_between_its_turns_also_where_the_training_has_the_weights(word: str) -> None:
    written = flatten(Cluster(1, 2)).to_dict()
    written["calls"]["actor.generate"][word] = True
    plan = ExecutionPlan.from_dict(written)
    assert sleeps(plan["actor.generate"])
    assert ExecutionPlan.from_yaml(plan.to_yaml()) == plan
    assert with_sleeping_engines(plan) == plan, "what the plan says is kept"


def test_a_preset_whose_engines_sleep_is_the_preset_otherwise() -> None:
    plan, asleep = flatten(Cluster(1, 2)), with_sleeping_engines(flatten(Cluster(1, 2)))
    assert asleep["actor.generate"].drop and not plan["actor.generate"].drop
    assert all(asleep[name] == plan[name] for name in plan.order if name != "actor.generate")
    in_place = flatten(Cluster(1, 2), generation_engine="transformers")
    assert with_sleeping_engines(in_place) == in_place
