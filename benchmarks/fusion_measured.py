"""Measured part of `fusion`: generation and scoring with real vLLM engines, serial, streamed and migrated.

`measure` starts the processes; this file is also their program. All modes run in one job, on the same engines, models
and prompts. They differ in the plan's `streams` alone. The table and the command are in `fusion`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from skewed import Skewed, tokenizer


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PER_ENGINE = 48  # samples of an engine
SKEWED = Skewed()
THRESHOLD = 0.2  # of the batch; the survivors move when fewer are unfinished
MODES = ("serial", "streamed", "migrated")
STAGE = ("actor.generate", "reference.forward", "reward.forward", "critic.forward")


# --- one rank -------------------------------------------------------------------------------------------------------


def _plans(processes: int) -> dict[str, Any]:
    """By mode, the same assignments with other streams."""
    from trl_realloc.plan.cluster import Cluster
    from trl_realloc.plan.presets import flatten
    from trl_realloc.plan.streams import Migration, Streams

    plan = flatten(Cluster(1, processes))
    migration = Migration(THRESHOLD, engines=max(1, processes // 2))
    return {
        "serial": plan,
        "streamed": replace(plan, streams=Streams()),
        "migrated": replace(plan, streams=Streams(migration=migration)),
    }


def _trainer(plan: Any, processes: int, folder: Path) -> Any:
    from datasets import Dataset

    from trl_realloc import PPOConfig, PPOTrainer

    episodes = PER_ENGINE * processes
    arguments = PPOConfig(
        output_dir=str(folder),
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=PER_ENGINE,
        total_episodes=episodes,
        num_ppo_epochs=1,
        response_length=SKEWED.limit,
        stop_token="eos",
        temperature=1.0,
        learning_rate=0.0,
        gradient_checkpointing=False,
        num_sample_generations=0,
        save_strategy="no",
        generation_engine="vllm",
        plan=plan,
    )
    policy, critic, reward = SKEWED.models()
    return PPOTrainer(
        args=arguments,
        processing_class=tokenizer(),
        model=policy,
        ref_model=SKEWED.models()[0],
        reward_model=reward,
        value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": SKEWED.prompts(episodes, 0)}),
    )


class Rank:
    """One rank with its engines, which runs iterations under plans that differ in their streams."""

    def __init__(self, processes: int, folder: Path) -> None:
        self.processes, self.plans = processes, _plans(processes)
        self.trainer = _trainer(self.plans["migrated"], processes, folder)  # with slots for samples that are moved
        self.trainer._start()
        self.rank: int = self.trainer.accelerator.process_index

    def run(self, mode: str, step: int, *, trains: bool = False) -> dict[str, Any]:
        """One iteration: without training unless `trains`. Returns its figures."""
        from trl_realloc.algorithms.prompt_batches import PromptBatch
        from trl_realloc.algorithms.rollout import Ragged, Rollouts
        from trl_realloc.plan.dataflow import Role

        executor, plan = self.trainer.executor, self.plans[mode]
        executor.plan = executor.placement.plan = executor.exchange.plan = plan
        rows = SKEWED.prompts(PER_ENGINE * self.processes, 1 + step)
        prompts = Rollouts(index=torch.arange(len(rows)), prompts=Ragged.of(rows, torch.long))
        executor.orders = ()
        self.trainer.accelerator.wait_for_everyone()
        start = time.perf_counter()
        rates = dict.fromkeys((Role.ACTOR, Role.CRITIC), 0.0) if trains else {}
        batch = PromptBatch(prompts, [{}] * len(rows))
        iteration = executor.run(batch, step, rates, only=None if trains else STAGE)
        wall = time.perf_counter() - start
        return {} if self.rank else self._figures(iteration, wall, trains=trains)

    def _figures(self, iteration: Any, wall: float, *, trains: bool) -> dict[str, Any]:
        from trl_realloc.planner.dispatcher import Continue, Score

        spans = [span for span in iteration.spans if trains or span.call in STAGE]
        first = min(span.start for span in spans)
        by_call = {call: [span for span in spans if span.call == call] for call in STAGE}
        orders = self.trainer.executor.orders
        return {
            "seconds": max(span.end for span in spans) - first,
            "wall_s": wall,
            "generate_s": max(span.end for span in by_call["actor.generate"]) - first,
            "engines_s": sorted(span.end - first for span in by_call["actor.generate"]),
            "scoring_core_s": sum(span.seconds for call in STAGE[1:] for span in by_call[call]),
            "forwards": sum(isinstance(order, Score) for order in orders),
            "moved": sum(len(order.samples) for order in orders if isinstance(order, Continue)),
            "responses": [row.tolist() for row in iteration.samples.ragged("responses").rows()],
            "spans": [(s.call, s.device, s.start - first, s.end - first) for s in spans],
        }


def _rank(processes: int, repeats: int, iterations: int, out: Path) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        rank = Rank(processes, Path(folder))
        for trains, count in ((False, repeats), (True, iterations)):
            for step in range(-1, count):  # the first warms up
                order = [MODES[(step + at) % len(MODES)] for at in range(len(MODES))]
                for mode in order:
                    figures = rank.run(mode, step + 1 + 1000 * trains, trains=trains)
                    if step >= 0 and not rank.rank:
                        done.append({"mode": mode, "repeat": step, "trains": trains, **figures})
        if not rank.rank:
            out.write_text(json.dumps(done))
        rank.trainer._end_together()
        rank.trainer.close()


# --- the job and its figures ----------------------------------------------------------------------------------------


def measure(processes: int, repeats: int, iterations: int, runs: Path | None = None) -> dict[str, Any]:
    """Run the job and return its figures.

    Args:
        repeats: batches of generation and scoring, each in every mode.
        iterations: the same of whole iterations.
        runs: a folder for the figures, lengths and spans of every run.

    Raises:
        SystemExit: the job failed, or two modes drew other tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "runs.json", Path(folder) / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += [__file__, "--processes", str(processes), "--repeats", str(repeats)]
        command += ["--iterations", str(iterations), "--out", str(out)]
        threads = str(max(1, (os.cpu_count() or 1) // processes))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
        with log.open("w") as written:
            code = subprocess.run(command, env=environment, stdout=written, stderr=written, check=False).returncode
        if code:
            sys.exit(f"the job of {processes} processes failed:\n{log.read_text()[-4000:]}")
        if runs is not None:
            runs.mkdir(parents=True, exist_ok=True)
            (runs / f"fusion-{processes}.json").write_text(out.read_text())
        return _summary(processes, json.loads(out.read_text()))


def _summary(processes: int, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import fusion_expected

    from trl_realloc.plan.assignment import CACHED_TOKENS

    stage = [run for run in runs if not run["trains"]]
    lost = _lost(runs)
    expected = fusion_expected.simulated(_plans(processes), stage, prompt=SKEWED.prompt, budget=CACHED_TOKENS)
    simulated_s = {mode: statistics.median(seconds) for mode, seconds in expected.items()}
    migrated = [run for run in stage if run["mode"] == "migrated"]
    return {
        "processes": processes,
        "lengths": _lengths(stage),
        "rows": [{**_row(processes, mode, stage), "simulated_s": simulated_s[mode]} for mode in MODES],
        "iterations": [_row(processes, mode, [r for r in runs if r["trains"]]) for mode in MODES],
        "migration": {
            "moved": sum(run["moved"] for run in migrated),
            "moved_per_stage": statistics.fmean(run["moved"] for run in migrated),
            "decoded_twice": None,  # spans count the tokens of responses, not what engines decoded
            "lost": lost,
        },
    }


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
        "repeats": len(of_mode),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    _rank(given.processes, given.repeats, given.iterations, given.out)
