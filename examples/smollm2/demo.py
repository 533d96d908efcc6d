"""`make demo MODEL=smollm2`: a pretrained model learns sums by GRPO on one process, and a report of what happened.

Exits with 1 if the policy does not answer clearly more held-out rows rightly than before.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console


ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples" / "demo"))

from run import run_to_the_end, step  # noqa: E402

from trl_realloc.trainer.report.run_files import RunFiles  # noqa: E402
from trl_realloc.trainer.report.run_report import print_summary, report_run  # noqa: E402


RECIPE, FOLDER = "recipes/smollm2/grpo.yaml", Path("runs/smollm2/grpo")
CLEAR = 2.0  # standard errors of the gain: less is no clear success


def main() -> int:
    start = time.monotonic()
    os.chdir(ROOT)
    step("model", sys.executable, "examples/smollm2/prepare.py", "--start", "runs/smollm2/start")
    step("GRPO on one process", sys.executable, "examples/smollm2/train_grpo.py", "--config", RECIPE)
    console = Console()
    console.rule("what happened")
    run = RunFiles.load(FOLDER)
    print_summary(run)
    before, after = ([row["score"] for row in run.completions[when]] for when in ("before", "after"))
    gains = [new - old for old, new in zip(before, after, strict=True)]
    gain, error = fmean(gains), stdev(gains) / math.sqrt(len(gains))
    console.print(
        f"right answers to {len(after)} held-out questions: {fmean(before):.0%} before GRPO, {fmean(after):.0%} after "
        f"({100 * gain:+.0f} ± {100 * error:.0f} points)"
    )
    print(f"read {report_run(run)}; {time.monotonic() - start:.0f} s in all")
    if gain < CLEAR * error:
        print(f"the policy does not clearly answer more questions rightly: {100 * gain:+.0f} points", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_to_the_end(main))
