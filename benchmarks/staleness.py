"""Training on old rollouts: what is learned, how fast updates are, and whether the bound holds.

    python benchmarks/staleness.py --learning --json benchmarks/results/staleness.json
    python benchmarks/staleness.py --throughput --ages --stragglers --resume --json benchmarks/results/staleness.json
    python benchmarks/staleness.py --overlap --json benchmarks/results/staleness.json
    python benchmarks/staleness.py --throughput --overlap --processes 4 --json benchmarks/results/staleness.json

`--learning` trains the demo's task on samples that are exactly k updates old, in one process (`staleness_learning`);
`--confirm` trains it with vLLM engines on two. The others are runs on 2 processes or more, with samples of skewed
lengths (`staleness_measured`). Sections are merged into the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import result_file
import staleness_ages
import staleness_counts
from rich.console import Console
from rich.table import Table


ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learning", action="store_true")
    parser.add_argument("--confirm", action="store_true", help="two trainings with vLLM, k = 0 and 2")
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--overlap", action="store_true", help="streams, k = 0 and 1")
    parser.add_argument("--ages", action="store_true", help="mean age of tokens, beside what the planner expects")
    parser.add_argument("--stragglers", action="store_true", help="long samples, and with 4 processes a slow engine")
    parser.add_argument("--resume", action="store_true", help="a training that is killed after a checkpoint")
    parser.add_argument("--simulated", action="store_true", help="the planner's simulation of 16 nodes of 8 H100s")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="of --learning")
    parser.add_argument("--updates", type=int, default=40, help="of a training of --learning and --confirm")
    parser.add_argument("--rounds", type=int, default=3, help="of --throughput and --overlap")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "staleness", help="models, logs, finished runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    sections, console = _sections(options), Console(width=130)
    for name, rows in sections.items():
        console.print(table(name, rows))
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.is_file() else {}
        result_file.merge(options.json, {name: _merged(known.get(name, []), rows) for name, rows in sections.items()})


def _merged(known: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows in place of the known ones with as many processes."""
    measured = {row.get("processes") for row in rows}
    return [*(row for row in known if row.get("processes") not in measured), *rows]


def _sections(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    made: dict[str, list[dict[str, Any]]] = {}
    if options.learning:
        import staleness_learning

        runs = staleness_learning.measure(
            options.runs / "task", options.runs / "learning.jsonl", options.seeds, options.updates
        )
        made["learning"] = staleness_learning.rows(runs)
    if options.confirm:
        made["confirm"] = staleness_counts.confirm(options.runs, options.updates)
    if options.throughput:
        made["throughput"] = staleness_counts.throughput(options.runs, options.processes, options.rounds)
    if options.overlap:
        made["overlap"] = staleness_counts.overlap(options.runs, options.processes, options.rounds)
    if options.ages:
        made["ages"] = staleness_ages.ages(options.runs, options.processes)
    if options.stragglers:
        made["stragglers"] = staleness_counts.stragglers(options.runs, options.processes)
    if options.resume:
        made["resume"] = staleness_counts.resume(options.runs)
    if options.simulated:
        import staleness_simulated

        made["simulated"] = list(staleness_simulated.rows())
    return made


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    """A column for each number of the rows; lists are left to the JSON."""
    names = list(dict.fromkeys(name for row in rows for name in row if not isinstance(row[name], list | dict)))
    made = Table(*(name.replace("_", " ") for name in names), title=title)
    for row in rows:
        made.add_row(*(_shown(row.get(name)) for name in names))
    return made


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
