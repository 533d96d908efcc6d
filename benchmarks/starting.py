"""How long a run with `plan: auto` takes to its first update, against `plan: flatten`, on this machine's processors.

    python benchmarks/starting.py [--json FILE] [--processes N] [--updates N] [--pair "big critic"] [--engine vllm]

A row for each way to start: `flatten`; `auto` on a machine that was not measured (an empty cache); the same again, with
what the run before has learned in the cache; `auto` that measures before the first update
(`TRL_REALLOC_MEASURE=first`); and `auto` with these measurements in the cache. Seconds are counted from the trainer's
construction: to the begin of the first update, to its end, and to the end of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from planner import LAUNCH, LIMIT_S, PAIRS, make_trainer
from rich.console import Console
from rich.table import Table


# (row, plan, when to measure, which cache)
STARTS = (
    ("flatten", "flatten", "between", "none"),
    ("auto, nothing known", "auto", "between", "learned"),
    ("auto, after an unmeasured run", "auto", "between", "learned"),
    ("auto, measuring first", "auto", "first", "measured"),
    ("auto, measured before", "auto", "between", "measured"),
)


def child(pair: str, plan: str, folder: Path, updates: int, engine: str | None) -> None:
    """One run: its times, in `folder`."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Notes when updates begin and end."""

        def __init__(self) -> None:
            self.begins: list[float] = []
            self.ends: list[float] = []

        def on_step_begin(self, *given: Any, **named: Any) -> None:
            self.begins.append(time.time() - start)

        def on_step_end(self, *given: Any, **named: Any) -> None:
            self.ends.append(time.time() - start)

    clock, start = Clock(), time.time()
    trainer = make_trainer(pair, plan, folder, updates, engine, [clock])
    trainer.train()
    if trainer.accelerator.is_main_process:
        times = {"begins_s": clock.begins[0], "first_s": clock.ends[0], "whole_s": time.time() - start}
        text = json.dumps({**times, "plan": trainer.plan.name})
        (folder / "times.json").write_text(text, encoding="utf-8")
    trainer.close()


def measure(row: tuple[str, str, str, str], given: argparse.Namespace, caches: Path) -> dict[str, Any]:
    name, plan, measures, cache = row
    with tempfile.TemporaryDirectory() as folder:
        launch = [*LAUNCH, "--num_processes", str(given.processes)]
        engine = ["--engine", given.engine] if given.engine else []
        command = [*launch, __file__, "--child", plan, folder, "--pair", given.pair, "--updates", str(given.updates)]
        environment = {**os.environ, "TRL_REALLOC_CACHE": str(caches / cache), "OMP_NUM_THREADS": "1"}
        environment["TRL_REALLOC_MEASURE"] = measures
        done = subprocess.run(
            [*command, *engine], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        times = json.loads(Path(folder, "times.json").read_text(encoding="utf-8"))
    return {"start": name, "processes": given.processes, "updates": given.updates, **times}


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("start", "plan", "first update begins", "ends", "run ends")
    for row in rows:
        seconds = [f"{row[key]:.1f} s" for key in ("begins_s", "first_s", "whole_s")]
        shown.add_row(row["start"], row["plan"], *seconds)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pair", choices=PAIRS, default="equal")
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--engine", choices=["vllm", "transformers"])
    parser.add_argument("--child", nargs=2, metavar=("PLAN", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.pair, given.child[0], Path(given.child[1]), given.updates, given.engine)
        return
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as caches:
        for row in STARTS:
            rows.append(measure(row, given, Path(caches)))
            if given.json:
                given.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    Console().print(table(rows))


if __name__ == "__main__":
    main()
