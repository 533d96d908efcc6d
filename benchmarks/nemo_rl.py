"""GRPO of mixtures of experts: NeMo-RL's published iterations, and this planner's estimates by devices' data sheets.

    python benchmarks/nemo_rl.py [--json FILE] [--time-limit SECONDS]

The table (`papers/nemo_rl.csv`) has the on-policy rows for H100s in 16 bits of the performance summary of NeMo-RL 0.6
(docs/about/performance-summary.md of its repository): samples of a generation, optimizer steps on it, mean and largest
length of a sample, seconds. The summary says nothing of the prompts' and the responses' lengths apart, nor of their
spread: here prompts have 100 tokens, and the longest 1 % of responses reach the limit. Nothing is fitted to the table,
and the plans are those that the search finds in this package's space, not the authors'. Needs no GPU and no torch.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trl_realloc.plan.dataflow import Role
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.device_memory import gpu_memory
from trl_realloc.planner.cost.hardware import parse_cluster
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.recipe.recipe import read_recipe
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.space import Space


HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "qwen3-30b-a3b" / "grpo.yaml"
MODELS = {"Qwen3-30B-A3B": RECIPE.parent / "Qwen3-30B-A3B", "Qwen3-235B-A22B": HERE / "papers" / "Qwen3-235B-A22B"}
PROMPT, GROUP = 100, 32


def rows(time_limit: float) -> Iterator[dict[str, Any]]:
    """The table's rows with the estimates."""
    with (HERE / "papers" / "nemo_rl.csv").open(encoding="utf-8") as table:
        for line in csv.DictReader(table):
            yield _estimated(line, time_limit)


def _estimated(line: Mapping[str, str], time_limit: float) -> dict[str, Any]:
    recipe = read_recipe(RECIPE, PROMPT)
    recipe = replace(recipe, folders=dict.fromkeys((Role.ACTOR, Role.REFERENCE), MODELS[line["model"]]))
    cluster, device = parse_cluster(line["cluster"])
    longest = int(line["longest"]) - PROMPT
    work = Workload(
        episodes=int(line["samples"]),
        prompt_tokens=PROMPT,
        response_tokens=Workload.tail(float(line["mean_length"]) - PROMPT, longest, longest),
        mini_batches=int(line["mini_batches"]),
        epochs=1,
        recompute=True,
        forward_tokens=int(line["longest"]),
        train_tokens=int(line["longest"]),
        completions=GROUP,
    )
    memory = gpu_memory(device.memory, recipe.settings["memory_headroom"])
    pricing = Pricing(cluster, work, AnalyticRates(device), memory=memory, vllm_share=None)
    best = choose(Space.of_run(recipe.specs(), pricing, graph=recipe.graph), time_limit_s=time_limit).best
    calls = {name: f"{each.engine} {each.strategy} on {each.mesh}" for name, each in best.plan.assignments.items()}
    numbers = {"published_s": float(line["published_s"]), "estimated_s": round(best.seconds, 1)}
    return {**line, **numbers, "memory_gb": round(best.estimate.memory / 1e9, 1), "fits": best.fits, "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of each search")
    arguments = parser.parse_args()
    found = []
    for row in rows(arguments.time_limit):
        found.append(row)
        print(
            f"{row['model']} {row['cluster']}: published {row['published_s']:g} s, estimated {row['estimated_s']} s, "
            f"{row['memory_gb']} GB"
        )
        for name, layout in row["calls"].items():
            print(f"  {name}: {layout}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
