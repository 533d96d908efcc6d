"""What a plan's parameters take of each device, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.execution_plan import ExecutionPlan, PlanError
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.realloc.memory import check_memory, resident_bytes


SPEC = ModelSpec.of_shapes([("w", (1000, 1000))], bytes_per_element=4)  # 4 MB
CALLS = ("actor.generate", "reference.forward", "reward.forward", "critic.forward", "actor.train", "critic.train")
SPECS = dict.fromkeys(CALLS, [SPEC])


def plan(memory_gb: float | None = None, **changes: dict[str, Any]) -> ExecutionPlan:
    """Two devices, every call on both."""
    calls: dict[str, dict[str, Any]] = {
        name: {"mesh": "0-1", "engine": "transformers" if name == "actor.generate" else "zero", "dp": 2}
        for name in CALLS
    }
    for name, change in changes.items():
        calls[name.replace("__", ".")] |= change
    return ExecutionPlan.from_dict(
        {"cluster": {"nodes": 1, "devices_per_node": 2, "memory_gb": memory_gb}, "calls": calls}
    )


def megabytes(made: ExecutionPlan, device: int = 0, **more: Any) -> dict[str, float]:
    return {name: size / 1e6 for name, size in resident_bytes(made, SPECS, **more)[device].items()}


def test_a_trained_role_takes_weights_gradients_and_two_moments_and_its_other_calls_nothing_more() -> None:
    assert megabytes(plan()) == {"reference.forward": 4, "reward.forward": 4, "actor.train": 16, "critic.train": 16}


@pytest.mark.parametrize(("stage", "expected"), [(0, 16), (1, 14), (2, 12), (3, 8)])
def test_zero_shards_state_then_gradients_then_weights(stage: int, expected: float) -> None:
    made = plan(actor__train={"zero_stage": stage})
    assert megabytes(made)["actor.train"] == expected


def test_a_copy_in_a_layout_of_its_own_is_counted_and_adapters_are_not_trained_weights() -> None:
    made = plan(critic__forward={"mesh": "1", "dp": 1}, critic__train={"mesh": "0", "dp": 1})
    assert megabytes(made, 1)["critic.forward"] == 4
    assert "critic.train" not in megabytes(made, 1)
    assert megabytes(plan(), adapted=[Role.ACTOR])["actor.train"] == 4


def test_what_does_not_fit_is_refused_with_what_takes_how_much() -> None:
    with pytest.raises(
        PlanError, match=r"device 0 would hold 0\.04 GB .*actor\.train 0\.02.*memory_gb is 0\.03; split"
    ):
        check_memory(plan(0.03), SPECS)
    check_memory(plan(0.041), SPECS)
    check_memory(plan(), SPECS)


def test_of_offloaded_roles_only_the_largest_is_counted() -> None:
    away = {"reference__forward": {"offload": True}, "reward__forward": {"offload": True}}
    check_memory(plan(0.0365, **away), SPECS)
    with pytest.raises(PlanError):
        check_memory(plan(0.0365), SPECS)
