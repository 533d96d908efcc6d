"""`make demo`: from nothing to a policy trained by PPO on vLLM engines, and a report of what happened.

Exits with 1 if the reward does not rise clearly.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from trl_realloc.report import load_metrics, print_summary, report_run


ROOT = Path(__file__).resolve().parents[2]
RUN = Path("runs/demo")


def step(title: str, *command: str) -> None:
    """Run a command where the recipe's paths hold; end with its exit code if it fails."""
    Console().rule(title)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"),
    }
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if code:
        sys.exit(code)


def main() -> int:
    start = time.monotonic()
    os.chdir(ROOT)
    step("models and data", sys.executable, "examples/demo/prepare.py", "--out", str(RUN / "assets"))
    step(
        "PPO on 2 processes",
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/demo/accelerate.yaml"),
        *("examples/demo/train.py", "--config", "recipes/demo/ppo.yaml"),
    )
    Console().rule("what happened")
    rows = load_metrics(RUN / "metrics.jsonl")
    summary = print_summary(rows)
    report = report_run(RUN)
    print(f"\nin {RUN}/: report.md (with reward.png and timeline.png), plan.yaml, metrics.jsonl, completions.json,")
    print("timeline.json, trace.json for ui.perfetto.dev, and the")
    print(f"trained policy: AutoModelForCausalLM.from_pretrained({str(RUN)!r})")
    print(f"read {report}; {time.monotonic() - start:.0f} s in all")
    if not summary.rose_clearly:
        print(f"the reward did not rise clearly: {summary.first:.3f} -> {summary.last:.3f}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
