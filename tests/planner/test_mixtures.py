"""What the planner counts for a mixture of experts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import DeviceMesh
from trl_realloc.plan.execution_plan import PlanError
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.engine_room import model_part
from trl_realloc.planner.cost.hardware import DEVICES
from trl_realloc.realloc.layout import megatron_layout, vllm_layout


RECIPE = Path(__file__).parents[2] / "recipes" / "qwen3-30b-a3b" / "Qwen3-30B-A3B" / "config.json"
A3B: dict[str, Any] = json.loads(RECIPE.read_text())
H100 = AnalyticRates(DEVICES["h100"])


def mixture(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**A3B, **changes}, bytes_per_element=2)


def test_all_and_active_parameters_are_those_of_the_models_name() -> None:
    spec = mixture()
    assert spec.elements == pytest.approx(30.5e9, rel=0.01) and spec.active_elements == pytest.approx(3.3e9, rel=0.02)
    outside = spec.vocabulary * spec.hidden  # the embedding is a lookup
    vectors = sum(p.elements for p in spec.parameters if len(p.shape) == 1)
    assert spec.forward_flops(1) == pytest.approx(2 * (spec.active_elements - outside - vectors), rel=1e-6)


def test_a_batch_reads_the_experts_that_its_tokens_draw() -> None:
    spec, draws = mixture(), random.Random(0)
    others = spec.layer_elements - spec.expert_elements
    assert spec.read_layer_elements(1) == pytest.approx(spec.active_layer_elements)
    for tokens in (2, 8, 30):
        drawn = [len({e for _ in range(tokens) for e in draws.sample(range(128), 8)}) / 128 for _ in range(300)]
        expected = others + spec.expert_elements * sum(drawn) / len(drawn)
        assert spec.read_layer_elements(tokens) == pytest.approx(expected, rel=0.02)
    assert spec.read_layer_elements(4000) == pytest.approx(spec.layer_elements)


def test_a_forward_costs_the_active_experts_arithmetic_and_a_decode_step_the_reading_of_those_drawn() -> None:
    spec, dense = mixture(), mixture(num_experts=8)  # every token uses all of its 8 experts
    assert H100.layer(spec, 65_536, 0, 1) == pytest.approx(H100.layer(dense, 65_536, 0, 1), rel=0.02)
    (_, few), (_, one) = H100.decode(dense, 64, 0, 1), H100.decode(spec, 1, 0, 1)
    _, many = H100.decode(spec, 64, 0, 1)
    assert one == pytest.approx(few, rel=0.02) and many > 10 * few


@given(st.integers(1, 9), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_the_fullest_rank_holds_what_is_estimated(count: int, tp: int, pp: int) -> None:
    sizes = {"num_hidden_layers": 8, "vocab_size": 4096, "num_experts": count, "num_experts_per_tok": 1}
    spec, mesh = mixture(**sizes), DeviceMesh(0, tp * pp)
    layout = megatron_layout(spec, mesh, tp, pp)
    fullest = max(layout.bytes(device) for device in layout.devices)
    estimate = 2 * model_part(spec, Assignment(mesh, ParallelStrategy(1, tp, pp), "megatron"))
    assert estimate == pytest.approx(fullest, rel=0.1)
    in_vllm = vllm_layout(spec, DeviceMesh(0, tp), tp)
    estimate = 2 * model_part(spec, Assignment(DeviceMesh(0, tp), ParallelStrategy(1, tp), "vllm"))
    assert estimate == pytest.approx(max(map(in_vllm.bytes, in_vllm.devices)), rel=0.1)


def test_a_shared_expert_has_a_sum_of_its_own_in_a_layer() -> None:
    shared = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 1024, "mlp_only_layers": list(range(24))}
    assert mixture().sums == 2 and mixture(**shared).sums == 2.5


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_experts_per_tok": 200}, "num_experts_per_tok 200 is more than its 128 experts"),
        ({"num_experts": None}, "must have its number of experts as num_experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be a whole number from 1"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers; it is 3"),
        ({"model_type": "qwen2_moe"}, "shared_expert_intermediate_size must be .* it is missing"),
    ],
)
def test_numbers_that_no_mixture_has_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        mixture(**changes)


def test_a_tp_that_does_not_divide_an_experts_channels_is_refused_for_vllm() -> None:
    with pytest.raises(PlanError, match="share the 100 channels of the experts and MLPs"):
        mixture(moe_intermediate_size=100).check_generation(8)
