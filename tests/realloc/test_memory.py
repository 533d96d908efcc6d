"""What a plan's parameters take of each device, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from llamas import SMALL

from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.execution_plan import ExecutionPlan, PlanError
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.realloc.memory import call_bytes, check_memory


SPEC = ModelSpec.of_shapes([("w", (1000, 1000))], bytes_per_element=4)  # 4 MB
CALLS = ("actor.generate", "reference.forward", "reward.forward", "critic.forward", "actor.train", "critic.train")
SPECS = {key: [SPEC] for key in CALLS}


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
    return {name: size.most / 1e6 for name, size in call_bytes(made, SPECS, **more)[device].items()}


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
    told = r"device 0 would hold 0\.04 GB .*actor\.train 0\.02.*memory_gb is 0\.03; split"
    with pytest.raises(PlanError, match=told):
        check_memory(plan(0.03), SPECS)
    check_memory(plan(0.0361), SPECS)
    check_memory(plan(), SPECS)


def test_of_offloaded_roles_only_the_largest_is_counted() -> None:
    away = {"reference__forward": {"offload": True}, "reward__forward": {"offload": True}}
    check_memory(plan(0.0325, **away), SPECS)
    with pytest.raises(PlanError):
        check_memory(plan(0.0325), SPECS)


def test_gradients_count_while_their_call_runs() -> None:
    """Every engine frees its gradients after a step."""
    check_memory(plan(0.0361), SPECS)  # two models of 4 MB, two of 12 with their state, and gradients of 4
    with pytest.raises(PlanError):
        check_memory(plan(0.0359), SPECS)


def test_two_calls_that_train_together_have_their_gradients_at_the_same_time() -> None:
    policy, critic = (ModelSpec.from_config(SMALL, head, bytes_per_element=4) for head in ("lm", "score"))
    specs = {name: [policy if name.split(".")[0] in ("actor", "reference") else critic] for name in CALLS}
    split = {"engine": "megatron", "dp": 1, "pp": 2}
    made = plan(actor__train=split, critic__train=split, critic__forward=split)
    fused = replace(made, fused=("actor.train", "critic.train"))

    def needs(of: ExecutionPlan, device: int) -> float:
        sizes = call_bytes(of, specs)[device]
        gradients = [sizes[name].gradients for name in ("actor.train", "critic.train")]
        return sum(size.held for size in sizes.values()) + (sum(gradients) if of.fused else max(gradients))

    for of in (made, fused):
        most = max(needs(of, device) for device in (0, 1)) / 1e9
        check_memory(replace(of, cluster=replace(of.cluster, memory_gb=1.0001 * most)), specs)
        with pytest.raises(PlanError):
            check_memory(replace(of, cluster=replace(of.cluster, memory_gb=0.9999 * most)), specs)


def test_a_reference_that_is_the_policy_without_adapters_takes_nothing_in_the_policys_layout() -> None:
    specs = {**SPECS, "reference.forward": [replace(SPEC, is_base=True)]}
    assert "reference.forward" not in call_bytes(plan(), specs)[0]
    alone = {"mesh": "0", "dp": 1}
    elsewhere = plan(actor__train=alone, actor__generate=alone, reference__forward={"mesh": "1", "dp": 1})
    assert call_bytes(elsewhere, specs)[1]["reference.forward"].held == 4e6


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_where_a_policy_with_adapters_generates_apart_from_its_training_its_base_is_counted_once(engine: str) -> None:
    """Of vLLM: the engine's weights and the copy that the adapters are merged in, which stays while the engine sleeps.
    The reference computes in that copy. Where tp 2 leaves a rank without the copy, the reference is one of its own."""
    specs = {**SPECS, "reference.forward": [replace(SPEC, is_base=True)]}
    apart = {"actor__train": {"mesh": "0", "dp": 1}, "reference__forward": {"mesh": "1", "dp": 1}}
    generates = {"mesh": "1", "dp": 1, "engine": engine, "drop": engine == "vllm"}
    sizes = call_bytes(plan(actor__generate=generates, **apart), specs, [Role.ACTOR])[1]
    kept = 4e6 if engine == "vllm" else 0
    assert "reference.forward" not in sizes
    assert (sizes["actor.generate"].held, sizes["actor.generate"].kept) == (4e6, kept)
    if engine == "vllm":
        divided = plan(actor__generate={"engine": "vllm", "dp": 1, "tp": 2}, **apart)
        first, second = (call_bytes(divided, specs, [Role.ACTOR])[device] for device in (0, 1))
        assert first["actor.generate"].kept == 4e6 and "actor.generate" not in second
        assert second["reference.forward"].held == 4e6


@pytest.mark.parametrize("engines", ["tp", "dp"])
@pytest.mark.parametrize("stage", [0, 3])
def test_engines_on_the_devices_of_a_training_need_no_copy_to_merge_adapters_in(stage: int, engines: str) -> None:
    made = plan(actor__train={"zero_stage": stage}, actor__generate={"engine": "vllm", "dp": 1, engines: 2})
    assert call_bytes(made, SPECS, [Role.ACTOR])[0]["actor.generate"].kept == 0
    wider = plan(
        actor__train={"zero_stage": stage, "mesh": "0", "dp": 1},
        actor__generate={"engine": "vllm", "dp": 1, engines: 2},
    )
    assert call_bytes(wider, SPECS, [Role.ACTOR])[0]["actor.generate"].kept == 4e6
