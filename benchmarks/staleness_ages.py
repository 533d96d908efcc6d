"""Ages of tokens in real runs, beside those that the planner expects of the same runs.

A job measures its machine and models as `trl-realloc profile` does, and then trains under the plan `separate` with one
staleness after another, beginning with none. Its updates without a staleness correct the profile, as they do in a run.
The planner then simulates the plan with each staleness, at the lengths of the responses that were trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import staleness_measured
from staleness_counts import busy, mean_age, oldest


BOUNDS = (0, 1, 2, 4)
TIMED = 12  # updates that are compared
# Most tokens of a response, and whether the engines are slow in a second round of phases. Which of generation and
# training waits for the other decides how old the tokens are.
WORKLOADS = {"short": (320, True), "long tail": (1280, False)}


def ages(runs: Path, processes: int) -> list[dict[str, Any]]:
    """For each workload and staleness, ages of tokens and seconds of an update: measured, and as the planner simulates
    them."""
    rows = []
    for name, (limit, also_slow) in WORKLOADS.items():
        slow_ranks = [None, processes - 1] if also_slow else [None]
        phases = [
            {"versions": k, "updates": fill(k) + TIMED, "ends": False, "fill": fill(k), "slow_rank": rank}
            for rank in slow_ranks
            for k in BOUNDS
        ]
        folder = runs / f"ages-{processes}-{limit}"
        options = {
            "processes": processes,
            "phases": phases,
            "of_phases": {"skewed": {"limit": limit}, "measures": True},
        }
        done = staleness_measured.run(folder, options)
        assert done is not None
        for phase, result in zip(phases, done, strict=True):
            workload = name if phase["slow_rank"] is None else f"{name}, a slow engine"
            rows.append({"processes": processes, "workload": workload, **_row(int(phase["versions"] or 0), result)})
    return rows


def fill(versions: int) -> int:
    """Updates at the begin of a phase that are left out, because their batches were all begun at once."""
    return 2 * versions + 2


def _row(versions: int, result: Mapping[str, Any]) -> dict[str, Any]:
    before, timed = result["updates"][fill(versions) - 1], result["updates"][fill(versions) :]
    expected = result["expected"]
    return {
        "k": versions,
        "mean_age": mean_age(timed),
        "expected_mean_age": expected["mean_age"],
        "oldest": max(map(oldest, timed)),
        "expected_oldest": expected["oldest"],
        "update_s": (timed[-1]["ended"] - before["ended"]) / len(timed),
        "expected_update_s": expected["seconds"],
        "updates": len(timed),
        "mean_ages": [update["mean_age"] for update in timed],
        "calls": {
            name: {"seconds": busy(timed, name), "expected_seconds": seconds}
            for name, seconds in expected["calls"].items()
        },
    }
