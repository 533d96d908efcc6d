"""`make demo`: from nothing to a policy trained by PPO, GRPO or RLOO on vLLM engines, and a report of what happened.

Exits with 1 if the reward does not rise clearly, or if the policy does not end clearly more held-out stories rightly.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table
from stories import right_end

from trl_realloc.trainer.report.run_files import RunFiles
from trl_realloc.trainer.report.run_report import print_summary, report_run
from trl_realloc.trainer.report.run_tables import reward_summary


ROOT = Path(__file__).resolve().parents[2]
ASSETS = "runs/demo/assets"
RUNS = {"ppo": Path("runs/demo"), "grpo": Path("runs/demo-grpo"), "rloo": Path("runs/demo-rloo")}
SCRIPTS = {"ppo": "train.py", "grpo": "train_grpo.py", "rloo": "train_rloo.py"}
KL = {"ppo": ("objective/kl", "completion"), "grpo": ("kl", "token"), "rloo": ("kl", "token")}  # nats per what
MORE_RIGHT = 0.2  # share of the held-out stories: less than this more is no clear success


def step(title: str, *command: str) -> None:
    """Run a command where the recipe's paths hold; end with its exit code if it fails.

    The command has a process group of its own, so that Ctrl-C reaches this process alone. Python and the launcher would
    print a traceback each. The command is then killed, with the ranks that it has started.
    """
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
    process = subprocess.Popen(command, cwd=ROOT, env=environment, process_group=0)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        kill_with_children(process.pid)
        process.wait()
        raise
    if code:
        sys.exit(code)


def kill_with_children(pid: int) -> None:
    """Kill a process and the processes that it has started. What these have started is left: engines end with their
    rank, and a rank's watchdog removes its files and then ends."""
    os.kill(pid, signal.SIGSTOP)  # it starts no more
    children = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            _, parent, *_ = status.read_text().rpartition(")")[2].split()
            children += [int(status.parent.name)] if int(parent) == pid else []
    for each in (pid, *children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def share_right(rows: Sequence[dict[str, Any]]) -> float:
    """The share of completions that end their story rightly."""
    return fmean(right_end([row["query"] for row in rows], [plain(row["model response"]) for row in rows]))


def plain(response: str) -> str:
    """A response without the tokens that end and pad it."""
    return response.replace("<eos>", "").replace("<pad>", "")


def stories_table(
    name: str, before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], shown: int = 8
) -> Table:
    table = Table(
        *("story", f"before {name}", f"after {name}"),
        title="held-out stories at temperature 0.01",
        title_justify="left",
    )
    for old, new in list(zip(before, after, strict=True))[:shown]:
        table.add_row(old["query"], _marked(old), _marked(new))
    return table


def _marked(row: dict[str, Any]) -> str:
    text = plain(row["model response"])
    return f"{text.strip()} {'[green]✓[/green]' if right_end([row['query']], [text])[0] else '[red]✗[/red]'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=list(RUNS), default="ppo")
    parser.add_argument("--plan", help="a preset's name or a plan's file, in place of the recipe's plan")
    parser.add_argument("--staleness", type=int, default=0, help="max_staleness, with the plan separate")
    arguments = parser.parse_args()
    algorithm = arguments.algorithm
    name, folder = algorithm.upper(), RUNS[algorithm]
    plan, changes = arguments.plan, list[str]()
    if arguments.staleness:
        plan = plan or "separate"
        changes = ["--max_staleness", str(arguments.staleness), "--vllm_importance_sampling_correction", "true"]
    start = time.monotonic()
    os.chdir(ROOT)
    step("models and data", sys.executable, "examples/demo/prepare.py", "--out", ASSETS)
    step(
        f"{name} on 2 processes",
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/demo/accelerate.yaml"),
        *(f"examples/demo/{SCRIPTS[algorithm]}", "--config", f"recipes/demo/{algorithm}.yaml"),
        *(("--plan", plan) if plan else ()),
        *changes,
    )
    console = Console()
    console.rule("what happened")
    run = RunFiles.load(folder)
    print_summary(run)
    summary = reward_summary(run.rows)
    before, after = run.completions["before"], run.completions["after"]
    console.print(stories_table(name, before, after))
    metric, of = KL[algorithm]
    was, is_now = share_right(before), share_right(after)
    console.print(
        f"right ends of {len(after)} held-out stories: {was:.0%} before {name}, {is_now:.0%} after; "
        f"KL to the policy before {name}: {run.rows[-1][metric]:.2f} nats per {of}"
    )
    report = report_run(run)
    print(f"\nin {folder}/: report.md (with reward.png and timeline.png), plan.yaml, metrics.jsonl, completions.json,")
    print("timeline.json, trace.json for ui.perfetto.dev, and the")
    print(f"trained policy: AutoModelForCausalLM.from_pretrained({str(folder)!r})")
    print(f"read {report}; {time.monotonic() - start:.0f} s in all")
    if not summary.rose_clearly:
        print(f"the reward did not rise clearly: {summary.first:.3f} -> {summary.last:.3f}", file=sys.stderr)
        return 1
    if is_now < was + MORE_RIGHT:
        print(f"the policy ends too few more stories rightly: {was:.0%} -> {is_now:.0%}", file=sys.stderr)
        return 1
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run_to_the_end(demo: Callable[[], int] | None = None) -> int:
    """The exit code of a demo, by default of `main`; 130 after an interrupt."""
    for ending in (signal.SIGTERM, signal.SIGHUP):  # neither reaches the command's process group by itself
        signal.signal(ending, _interrupt)
    try:
        return (demo or main)()
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run_to_the_end())
