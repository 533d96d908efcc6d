"""Generation and scoring that overlap, against one after the other.

    python benchmarks/fusion.py --json benchmarks/results/fusion.json

Measured with vLLM engines on this machine (`fusion_measured`): responses have a long tail, and the modes alternate on
the same batches. serial: scoring begins when all samples are generated; streamed: when samples and a device are there;
migrated: the last unfinished samples also move to few engines. One sample of the batch is long, and critic and reward
model are larger than the policy, as in RLHFuse's settings; `--long 0.0208 --limit 768 --prompt 64 --scorer-hidden 256`
has a long sample for each engine and models of one size.

    python benchmarks/fusion.py --simulated --json benchmarks/results/fusion_simulated.json

is the planner's simulation of clusters that are not here (`fusion_simulated`); its rows say `simulated: true`.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import Any

import fusion_measured
import fusion_simulated
import result_file
import torch
from rich.console import Console
from rich.table import Table
from skewed import Skewed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=6, help="batches that are generated and scored in each mode")
    parser.add_argument("--iterations", type=int, default=3, help="the same of whole iterations")
    parser.add_argument("--simulated", action="store_true", help="the planner's simulation of other clusters alone")
    parser.add_argument("--runs", type=Path, help="folder for the figures and spans of every run")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the models")
    parser.add_argument("--scorer-hidden", type=int, default=448, help="of critic and reward model")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--limit", type=int, default=1536, help="most tokens of a response")
    parser.add_argument("--samples", type=int, default=48, help="samples of each engine")
    parser.add_argument("--long", type=float, default=1 / 96, help="share of the samples that are long")
    parser.add_argument("--short", type=int, default=32, help="mean tokens of a short response")
    parser.add_argument("--threshold", type=float, default=0.2, help="share of the batch of which the rest moves")
    options = parser.parse_args()
    skewed = Skewed(
        hidden=options.hidden,
        prompt=options.prompt,
        limit=options.limit,
        long_share=options.long,
        short_mean=options.short,
        scorer_hidden=options.scorer_hidden,
    )
    console, jobs = Console(), []
    if options.simulated:
        fusion_simulated.simulate(options.json, console)
        return
    for processes in options.processes:
        jobs.append(
            fusion_measured.measure(
                processes,
                skewed,
                options.samples,
                options.threshold,
                options.repeats,
                options.iterations,
                options.runs,
            )
        )
        show(jobs[-1], console)
    result = {
        "rows": [row for job in jobs for row in job["rows"]],
        "iterations": [row for job in jobs for row in job["iterations"]],
        "migration": jobs[0]["migration"],
        "jobs": [
            {key: job[key] for key in ("processes", "sizes", "lengths", "slowdowns", "most", "migration")}
            for job in jobs
        ],
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        "torch": torch.__version__,
        "commit": result_file.commit(),
    }
    if options.json:
        result_file.write(options.json, result)


def show(job: dict[str, Any], console: Console) -> None:
    """Print the tables of one job."""
    lengths, migration = job["lengths"], job["migration"]
    console.print(
        f"{job['processes']} processes; response lengths of {lengths['samples']} samples: median {lengths['median']}, "
        f"P90 {lengths['p90']}, P99.9 {lengths['p99_9']}, most {lengths['max']}; "
        f"P99.9 is {lengths['p99_9_over_median']:.1f} times the median"
    )
    for title, rows in (("generate + score", job["rows"]), ("whole iteration", job["iterations"])):
        table = Table("mode", "s", "spread", "simulated s", "gain", "generate s", "scoring core-s", "forwards")
        table.title = title
        for row in rows:
            simulated = row["simulated_s"]
            table.add_row(
                row["mode"],
                f"{row['seconds']:.2f}",
                "{:.2f}-{:.2f}".format(*row["spread"]),
                "-" if simulated is None else f"{simulated:.2f}",
                f"{row['gain']:.2f}x",
                f"{row['generate_s']:.2f}",
                f"{row['scoring_core_s']:.2f}",
                f"{row['forwards']:.0f}",
            )
        if table.row_count:
            console.print(table)
    serial = job["rows"][0]
    scoring = serial["seconds"] - serial["generate_s"]
    console.print(f"serial: scoring takes {scoring / serial['generate_s']:.0%} of the time that generation takes")
    factors = ", ".join(f"{factor:.2f} times as long while {n - 1} other ranks score" for n, factor in job["slowdowns"])
    console.print(f"an engine decodes {factors}")
    console.print(f"streams could gain {job['most']:.2f}x at most if no device ever waited and nothing took longer")
    console.print(f"migration: {migration}")


if __name__ == "__main__":
    main()
