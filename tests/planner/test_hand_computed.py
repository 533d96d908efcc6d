"""FLOPs and bytes of GRPO on an 8B policy on 8 H100s, beside numbers that were computed by hand.

256 samples in groups of 8 after prompts of 400 tokens, 1,024 tokens each: 32 samples of 4 prompts on each device. On a
device that computes 1e12 FLOP/s and moves bytes in no time, seconds are 1e12 FLOPs, and the other way round.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trl_realloc.cli.recipe_planning import IterationSize, cluster_space
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import DeviceMesh
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.call_cost import CallCost
from trl_realloc.planner.cost.hardware import DEVICES, Link
from trl_realloc.planner.recipe.recipe import read_recipe


RECIPE = Path(__file__).parents[2] / "recipes" / "llama-8b" / "grpo.yaml"
FAST = Link(1e30, 0.0, 0.0, 1.0)
NOTHING = dict.fromkeys(("launch", "decode_launch", "step", "call", "passes", "logit_bytes", "sampled_bytes"), 0.0)
IDEAL = replace(DEVICES["h100"], efficiency=1.0, memory_efficiency=1.0, inside=FAST, host_bandwidth=1e30, **NOTHING)
COMPUTES, MOVES = replace(IDEAL, flops=1e12, memory_bandwidth=1e30), replace(IDEAL, flops=1e30, memory_bandwidth=1e12)

# Llama-3.1-8B: 32 layers of 4,096 channels, 14,336 in the MLP, 8 heads of 128 channels for keys and values
LAYERS = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)  # 6.98e9
HEAD = 128_256 * 4096  # 5.3e8
PAIR = 4 * 32 * 4096  # FLOPs of a query and a key in all layers, for the scores and the sum of the values
CACHED = 32 * 2 * 8 * 128 * 2  # 131,072 bytes of a token's keys and values in bfloat16
# scoring computes a prompt once for its 8 samples, and half of the pairs, because attention is causal
FORWARD = 2 * LAYERS * (4 * 400 + 32 * 1024) + 2 * HEAD * 32 * 1024 + PAIR * (32 * 1424**2 - 28 * 400**2) / 2


def cost(call: str, device: object, prompt: float = 400.0) -> CallCost:
    space = cluster_space(read_recipe(RECIPE, prompt), "h100:8", IterationSize(256))
    prices = replace(space.pricing, rates=AnalyticRates(device))  # type: ignore[arg-type]
    engine, zero_stage = ("vllm", 0) if call == "actor.generate" else ("zero", 3)
    share = 0.5 if engine == "vllm" else None
    to = Assignment(DeviceMesh(0, 8), ParallelStrategy(8, zero_stage=zero_stage), engine, memory_share=share)
    return prices.price(space.graph.call(call), space.specs[call], to)


def test_the_flops_of_a_generation() -> None:
    """Prefill of 4 prompts, and of half a block of the other samples; 1,024 steps of 32 samples with 912 tokens in the
    mean."""
    prefill = 2 * LAYERS * (4 * 400 + 28 * 8) + PAIR * 4 * 400**2 / 2
    decode = 32 * 1024 * (2 * (LAYERS + HEAD) + PAIR * (400 + 512))
    assert 1e12 * cost("actor.generate", COMPUTES).seconds == pytest.approx(prefill + decode, rel=0.02)


def test_the_bytes_of_a_generation() -> None:
    """Each step reads 15 GB of weights and 3.8 GB of keys and values."""
    decode = 1024 * (2 * (LAYERS + HEAD) + CACHED * 32 * (400 + 512))
    assert 1e12 * cost("actor.generate", MOVES).parts["memory"] == pytest.approx(decode, rel=0.1)


@pytest.mark.parametrize("prompt", [400, 4000])
def test_a_generation_after_longer_prompts_adds_the_prefill_of_one_prompt_of_each_group(prompt: int) -> None:
    short, long = (cost("actor.generate", COMPUTES, tokens).seconds for tokens in (16.0, float(prompt)))
    prefill = 2 * LAYERS * 4 * (prompt - 16) + PAIR * 4 * prompt**2 / 2
    decode = 32 * 1024 * PAIR * (prompt - 16)  # each sample attends to its whole prompt
    assert 1e12 * (long - short) == pytest.approx(prefill + decode, rel=0.05)


def test_the_flops_of_a_forward() -> None:
    assert 1e12 * cost("actor.forward", COMPUTES).seconds == pytest.approx(FORWARD, rel=0.02)


def test_the_flops_of_a_training() -> None:
    """A forward, the same again for the backward (layers by recomputation, logits in slices), and twice as much for the
    gradients of what goes in and of the weights."""
    assert 1e12 * cost("actor.train", COMPUTES).seconds == pytest.approx(4 * FORWARD, rel=0.02)


def test_the_bytes_of_an_optimizer_step() -> None:
    """Of an eighth of 8.03e9 float32 parameters: the gradient, the weight twice and two moments twice, and the
    parameter."""
    elements = LAYERS + 2 * HEAD
    expected = elements / 8 * (4 + 2 * 4 + 2 * 8 + 4)
    assert 1e12 * cost("actor.train", MOVES).parts["optimizer"] == pytest.approx(expected, rel=0.01)


def test_a_prompt_of_a_few_tokens_more_does_not_cost_another_round() -> None:
    """With the share of 0.3 the cache has room for 31 samples of 1,424 tokens with prompts of their own."""
    space = [cluster_space(read_recipe(RECIPE, prompt), "h100:8", IterationSize(256)) for prompt in (390.0, 400.0)]
    to = Assignment(DeviceMesh(0, 8), ParallelStrategy(8), "vllm", memory_share=0.3)
    for completions in (1, 8):
        short, long = (
            replace(each.pricing, workload=replace(each.pricing.workload, completions=completions))
            .price(each.graph.call("actor.generate"), each.specs["actor.generate"], to)
            .seconds
            for each in space
        )
        assert short < long < 1.02 * short
