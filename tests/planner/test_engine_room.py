"""What a vLLM engine needs of its share of a device: weights, its largest forward, and its longest request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llamas import llama, pricing, specs, work

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import MAX_SLOTS, Assignment, ParallelStrategy
from trl_realloc.plan.cluster import DeviceMesh
from trl_realloc.planner.cost.device_memory import DeviceMemory, gpu_memory
from trl_realloc.planner.cost.engine_room import CUDA_GRAPH_BYTES, engine_peak
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.space import Space


GENERATE = ppo_graph().call("actor.generate")


def engines(tp: int, size: int = 8) -> Assignment:
    return Assignment(DeviceMesh(0, size), ParallelStrategy(size // tp, tp), "vllm")


def fits(prices: Pricing, tp: int = 1, billions: int = 7, size: int = 8) -> bool:
    assert prices.memory is not None
    return prices.price(GENERATE, [llama(billions)], engines(tp, size)).static <= prices.memory.total


def test_an_engine_needs_room_for_the_longest_request_that_it_may_get() -> None:
    """0.3 of 80 GB are 24, of which a 7B leaves 10.5: 20,000 tokens of 0.5 MB each."""
    prices = replace(pricing(), memory=DeviceMemory(80e9))
    most = int((24e9 - llama(7).bytes) / llama(7).kv_bytes_per_token)
    assert fits(replace(prices, context_length=most)) and not fits(replace(prices, context_length=most + 1))
    assert fits(replace(prices, context_length=131_072), tp=8), "of which each device keeps an eighth"
    assert fits(prices) and not fits(replace(prices, workload=work(prompt_tokens=most)))


def test_the_longest_request_does_not_limit_how_many_samples_are_decoded() -> None:
    prices = replace(pricing(workload=work(episodes=512)), memory=DeviceMemory(80e9))
    slots = [replace(prices, context_length=length).slots(llama(7), engines(1), 64) for length in (None, 10_000)]
    assert slots[0] == slots[1] > 1


@pytest.mark.parametrize("tp", [1, 8])
def test_on_a_gpu_the_largest_forward_is_not_cache(tp: int) -> None:
    spec = llama(7)
    gpu, other = (replace(pricing(), memory=memory) for memory in (gpu_memory(80e9), DeviceMemory(80e9)))
    rooms = [prices.engine_room(spec, engines(tp), 16) for prices in (gpu, other)]
    assert rooms[0] is not None and rooms[1] is not None
    kept = rooms[1].cache - rooms[0].cache
    tokens = 16 * work().longest
    of_samples = 16 * 32000 * (2 * 4 + 4 + 4 / 32)  # logits twice, and counts of tokens
    assert kept == pytest.approx(tokens * (14 / tp + 6) * 4096 + of_samples + CUDA_GRAPH_BYTES)
    of_long = engine_peak(spec, tp, 1024, 131_072) - CUDA_GRAPH_BYTES
    assert of_long > 3.9 * (kept - CUDA_GRAPH_BYTES), "of requests that are longer than a forward"
    long = work(prompt_tokens=1024)
    slots = [replace(prices, workload=long).slots(spec, engines(tp), 10_000) for prices in (gpu, other)]
    assert slots[0] < slots[1] < MAX_SLOTS
    assert engine_peak(spec, tp, 10_000, 5000) == engine_peak(spec, tp, MAX_SLOTS, 5000)


def refusal(prices: Pricing, billions: int = 70) -> str:
    with pytest.raises(PlanError) as refused:
        choose(Space.of_run(specs(billions, 7), prices), time_limit_s=0.1)
    return str(refused.value)


def test_a_refusal_names_the_share_or_the_nodes_that_an_engine_needs() -> None:
    """A 70B in 16 bits has 138 GB, and 0.3 of 80 GB are 24."""
    four, one = (replace(pricing(1, size), memory=gpu_memory(80e9)) for size in (4, 1))
    said = refusal(four)
    assert said.startswith("actor.generate fits on no mesh of 1 node of 4 devices: a vLLM engine has 24.0 GB")
    assert "of these devices would" not in said
    share = float(said.partition("; vllm_gpu_memory_utilization ")[2].split()[0])
    enough, less = (replace(four, vllm_share=each) for each in (share, share - 0.01))
    assert fits(enough, 4, 70, size=4) and not fits(less, 4, 70, size=4)
    assert "nodes of 8 devices (tp 8" in said and fits(pricing(1, 8), 8, 70)
    alone = refusal(one)
    assert "nodes of 8 devices" in alone and "; vllm_gpu" not in alone, "no share of one device holds it"
    narrow = refusal(replace(one, vllm_share=0.001))
    assert "no share of such devices is enough" in narrow


def test_where_the_engine_has_room_a_refusal_names_a_number_of_devices() -> None:
    assert "of these devices would be enough" in refusal(replace(pricing(1, 8), memory=gpu_memory(80e9)))
