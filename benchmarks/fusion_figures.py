"""Figures of the runs of `fusion_measured`: gains, lengths, what moved, and the simulated seconds beside the measured
ones. The runs themselves are there.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import fusion_expected
from skewed import Skewed

from trl_realloc.plan.assignment import CACHED_TOKENS
from trl_realloc.plan.execution_plan import ExecutionPlan


MODES = ("serial", "streamed", "migrated")
STAGE = ("actor.generate", "reference.forward", "reward.forward", "critic.forward")


def summary(
    plans: Mapping[str, ExecutionPlan],
    skewed: Skewed,
    threshold: float,
    slowdowns: Sequence[tuple[int, float]],
    move_s: float,
    runs: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The figures of a job.

    Args:
        plans: by mode.
        skewed, threshold: as of `fusion_measured.measure`.
        slowdowns: as of `fusion_expected.simulated`.
        move_s: seconds of a move.
        runs: the figures of each run.
    """
    processes = plans["serial"].cluster.size
    stage, whole = [run for run in runs if not run["trains"]], [run for run in runs if run["trains"]]
    lost = _lost(runs)
    expected = fusion_expected.simulated(plans, stage, prompt=skewed.prompt, budget=CACHED_TOKENS, slowdowns=slowdowns)
    simulated_s = {mode: statistics.median(seconds) for mode, seconds in expected.items()}
    migrated = [run for run in stage if run["mode"] == "migrated"]
    return {
        "processes": processes,
        "sizes": {**asdict(skewed), "threshold": threshold},
        "lengths": _lengths(stage),
        "slowdowns": slowdowns,
        "most": statistics.median(_most(run, processes) for run in stage if run["mode"] == "serial"),
        "rows": [{**_row(processes, mode, stage), "simulated_s": simulated_s[mode]} for mode in MODES],
        "iterations": [_row(processes, mode, whole) for mode in MODES if whole],
        "migration": {
            "moved": sum(run["moved"] for run in migrated),
            "moved_per_stage": statistics.fmean(run["moved"] for run in migrated),
            # by vLLM's own count of what its engines gave out, against the tokens of the responses
            "decoded_twice": sum(run["decoded"] - sum(map(len, run["responses"])) for run in migrated),
            "lost": lost,
            "seconds_a_move": move_s,
        },
    }


def _most(serial: Mapping[str, Any], processes: int) -> float:
    """The most that streams could gain on the batch of a serial run: the gain if the same work took as long, no device
    ever waited, and the longest generation were not exceeded."""
    generating = [end - start for call, _, start, end in serial["spans"] if call == STAGE[0]]
    balanced = (sum(generating) + serial["scoring_core_s"]) / processes
    return float(serial["seconds"] / max(*generating, balanced))


def _lost(runs: Sequence[Mapping[str, Any]]) -> int:
    """Tokens that are missing from all runs against the serial run of the same batch. Exits if a response differs in
    any other way."""
    lost = 0
    serial = {(r["trains"], r["repeat"]): r["responses"] for r in runs if r["mode"] == "serial"}
    for run in runs:
        for expected, response in zip(serial[run["trains"], run["repeat"]], run["responses"], strict=True):
            lost += max(0, len(expected) - len(response))
            if response != expected[: len(response)]:
                sys.exit(f"{run['mode']} drew other tokens than serial in repeat {run['repeat']}")
    return lost


def _lengths(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    drawn = sorted(len(row) for run in runs if run["mode"] == "serial" for row in run["responses"])
    at = {name: drawn[min(len(drawn) - 1, int(q * len(drawn)))] for name, q in (("p90", 0.9), ("p99_9", 0.999))}
    median = statistics.median(drawn)
    return {"samples": len(drawn), "median": median, **at, "max": drawn[-1], "p99_9_over_median": at["p99_9"] / median}


def _row(processes: int, mode: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    of_mode = sorted((run for run in runs if run["mode"] == mode), key=lambda run: run["repeat"])
    serial = sorted((run for run in runs if run["mode"] == "serial"), key=lambda run: run["repeat"])
    if not of_mode:
        return {"processes": processes, "mode": mode}
    seconds = [run["seconds"] for run in of_mode]
    ratios = [base["seconds"] / run["seconds"] for base, run in zip(serial, of_mode, strict=True)]

    def median(name: str) -> float:
        return statistics.median(run[name] for run in of_mode)

    return {
        "processes": processes,
        "mode": mode,
        "seconds": statistics.median(seconds),
        "spread": [min(seconds), max(seconds)],
        "simulated_s": None,
        "gain": statistics.median(ratios),
        "gains": ratios,
        "wall_s": median("wall_s"),
        "generate_s": median("generate_s"),
        "scoring_core_s": median("scoring_core_s"),
        "forwards": median("forwards"),
        "others_core_s": [run["others_core_s"] for run in of_mode],
        "repeats": len(of_mode),
    }
