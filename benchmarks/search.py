"""Seconds that choosing a plan takes, and microseconds for each candidate.

    python benchmarks/search.py [--json FILE]

LLaMA-2 shapes as actor and critic on 8-GPU H100 nodes, from 16 to 4,096 devices. One core, no torch, no GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import yaml
from papers import SETTINGS, spec_of
from rich.console import Console
from rich.table import Table

from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.dataflow import Role
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.device_memory import DeviceMemory
from trl_realloc.planner.cost.hardware import parse_cluster
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.space import Space


CASES = [(7, 7, 2), (13, 13, 4), (34, 7, 4), (70, 7, 8), (7, 70, 8), (70, 70, 16), (70, 70, 128), (70, 70, 512)]


def measure(actor: int, critic: int, nodes: int, time_limit_s: float) -> dict[str, Any]:
    cluster, device = parse_cluster(f"h100:{nodes}x8")
    policy = (Role.ACTOR, Role.REFERENCE)
    settings = yaml.safe_load((SETTINGS / "real_v1.yaml").read_text(encoding="utf-8"))
    sizes = {call.name: (actor, "lm") if call.role in policy else (critic, "score") for call in ppo_graph().calls}
    models = {name: [spec_of(settings, *size)] for name, size in sizes.items()}
    lengths = tuple(range(32, 1025, 32))
    workload = Workload(64 * nodes, 512, lengths, mini_batches=4, epochs=1, recompute=True)
    pricing = Pricing(cluster, workload, AnalyticRates(device), memory=DeviceMemory(device.memory))
    begun = time.perf_counter()
    chosen = choose(Space.of_run(models, pricing), time_limit_s=time_limit_s)
    seconds = time.perf_counter() - begun
    names = ("flatten", "interleave", "separate")
    tried = [chosen.best, *(each.plan for each in chosen.alternatives if each.plan)]
    presets = [found.seconds for found in tried if found.name.startswith(names)]
    return {
        "actor_b": actor,
        "critic_b": critic,
        "devices": cluster.size,
        "seconds": round(seconds, 2),
        "search_s": round(chosen.search.seconds, 2),
        "evaluations": chosen.search.evaluations,
        "us_per_evaluation": round(1e6 * chosen.search.seconds / chosen.search.evaluations, 1),
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
