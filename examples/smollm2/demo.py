"""`make demo MODEL=smollm2`: a pretrained model learns sums by GRPO on one process, and a report of what happened.

Exits with 1 if the policy does not answer clearly more held-out rows rightly than before.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import fmean

from rich.console import Console


ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples" / "demo"))

from run import run_to_the_end, step  # noqa: E402

from trl_realloc.trainer.logged_updates import load_metrics  # noqa: E402
from trl_realloc.trainer.report import print_summary, report_run  # noqa: E402


RECIPE, FOLDER = "recipes/smollm2/grpo.yaml", Path("runs/smollm2/grpo")
MORE_RIGHT = 0.1  # share of the held-out rows: less than this more is no clear success


def main() -> int:
    start = time.monotonic()
    os.chdir(ROOT)
    step("model", sys.executable, "examples/smollm2/prepare.py", "--start", "runs/smollm2/start")
    step("GRPO on one process", sys.executable, "examples/smollm2/train_grpo.py", "--config", RECIPE)
    console = Console()
    console.rule("what happened")
    print_summary(load_metrics(FOLDER / "metrics.jsonl"))
    completions = json.loads((FOLDER / "completions.json").read_text(encoding="utf-8"))
    was, is_now = (fmean(row["score"] for row in completions[when]) for when in ("before", "after"))
    count = len(completions["after"])
    console.print(f"right answers to {count} held-out questions: {was:.0%} before GRPO, {is_now:.0%} after")
    print(f"read {report_run(FOLDER)}; {time.monotonic() - start:.0f} s in all")
    if is_now < was + MORE_RIGHT:
        print(f"the policy answers too few more questions rightly: {was:.0%} -> {is_now:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_to_the_end(main))
