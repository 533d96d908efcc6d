"""What a vLLM engine needs of its share of a device: weights, its largest forward, and its longest request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llamas import llama, pricing, work

from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import DeviceMesh
from trl_realloc.planner.activation_memory import engine_peak
from trl_realloc.planner.cost import Pricing
from trl_realloc.planner.device_memory import DeviceMemory, gpu_memory


GENERATE = ppo_graph().call("actor.generate")


def engines(tp: int) -> Assignment:
    return Assignment(DeviceMesh(0, 8), ParallelStrategy(8 // tp, tp), "vllm")


def fits(prices: Pricing, tp: int = 1, billions: int = 7) -> bool:
    assert prices.memory is not None
    return prices.price(GENERATE, [llama(billions)], engines(tp)).static <= prices.memory.total


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
    assert kept == pytest.approx(tokens * (14 / tp + 6) * 4096 + 4 * 16 * 32000)
    assert engine_peak(spec, tp, 1024, 131_072) > 3.9 * kept, "of requests that are longer than a forward"
    assert gpu.slots(spec, engines(tp), 10_000) < other.slots(spec, engines(tp), 10_000)
