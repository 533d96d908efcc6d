"""What the planner counts for a mixture of experts."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamas import pricing

from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import DeviceMesh
from trl_realloc.plan.execution_plan import PlanError
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.planner.cost.activation_memory import kept_casts
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.engine_room import engine_peak, model_part
from trl_realloc.planner.cost.hardware import DEVICES
from trl_realloc.planner.cost.zero_costs import gathered_bytes
from trl_realloc.realloc.layout import megatron_layout, vllm_layout


RECIPE = Path(__file__).parents[2] / "recipes" / "qwen3-30b-a3b" / "Qwen3-30B-A3B" / "config.json"
A3B: dict[str, Any] = json.loads(RECIPE.read_text())
H100 = AnalyticRates(DEVICES["h100"])


def mixture(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**A3B, **changes}, bytes_per_element=2)


def released(family: str, sizes: tuple[int, ...], **more: Any) -> ModelSpec:
    """A released model.

    Args:
        sizes: channels, layers, heads, key/value heads, channels of an expert, experts, experts per token, vocabulary.
    """
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "moe_intermediate_size")
    config = dict(zip((*names, "num_experts", "num_experts_per_tok", "vocab_size"), sizes, strict=True))
    values = {"model_type": family, "intermediate_size": sizes[4], **config, **more}
    return ModelSpec.from_config(values, bytes_per_element=2)


# model -> its spec; all and active parameters, in billions; the experts of a layer, in billions
RELEASED: dict[str, tuple[ModelSpec, float, float, float]] = {
    "Qwen3-30B-A3B": (mixture(), 30.53, 3.35, 0.604),
    "Qwen3-235B-A22B": (
        released("qwen3_moe", (4096, 94, 64, 4, 1536, 128, 8, 151_936), head_dim=128),
        235.1,
        22.2,
        2.416,
    ),
    "Mixtral-8x7B": (released("mixtral", (4096, 32, 32, 8, 14_336, 8, 2, 32_000)), 46.7, 12.9, 1.409),
    "OLMoE-1B-7B": (released("olmoe", (2048, 16, 16, 16, 1024, 64, 8, 50_304)), 6.92, 1.28, 0.403),
    "Granite-3.1-3B-A800M": (
        released("granitemoe", (1536, 32, 24, 8, 512, 40, 8, 49_155), tie_word_embeddings=True),
        3.3,
        0.88,
        0.0944,
    ),
    "GLM-4.5-Air": (
        released("glm4_moe", (4096, 46, 96, 8, 1408, 128, 8, 151_552), head_dim=128, intermediate_size=10_944),
        106.9,
        13.4,
        2.215,
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_the_parameters_of_released_mixtures_are_counted(name: str) -> None:
    spec, billions, active, _ = RELEASED[name]
    assert spec.elements == pytest.approx(1e9 * billions, rel=0.01)
    assert spec.active_elements == pytest.approx(1e9 * active, rel=0.01)
    outside = 0 if spec.tied else spec.vocabulary * spec.hidden  # the embedding is a lookup
    vectors = sum(p.elements for p in spec.parameters if len(p.shape) == 1)
    assert spec.forward_flops(1) == pytest.approx(2 * (spec.active_elements - outside - vectors), rel=1e-6)


@pytest.mark.parametrize("name", RELEASED)
def test_stage_3_gathers_all_experts_of_a_layer_at_once(name: str) -> None:
    spec, _, _, experts = RELEASED[name]
    under_3 = Assignment(DeviceMesh(0, 8), ParallelStrategy(8, zero_stage=3), "zero")
    assert gathered_bytes(spec, under_3) == pytest.approx(2e9 * max(experts, min(1.0, spec.elements / 1e9)), rel=0.01)


def test_experts_in_float32_compute_in_float32_under_autocast() -> None:
    spec = replace(mixture(), bytes_per_element=4, activation_bytes=2)
    of_experts = 2 * 65_536 * 8 * 3 * 2048 * 768
    assert H100.layer(spec, 65_536, 0, 1) > of_experts / DEVICES["h100"].single_flops
    few = 151_936 * 2048 * 2 + 48 * (20e6)  # embedding and head, and what a layer has besides experts
    assert kept_casts(spec) == pytest.approx(2 * few, rel=0.05)


def test_vllms_largest_forward_has_a_row_of_each_of_a_tokens_experts() -> None:
    tokens = 16_384
    between = [engine_peak(mixture(), tp, 128, 8192) - engine_peak(mixture(), 8, 128, 8192) for tp in (1, 4)]
    rows = [2 * tokens * 8 * (max(2048, 1536 // tp) + max(2048, 768 // tp)) for tp in (1, 4, 8)]
    assert between == [0, 0] and rows[0] == rows[1] == rows[2], "the experts' inputs and results are not divided"
    assert engine_peak(mixture(), 8, 128, 8192) > rows[0] > 1e9


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


@given(st.integers(1, 9), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sets(st.integers(0, 4)))
def test_the_fullest_rank_holds_what_is_estimated(count: int, tp: int, pp: int, dense: set[int]) -> None:
    sizes = {"num_hidden_layers": 5, "vocab_size": 4096, "num_experts": count, "num_experts_per_tok": 1}
    spec, mesh = mixture(**sizes, mlp_only_layers=sorted(dense)), DeviceMesh(0, tp * pp)
    layout = megatron_layout(spec, mesh, tp, pp)
    fullest = max(layout.bytes(device) for device in layout.devices)
    estimate = 2 * model_part(spec, Assignment(mesh, ParallelStrategy(1, tp, pp), "megatron"))
    assert estimate == pytest.approx(fullest, rel=1e-6)
    in_vllm = vllm_layout(spec, DeviceMesh(0, tp), tp)
    estimate = 2 * model_part(spec, Assignment(DeviceMesh(0, tp), ParallelStrategy(1, tp), "vllm"))
    assert estimate == pytest.approx(max(map(in_vllm.bytes, in_vllm.devices)), rel=1e-6)


def test_a_shared_expert_has_a_sum_of_its_own_in_a_layer_but_not_in_vllm() -> None:
    sizes = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 1024, "mlp_only_layers": list(range(24))}
    spec, shared = mixture(), mixture(**sizes)
    assert spec.sums == 2 and shared.sums == 2.5
    prices = pricing()
    for engine, factor in (("megatron", 1.25), ("vllm", 1.0)):
        of_four = Assignment(DeviceMesh(0, 4), ParallelStrategy(1, 4), engine)
        sums = [prices.prefill(each, of_four, 8192, 512)["tensor"] for each in (spec, shared)]
        assert sums[1] == pytest.approx(factor * sums[0])


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
