"""Figures of the real runs of `staleness_measured`: updates per second, ages, samples that were lost, and tokens that
were drawn again after a job was killed."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import staleness_measured
import torch


FILL = 4  # updates at the begin of a phase in which less is in flight than later; not timed
TIMED = 8
STALENESS = (0, 1, 2)
BOUNDS = (1, 2, 4)
OVERLAPS: dict[str, dict[str, Any]] = {  # arguments of `Phases.run`
    "whole batches": {"versions": 0},
    "streams": {"versions": 0, "streams": True},
    "k = 1, whole batches": {"versions": 1},
}
SAVED, UPDATES, CONFIRMED = 5, 12, (0, 2)
KILLED_AFTER_S = 2.0  # since the checkpoint was complete


# --- updates per second -----------------------------------------------------------------------------------------------


def throughput(runs: Path, processes: int, rounds: int) -> list[dict[str, Any]]:
    """Updates per second of each staleness. The phases of a round follow each other in one job, in another order in
    each round."""
    order = [[STALENESS[(at + shift) % len(STALENESS)] for at in range(len(STALENESS))] for shift in range(rounds)]
    phases = [{"versions": k, "updates": FILL + TIMED, "ends": False} for of_round in order for k in of_round]
    done = staleness_measured.run(runs / f"throughput-{processes}", {"processes": processes, "phases": phases})
    assert done is not None
    seconds: dict[int, list[float]] = {k: [] for k in STALENESS}
    updates: dict[int, list[dict[str, Any]]] = {k: [] for k in STALENESS}
    for phase, result in zip(phases, done, strict=True):
        k = int(phase["versions"])
        seconds[k].append(_seconds_of_update(result))
        updates[k] += result["updates"][FILL:]
    return [
        {
            "processes": processes,
            "k": k,
            "updates_per_s": 1 / statistics.median(seconds[k]),
            "gain": statistics.median(base / own for base, own in zip(seconds[0], seconds[k], strict=True)),
            "mean_age": mean_age(updates[k]),
            "oldest": max(oldest(update) for update in updates[k]),
            "generate_s": busy(updates[k], "actor.generate"),
            "train_s": busy(updates[k], "actor.train") + busy(updates[k], "critic.train"),
            "rounds": rounds,
            "seconds": seconds[k],
        }
        for k in STALENESS
    ]


def overlap(runs: Path, processes: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of an update by what of it overlaps (`OVERLAPS`). The phases of a round follow each other in one job, in
    another order in each round; those without a staleness draw the same responses."""
    names = list(OVERLAPS)
    order = [name for shift in range(rounds) for name in names[shift:] + names[:shift]]
    phases = [{**OVERLAPS[name], "updates": FILL + TIMED, "ends": False} for name in order]
    options = {"processes": processes, "phases": phases, "of_phases": {"skewed": {"scorer_hidden": 256}, "epochs": 2}}
    done = staleness_measured.run(runs / f"overlap-{processes}", options)
    assert done is not None
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name, result in zip(order, done, strict=True):
        seconds[name].append(_seconds_of_update(result))
    return [
        {
            "processes": processes,
            "overlap": name,
            "seconds_of_update": statistics.median(seconds[name]),
            "gain": statistics.median(
                base / own for base, own in zip(seconds["whole batches"], seconds[name], strict=True)
            ),
            "rounds": rounds,
            "seconds": seconds[name],
        }
        for name in names
    ]


def _seconds_of_update(phase: Mapping[str, Any]) -> float:
    """Of the timed updates of a phase, the mean."""
    ended = [update["ended"] for update in phase["updates"][FILL - 1 :]]
    return (ended[-1] - ended[0]) / (len(ended) - 1)


def busy(updates: Sequence[Mapping[str, Any]], call: str) -> float:
    """Seconds of a call in an update, of the slowest device; the median over updates."""
    slowest = []
    for update in updates:
        by_device: dict[int, float] = {}
        for name, device, start, end in update["spans"]:
            if name == call:
                by_device[device] = by_device.get(device, 0.0) + end - start
        slowest.append(max(by_device.values(), default=0.0))
    return statistics.median(slowest)


def mean_age(updates: Sequence[Mapping[str, Any]]) -> float:
    """Of tokens."""
    return sum(u["mean_age"] * u["tokens"] for u in updates) / sum(u["tokens"] for u in updates)


def oldest(update: Mapping[str, Any]) -> int:
    return max(map(int, update["ages"]))


# --- stragglers -------------------------------------------------------------------------------------------------------


def stragglers(runs: Path, processes: int, updates: int = 10) -> list[dict[str, Any]]:
    """Whole runs whose longest samples are 20 times as long as the median, for each bound; with several engines also
    with a slow one."""
    slow_ranks = [None, processes - 1] if processes > 2 else [None]
    phases: list[dict[str, Any]] = [{"versions": 0, "updates": updates, "ends": True}]
    phases += [
        {"versions": k, "updates": updates, "ends": True, "slow_rank": rank} for rank in slow_ranks for k in BOUNDS
    ]
    done = staleness_measured.run(runs / f"stragglers-{processes}", {"processes": processes, "phases": phases})
    assert done is not None
    synchronous = _lengths(done[0])
    return [
        {"processes": processes, **_bound(phase, result, synchronous)}
        for phase, result in zip(phases[1:], done[1:], strict=True)
    ]


def _bound(phase: Mapping[str, Any], result: Mapping[str, Any], synchronous: Sequence[int]) -> dict[str, Any]:
    from scipy.stats import ks_2samp

    k, trained = int(phase["versions"]), _lengths(result)
    drawn = [sample["tokens"] for sample in result["drawn"]]
    shown = sorted((sample["step"], sample["index"]) for sample in result["drawn"])
    used = [(update["step"], index) for update in result["updates"] for index in range(len(update["lengths"]))]
    too_old = sum(count for update in result["updates"] for age, count in update["ages"].items() if int(age) > k)
    return {
        "k": k,
        "slow_engine": phase.get("slow_rank") is not None,
        "samples": len(trained),
        "longest_over_median": max(trained) / statistics.median(trained),
        "oldest": max(map(oldest, result["updates"])),
        "mean_age": mean_age(result["updates"]),
        "tokens_too_old": too_old,
        "discarded": len(drawn) - len(trained),
        "drawn_twice": len(shown) - len(set(shown)),
        "not_trained": len(set(shown) - set(used)),
        "ks_drawn": float(ks_2samp(drawn, trained).statistic),
        "ks_synchronous": float(ks_2samp(synchronous, trained).statistic),
    }


def _lengths(result: Mapping[str, Any]) -> list[int]:
    return [length for update in result["updates"] for length in update["lengths"]]


# --- a job that is killed ---------------------------------------------------------------------------------------------


def resume(runs: Path) -> list[dict[str, Any]]:
    """Kill a training after a checkpoint and resume it, for each bound: tokens that the engine had drawn when it was
    saved, how many of them are not in the checkpoint and so drawn again, and whether each sample is trained once."""
    rows = []
    for k in BOUNDS:
        folder = runs / f"resume-{k}"
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint = folder / "run" / f"checkpoint-{SAVED}"
        config = {"max_steps": UPDATES, "max_staleness": k, "save_strategy": "steps", "save_steps": SAVED}
        job = {"processes": 2, "config": config}
        killed = staleness_measured.run(folder, job, _long_after(checkpoint))
        assert killed is None, "it was saved before its end"
        saved = torch.load(checkpoint / "samples_under_way.pt", weights_only=True)["samples"]
        drawn = _drawn_when_saved(folder)
        job["resume"] = str(checkpoint)
        done = staleness_measured.run(folder, job)
        assert done is not None
        rows.append({"k": k, **_redrawn(saved, drawn, done[0])})
    return rows


def _long_after(checkpoint: Path) -> Callable[[], bool]:
    since: list[float] = []

    def is_due() -> bool:
        if not since and checkpoint.is_dir():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() > since[0] + KILLED_AFTER_S

    return is_due


def _drawn_when_saved(folder: Path) -> dict[tuple[int, int], int]:
    """By (step, sample): the tokens that had been drawn, by the engines' own count."""
    drawn: dict[tuple[int, int], int] = {}
    for file in folder.glob(f"saved-*-{SAVED}.json"):
        note, rank = json.loads(file.read_text()), file.name.split("-")[1]
        lines = (folder / f"ended-{rank}.jsonl").read_text().splitlines()
        tokens = {(line["step"], line["index"]): line["tokens"] for line in map(json.loads, lines)}
        drawn |= {(step, index): count for (step, index), count in note["unfinished"]}
        drawn |= {(step, index): tokens[step, index] for step, index in note["ended"]}
    return drawn


def _redrawn(
    saved: Mapping[int, Mapping[str, torch.Tensor]], drawn: Mapping[tuple[int, int], int], result: Mapping[str, Any]
) -> dict[str, Any]:
    kept = {
        (step, index): length
        for step, columns in saved.items()
        for index, length in zip(columns["index"].tolist(), columns["lengths"].tolist(), strict=True)
    }
    redrawn = sum(max(0, count - kept.get(sample, 0)) for sample, count in drawn.items())
    trained = [(update["step"], index) for update in result["updates"] for index in range(len(update["lengths"]))]
    return {
        "samples_drawn": len(drawn),
        "unfinished": sum(int((columns["stopped"] < 0).sum()) for columns in saved.values()),
        "tokens_drawn": sum(drawn.values()),
        "tokens_saved": sum(kept.values()),
        "redrawn": redrawn,
        "redrawn_share": redrawn / sum(drawn.values()),
        "first_update": min(trained)[0],
        "trained": len(trained),
        "trained_twice": len(trained) - len(set(trained)),
        "decoded_after": sum(sample["tokens"] - sample["begun"] for sample in result["drawn"]),
        "trained_tokens": sum(update["tokens"] for update in result["updates"]),
    }


# --- the demo's task with vLLM engines --------------------------------------------------------------------------------


def confirm(runs: Path, updates: int) -> list[dict[str, Any]]:
    """Train the task of `staleness_learning` on two processes, synchronously and with a staleness."""
    import staleness_learning

    staleness_learning.models(runs / "task")
    rows = []
    for k in CONFIRMED:
        config = {
            "seed": 1,
            "max_steps": updates,
            "max_staleness": k,
            "per_device_train_batch_size": staleness_learning.BATCH // 2,
            "generation_engine": "vllm",
            "plan": "separate",
            "vllm_importance_sampling_correction": k > 0,
        }
        job = {"processes": 2, "config": config, "assets": str(runs / "task")}
        done = staleness_measured.run(runs / f"confirm-{k}", job)
        assert done is not None
        rows.append({"k": k, **_learned(done[0])})
    return rows


def _learned(result: Mapping[str, Any]) -> dict[str, Any]:
    import staleness_learning

    updates = result["updates"]
    seconds = updates[-1]["ended"] - updates[0]["ended"]
    return {
        "updates": len(updates),
        "updates_per_s": (len(updates) - 1) / seconds,
        "mean_age": mean_age(updates),
        "oldest": max(map(oldest, updates)),
        **staleness_learning.summary([update["metrics"] for update in updates]),
        "held_out_score": result["evaluation"]["eval_objective/scores"],
        "scores": [update["metrics"]["objective/scores"] for update in updates],
    }
