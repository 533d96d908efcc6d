"""Specs of LLaMA-2's shapes, and a problem over them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.dataflow import DataflowGraph, Role
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.device_memory import DeviceMemory
from trl_realloc.planner.cost.hardware import DEVICES
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload


SHAPES = {
    1: (16, 2048, 5632, 16, 16),
    7: (32, 4096, 11008, 32, 32),
    13: (40, 5120, 13824, 40, 40),
    70: (80, 8192, 28672, 64, 8),
}
# the content of a config.json
SMALL = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100}


@lru_cache
def llama(billions: int, head: Any = "lm", kv_heads: int | None = None) -> ModelSpec:
    layers, hidden, inner, heads, kv = SHAPES[billions]
    config = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner}
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads or kv, "vocab_size": 32000}
    return ModelSpec.from_config(config, head, bytes_per_element=2)


def specs(actor: int = 7, critic: int = 7, graph: DataflowGraph | None = None) -> dict[str, Sequence[ModelSpec]]:
    policy = (Role.ACTOR, Role.REFERENCE)
    return {
        call.name: (llama(actor) if call.role in policy else llama(critic, "score"),)
        for call in (graph or ppo_graph()).calls
    }


def work(**changes: Any) -> Workload:
    return Workload(**{"episodes": 128, "prompt_tokens": 128, "response_tokens": (128,), "recompute": True, **changes})


def pricing(nodes: int = 1, per_node: int = 8, workload: Workload | None = None, **device: Any) -> Pricing:
    h100 = DEVICES["h100"]
    rates = AnalyticRates(h100).changed(**device)
    cluster = Cluster(nodes, per_node, h100.memory / 1e9)
    return Pricing(cluster, workload or work(), rates, memory=DeviceMemory(h100.memory))
