"""Contract 1 on random plans: `python tests/multiprocess/random_plans.py --count 300 --seed 0`.

Every case (`drawn`) feeds two batches of recorded rollouts through its plan and through one process (`drawn_rank`), in
float64, and compares the statistics and the parameters after two updates. Plans with streams or with a vLLM engine run
their generation too, in engines that replay the rollouts at random speeds (`replaying`). A failure is printed with its
seed and its plan; `--seed N --count 1` repeats it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "trainer")]

from drawn import case_of  # noqa: E402
from safetensors.torch import load_file  # noqa: E402


LIMIT = 1e-6  # of `differences`; rounding has made up to 1e-8, in most plans 1e-12
PER_LAUNCH = 20  # every plan makes process groups of its own, which last as long as their process


def differences(split: Path, whole: Path, seed: int) -> dict[str, float]:
    """How far every statistic and parameter is from what it is on one process: a statistic relative to its size where
    that is above 1, a parameter relative to the largest movement of its role's; infinite for what only one of them has.
    """
    found: dict[str, float] = {}
    rows = zip(*(json.loads((folder / f"{seed}.json").read_text()) for folder in (split, whole)), strict=True)
    for at, (ours, expected) in enumerate(rows):
        for name in ours.keys() | expected.keys():
            here, value = (row.get(name, math.inf) for row in (ours, expected))
            gap = 0.0 if math.isnan(here) and math.isnan(value) else abs(here - value) / max(1, abs(value))
            found[f"{name} of update {at}"] = math.inf if math.isnan(gap) else gap
    for role in ("policy", "critic"):
        ours, expected = load_file(split / f"{seed}.{role}"), load_file(whole / f"{seed}.{role}")
        before = load_file(whole / f"{seed}.{role}.before")
        moved = max(float((expected[name] - before[name]).abs().max()) for name in expected)
        for name in ours.keys() | expected.keys():
            both = name in ours and name in expected
            gap = float((ours[name] - expected[name]).abs().max()) / moved if both else math.inf
            found[f"the {role}'s {name}"] = math.inf if math.isnan(gap) else gap
    return found


def too_far(found: Mapping[str, float]) -> list[str]:
    """What is not as on one process, and by how much; the worst first."""
    worst = sorted((name for name, gap in found.items() if gap > LIMIT), key=lambda name: -found[name])
    return [f"{found[name]:.2g}: {name}" for name in worst[:8]]


def check(seeds: Sequence[int], limit_s: float, launch: Any, flow: Counter[str]) -> dict[int, dict[str, float]]:
    """The cases' `differences`, by seed; of one that did not come to its end infinity, under its account of why.

    Args:
        limit_s: for one case, the start of its job included.
        launch: (script, processes, options, name) -> a started job, as `launched_job.Job`.
        flow: what streamed is added to it: `forwards`, samples `moved`, generations begun `early` (one on each rank).
    """
    found: dict[int, dict[str, float]] = {}

    def through(seeds: Sequence[int], processes: int, whole: bool) -> None:
        left = list(seeds)
        while left:
            part = left[:PER_LAUNCH]
            name = f"{'whole' if whole else 'split'}-{processes}-{part[0]}"
            job = launch("drawn_rank.py", processes, {"seeds": part, "whole": whole}, name)
            finished, end = -1, time.monotonic()
            while job.process.poll() is None and time.monotonic() < end + limit_s:
                if (count := len(list(job.folder.glob("*.json")))) > finished:
                    finished, end = count, time.monotonic()
                time.sleep(0.2)
            code = job.process.poll()
            job.kill()
            done = [seed for seed in part if (job.folder / f"{seed}.json").exists()]
            for seed in done:
                places.setdefault(seed, {})[whole] = job.folder
            if len(done) < len(part):  # the first that is not done ended the launch, or hung
                how = f"was not done after {limit_s:.0f} s" if code is None else f"ended with exit status {code}"
                found[part[len(done)]] = {f"{name} {how}: {_cause(job.text())}": math.inf}
            left = [seed for seed in left if seed not in done and seed not in found]

    places: dict[int, dict[bool, Path]] = {}
    through(seeds, 1, True)
    for processes in sorted({case_of(seed)["devices"] for seed in seeds}):
        through([s for s in seeds if case_of(s)["devices"] == processes and s not in found], processes, False)
    for seed, folders in places.items():
        if len(folders) == 2:
            for path in folders[False].glob(f"{seed}.flow-*"):
                flow.update(json.loads(path.read_text()))
            found[seed] = differences(folders[False], folders[True], seed)
    return found


def _cause(log: str) -> str:
    """The end of what the ranks wrote, less the launcher's account of which rank ended first."""
    return log.partition("torch/distributed/elastic/multiprocessing/api.py")[0][-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description="Random legal plans against one process.")
    parser.add_argument("--count", type=int, default=100, help="how many plans")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next ones follow")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a plan, the start of its job included")
    arguments = parser.parse_args()
    from launched_job import Job

    folder = Path(tempfile.mkdtemp(prefix="random_plans_"))

    def launch(script: str, processes: int, options: dict[str, Any], name: str) -> Any:
        (folder / name).mkdir()
        return Job(folder / name, script, processes, options, None)

    found: dict[int, dict[str, float]] = {}
    flow = Counter[str]()
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    for start in range(0, len(seeds), PER_LAUNCH):
        part = seeds[start : start + PER_LAUNCH]
        here = check(part, arguments.limit, launch, flow)
        for seed in here:
            if failed := too_far(here[seed]):
                print(f"\nseed {seed}: {json.dumps(case_of(seed))}", *failed, sep="\n  ", flush=True)
        found |= here
        failures = sorted(seed for seed in found if too_far(found[seed]))
        largest = max((max(found[seed].values()) for seed in found if seed not in failures), default=0.0)
        print(
            f"{start + len(part)} plans, {len(failures)} failed {failures}; others by {largest:.2g}; {dict(flow)}",
            flush=True,
        )
    shutil.rmtree(folder, ignore_errors=True)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
