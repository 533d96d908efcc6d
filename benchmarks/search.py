"""How long choosing a plan takes, and what a candidate costs.

    python benchmarks/search.py [--json FILE]

LLaMA-2 shapes as actor and critic on 8-GPU H100 nodes, from 16 to 4,096 devices. One core, no torch, no GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trl_realloc.dataflow import Role, ppo_graph
from trl_realloc.modelspec import ModelSpec
from trl_realloc.planner.choose import choose
from trl_realloc.planner.cost import Pricing
from trl_realloc.planner.hardware import Analytic, parse_cluster
from trl_realloc.planner.workload import Workload


# billions: layers, hidden, intermediate, heads, key/value heads
SHAPES = {
    7: (32, 4096, 11008, 32, 32),
    13: (40, 5120, 13824, 40, 40),
    34: (48, 8192, 22016, 64, 8),
    70: (80, 8192, 28672, 64, 8),
}
CASES = [(7, 7, 2), (13, 13, 4), (34, 7, 4), (70, 7, 8), (7, 70, 8), (70, 70, 16), (70, 70, 128), (70, 70, 512)]


def spec(billions: int, head: Any) -> ModelSpec:
    layers, hidden, inner, heads, kv_heads = SHAPES[billions]
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32000,
    }
    return ModelSpec.from_config(config, head, bytes_per_element=2)


def measure(actor: int, critic: int, nodes: int, time_limit_s: float) -> dict[str, Any]:
    cluster, device = parse_cluster(f"h100:{nodes}x8")
    policy = (Role.ACTOR, Role.REFERENCE)
    models = {c.name: [spec(actor, "lm") if c.role in policy else spec(critic, "score")] for c in ppo_graph().calls}
    lengths = tuple(range(32, 1025, 32))
    workload = Workload(64 * nodes, 512, lengths, mini_batches=4, epochs=1, recompute=True)
    pricing = Pricing(cluster, workload, Analytic(device), memory=device.memory)
    begun = time.perf_counter()
    chosen = choose(models, pricing, time_limit_s=time_limit_s)
    seconds = time.perf_counter() - begun
    names = ("flatten", "interleave", "separate")
    tried = [chosen.best, *(each.found for each in chosen.beaten if each.found)]
    presets = [found.seconds for found in tried if found.name.startswith(names)]
    return {
        "actor_b": actor,
        "critic_b": critic,
        "devices": cluster.size,
        "seconds": round(seconds, 2),
        "search_s": round(chosen.outcome.seconds, 2),
        "evaluations": chosen.outcome.evaluations,
        "us_per_evaluation": round(1e6 * chosen.outcome.seconds / chosen.outcome.evaluations, 1),
        "estimate_s": chosen.best.seconds,
        "best_preset_s": min(presets, default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--time-limit", type=float, default=5.0)
    given = parser.parse_args()
    rows = [measure(*case, given.time_limit) for case in CASES]
    shown = Table("actor + critic", "devices", "all in all", "search", "candidates", "each", "estimate", "best preset")
    for row in rows:
        preset = f"{row['best_preset_s']:.2f} s" if row["best_preset_s"] else "none fits"
        shown.add_row(
            f"{row['actor_b']}B + {row['critic_b']}B",
            f"{row['devices']:,}",
            f"{row['seconds']:.1f} s",
            f"{row['search_s']:.1f} s",
            f"{row['evaluations']:,}",
            f"{row['us_per_evaluation']:.0f} us",
            f"{row['estimate_s']:.2f} s",
            preset,
        )
    Console().print(shown)
    if given.json:
        given.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
