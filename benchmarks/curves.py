"""The demo's reward under several plans from one seed: the plan never changes what is learned, only where.

    python benchmarks/curves.py --json benchmarks/results/curves.json --picture docs/curves.png

Needs the demo's models and data (`make demo`, or examples/demo/prepare.py --out runs/demo/assets). Engines batch
requests differently from plan to plan, so sampled tokens, and with them the curves, part after some updates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trl_realloc.plan.cluster import Cluster  # noqa: E402
from trl_realloc.plan.execution_plan import ExecutionPlan  # noqa: E402
from trl_realloc.plan.presets import flatten  # noqa: E402


def plans() -> dict[str, ExecutionPlan]:
    """Three ways to run the same six calls on two devices."""
    everywhere = flatten(Cluster(1, 2)).to_dict()
    split = json.loads(json.dumps(everywhere))
    tensor, stages = {"mesh": "0-1", "engine": "megatron", "tp": 2}, {"mesh": "0-1", "engine": "megatron", "pp": 2}
    split["calls"] |= {"reference.forward": tensor, "actor.train": tensor, "critic.train": stages}
    split["calls"]["actor.generate"] = {"mesh": 0, "engine": "vllm"}
    apart = json.loads(json.dumps(everywhere))
    apart["calls"]["actor.train"] = {"mesh": 0, "engine": "zero"}
    apart["calls"]["critic.train"] = {"mesh": 1, "engine": "zero"}
    apart["calls"]["reference.forward"] = {"mesh": 1, "engine": "zero"}
    apart["calls"]["actor.generate"] = {"mesh": 1, "engine": "vllm"}
    named = {
        "flatten: every call data-parallel on both": everywhere,
        "actor tensor-parallel, critic in two stages, one engine": split,
        "actor trains on 0, critic on 1; generation on 1": apart,
    }
    return {name: ExecutionPlan.from_dict({**plan, "name": name}) for name, plan in named.items()}


def scores(plan: ExecutionPlan, updates: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.yaml")
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/demo/accelerate.yaml"]
        command += ["examples/demo/train.py", "--config", "recipes/demo/ppo.yaml"]
        command += ["--plan", f"{folder}/plan.yaml", "--output_dir", folder, "--max_steps", str(updates)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
        log = (Path(folder) / "log").open("w+")
        if subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False).returncode:
            sys.exit(f"{plan.name} failed:\n{Path(log.name).read_text()[-3000:]}")
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        return [row["objective/scores"] for row in rows]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        running = [statistics.fmean(values[max(0, at - 4) : at + 1]) for at in range(len(values))]
        axes.plot(range(1, len(values) + 1), running, label=name, linewidth=1.8)
    axes.set_xlabel("update")
    axes.set_ylabel("score, mean of 5 updates")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right", fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--updates", type=int, default=60)
    options = parser.parse_args()
    curves: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    for name, plan in plans().items():
        curves[name] = scores(plan, options.updates)
        first, last = curves[name][:5], curves[name][-5:]
        rows.append(
            {
                "plan": name,
                "first_update": curves[name][0],
                "first_5": statistics.fmean(first),
                "last_5": statistics.fmean(last),
                "last_5_error": statistics.stdev(last) / len(last) ** 0.5,
                "scores": curves[name],
            }
        )
    table = Table("plan", "first update", "first 5", "last 5", "standard error")
    for row in rows:
        numbers = (row["first_update"], row["first_5"], row["last_5"], row["last_5_error"])
        table.add_row(row["plan"], *(f"{number:.3f}" for number in numbers))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    if options.picture:
        draw(curves, options.picture)


if __name__ == "__main__":
    main()
