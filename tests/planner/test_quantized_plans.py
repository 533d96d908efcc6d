"""QLoRA in the planner: the bytes of quantized weights, how a plan may divide them, and the plans of an 8B policy on
one card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llamas import pricing, specs

from trl_realloc.cli.recipe_planning import IterationSize, choose_for_recipe, cluster_space
from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.presets import flatten
from trl_realloc.plan.quantization import Quantization
from trl_realloc.planner.recipe.recipe import Recipe, read_recipe
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.problem import estimate_plan
from trl_realloc.planner.search.space import Space


RECIPE = Path(__file__).parents[2] / "recipes" / "llama-8b" / "grpo-qlora.yaml"
PROMPT = 400.0


@pytest.mark.parametrize("shape", [(128, 320), (65, 33), (1024, 2048)])
def test_quantized_weights_have_the_bytes_that_bitsandbytes_stores(shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    weight = torch.randn(shape)
    for nested in (False, True):
        stored, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=nested)
        scales = state.absmax.nbytes + (state.state2.absmax.nbytes if nested else 0)
        assert Quantization(4, nested).bytes(shape) == stored.nbytes + scales
    stored, scales, _ = functional.int8_vectorwise_quant(weight.half())
    assert Quantization(8).bytes(shape) == stored.nbytes + scales.nbytes


def test_a_policy_in_4_bits_is_whole_on_each_device_and_the_others_are_divided_as_before() -> None:
    quantized = {
        name: [replace(spec, quantization=Quantization(), trained_share=0.01) for spec in of_call]
        if ppo_graph().call(name).role in (Role.ACTOR, Role.REFERENCE) and name != "actor.generate"
        else of_call
        for name, of_call in specs().items()
    }
    space = Space.of_run(quantized, pricing(1, 8))
    layouts = {
        name: {(a.engine, a.strategy.tp * a.strategy.pp, a.strategy.zero_stage) for a in (c.assignment for c in found)}
        for name, found in space.candidates().items()
    }
    whole = {("zero", 1, 0)}
    assert layouts["actor.train"] == layouts["reference.forward"] == whole
    assert layouts["critic.train"] - whole and {tp for _, tp, _ in layouts["actor.generate"]} == {1, 2, 4, 8}
    found = choose(space, time_limit_s=0.5)
    plans = [found.best, *(other.plan for other in found.alternatives if other.plan is not None)]
    assert {plan.plan["actor.train"].strategy.zero_stage for plan in plans} == {0}
    (spec,) = quantized["actor.train"]
    with pytest.raises(PlanError, match="a quantized model is not split by tensor or pipeline; use engine zero"):
        spec.check_strategy(2, 1)


def recipe(folder: Path, *, by_vllm: bool) -> Recipe:
    """The recipe of the repository, or with vLLM."""
    text = RECIPE.read_text().replace("use_vllm: false\n", f"use_vllm: {str(by_vllm).lower()}\n")
    path = folder / "llama-8b" / "grpo-qlora.yaml"
    path.parent.mkdir()
    (path.parent / "Llama-3.1-8B-Instruct").symlink_to(RECIPE.parent / "Llama-3.1-8B-Instruct")
    path.write_text(text)
    return read_recipe(path, PROMPT)


# 32 layers of matrices of 2 x 4096 x 4096 + 2 x 4096 x 1024 + 3 x 4096 x 14336 elements in 4 bits, with a scale of one
# byte for 64 elements and one of 4 bytes for 16,384; embedding and head of 128,256 x 4,096 and 65 norms in bfloat16
BASE = 32 * 218_103_808 * (1 / 2 + 1 / 64 + 4 / 16_384) + 2 * (2 * 128_256 * 4096 + 65 * 4096)
# r 16 on all linear layers: 16 x (rows + columns) for each of 7 matrices; float32 weights and two moments; gradients
ADAPTERS = 32 * 16 * (2 * 8192 + 2 * 5120 + 3 * 18_432)
# while it trains: the input of each of 32 layers for 8 samples of 912 tokens, one layer's activations, the dequantized
# matrix of 4096 x 14,336, and two float32 copies of the logits of 8 x 512 tokens in slices, with the head's gradients
TOKENS = 8 * (400 + 512)
LAYER_INPUTS, DEQUANTIZED = 32 * TOKENS * 4096 * 2, 4096 * 14_336 * 2
CONTEXT = 0.8e9


@pytest.mark.parametrize(
    ("cluster", "by_vllm", "seconds", "gigabytes"),
    [("rtx4090:1", False, 64.4, 14.8), ("h100:1", True, 12.4, 39.6)],
)
def test_an_8b_policy_in_4_bits_is_planned_on_one_card(
    tmp_path: Path, cluster: str, by_vllm: bool, seconds: float, gigabytes: float
) -> None:
    found = choose_for_recipe(recipe(tmp_path, by_vllm=by_vllm), cluster, None, None, None, 2.0).best
    assert found.fits and (found.seconds, found.estimate.memory / 1e9) == pytest.approx((seconds, gigabytes), abs=0.05)
    holds = found.estimate.holds
    assert "reference.forward" not in holds and "actor.forward" not in holds
    assert holds["actor.train"] == pytest.approx(BASE + 12 * ADAPTERS, rel=1e-3)
    # less than the layers' inputs and 6 GB of the rest by hand; with it the run fits on 24 GB
    transient = holds["while actor.train runs"]
    assert LAYER_INPUTS + DEQUANTIZED + 4 * ADAPTERS < transient < LAYER_INPUTS + DEQUANTIZED + 4 * ADAPTERS + 6e9
    assert by_vllm or BASE + 12 * ADAPTERS + LAYER_INPUTS + DEQUANTIZED + 4 * ADAPTERS + 6e9 + CONTEXT < 0.9 * 24e9


def test_on_24_gb_an_engines_16_bit_weights_do_not_fit_beside_it(tmp_path: Path) -> None:
    quantized = recipe(tmp_path, by_vllm=True)
    space = cluster_space(quantized, "rtx4090:1", IterationSize())
    plan = flatten(space.cluster, graph=space.graph)
    for share in space.pricing.shares:
        engine = replace(plan["actor.generate"], drop=True, memory_share=share)
        of_share = replace(plan, assignments={**plan.assignments, "actor.generate": engine})
        assert not estimate_plan(of_share, space.specs, space.pricing).fits
    (spec,) = quantized.specs()["actor.generate"]
    assert spec.quantization is None and spec.bytes + BASE > 0.9 * 24e9
