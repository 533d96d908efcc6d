"""`vs_trl.py --algorithm grpo`: TRL's GRPOTrainer and this project's, alternating, on the same models, prompts and
distribution of lengths, in groups of 8.

    python benchmarks/vs_trl.py --algorithm grpo --json benchmarks/results/vs_trl_grpo.json

Every run is a process (or two) of its own; the first optimizer step of each is warm-up. The policy ends a response at
each token with the same probability, 4 / limit. In 2 of 5 groups all rewards are equal. The arms:

trl      TRL, which generates by Transformers (its vLLM does not run on a CPU)
flatten  this project under the plan flatten
auto     this project under the plan that its planner chooses

`--prompt` sets the tokens of a prompt. `training` is a run without generation, on drawn rollouts that are the same in
every arm: forward, backward, step.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import result_file
import torch
from rich.console import Console
from rich.table import Table
from trl_runs import (
    EOS,
    ROOT,
    VOCABULARY,
    RunFailed,
    about_the_run,
    call_seconds,
    gemm_flops,
    models,
    run_worker,
    step_clock,
    tokenizer,
)


EPISODES, GROUP = 64, 8  # responses of an optimizer step, and of a prompt
MICRO_BATCH = 16  # responses of a device, TRL's per_device_train_batch_size
MEASURED = {64: 2, 128: 6, 512: 4, 1024: 2}  # optimizer steps, after one of warm-up
ARMS = ("trl", "flatten", "auto")
TRAINING_ARMS = ("trl", "flatten")  # of runs without generation
LABELS = {
    "trl": "TRL",
    "flatten": "ours, flatten",
    "auto": "ours, auto",
}


# --- one run, in a process of its own ---


def reward(prompts: list[str], completion_ids: list[list[int]], **columns: object) -> list[float]:
    """The same for all responses to 2 of 5 prompts, and different for those to the others."""
    return [
        0.0 if int(prompt.split()[0][1:]) % 5 < 2 else float(sum(ids) % 7)
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def drawn_response(draw: random.Random, limit: int) -> list[int]:
    """A response of the policy's length distribution."""
    ids = []
    while len(ids) < limit:
        if draw.random() < 4 / limit:
            return [*ids, EOS]
        ids.append(draw.randrange(2, VOCABULARY))
    return ids


class Watch:
    """Times the generation of a trainer, or replaces it by drawn responses, and marks the ends of optimizer steps.

    Args:
        trainer: its `_generate_single_turn` is replaced.
    """

    def __init__(self, trainer: Any, limit: int, seed: int, *, generates: bool) -> None:
        self.ends: list[float] = []
        self.generation: list[float] = []  # seconds of each
        original, draw = trainer._generate_single_turn, random.Random(seed * 1000 + trainer.accelerator.process_index)

        def generate(prompt_ids: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            if generates:
                made = original(prompt_ids, *args, **kwargs)
            else:
                made = [drawn_response(draw, limit) for _ in prompt_ids], None
            self.generation.append(time.perf_counter() - start)
            return made

        trainer._generate_single_turn = generate
        trainer.add_callback(step_clock(self.ends))


def worker(arm: str, processes: int, limit: int, seed: int, out: Path, *, prompt: int, generates: bool) -> None:
    from datasets import Dataset

    sys.path.insert(0, str(ROOT))
    if arm in ("flatten", "auto"):
        from trl_realloc import GRPOConfig, GRPOTrainer

        ours = {"plan": arm, "use_vllm": generates}
    else:
        from accelerate import PartialState
        from trl import GRPOConfig, GRPOTrainer  # type: ignore[assignment]

        ours = {}
        if processes > 1:
            PartialState(backend="gloo", cpu=True)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    steps = 1 + MEASURED[limit]
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=EPISODES // processes // MICRO_BATCH,
        max_steps=steps,
        num_generations=GROUP,
        max_completion_length=limit,
        temperature=1.0,
        learning_rate=1e-7,
        logging_steps=1,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        save_strategy="no",
        seed=seed,
        **ours,
    )
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(2, VOCABULARY, (EPISODES // GROUP * steps, prompt), generator=draw).tolist()
    for at, row in enumerate(rows):
        row[0] = 5 + at % 5  # by which `reward` knows 2 prompts in 5
    made = GRPOTrainer(
        model=models(limit)[0],
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [" ".join(f"w{word}" for word in row) for row in rows]}),
        processing_class=tokenizer(),
    )
    watch = Watch(made, limit, seed, generates=generates)
    made.train()
    if made.accelerator.is_main_process:
        logs = [row for row in made.state.log_history if "completions/mean_length" in row][1:]
        result = {
            "seconds": (watch.ends[-1] - watch.ends[0]) / MEASURED[limit],
            "generation": statistics.fmean(watch.generation[1:]),
            "mean_length": statistics.fmean(row["completions/mean_length"] for row in logs),
            "equal_rewards": statistics.fmean(row["frac_reward_zero_std"] for row in logs),
            "calls": call_seconds(logs, statistics.fmean),
        }
        out.write_text(json.dumps(result))
    if arm != "trl":
        made.close()


# --- the benchmark ---


def one_run(
    arm: str, processes: int, limit: int, seed: int, mark: int, *, prompt: int, generates: bool
) -> dict[str, Any]:
    """Starts a run and waits for it. Returns what it wrote, and its peak memory in MB."""
    arguments = ["--algorithm", "grpo", "--worker", arm, "--processes", str(processes), "--limit", str(limit)]
    arguments += ["--seed", str(seed), "--prompt", str(prompt), *([] if generates else ["--no-generation"])]
    try:
        return run_worker(arguments, mark, processes)
    except RunFailed as failed:
        sys.exit(str(failed))


def run(
    processes: Sequence[int],
    limits: Sequence[int],
    arms: Sequence[str],
    repeats: int,
    prompt: int,
    json_path: Path | None,
) -> None:
    """Run all arms, alternating, print a table, and write the results."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    rows, mark = list[dict[str, Any]](), os.getpid() * 1000
    rate = gemm_flops()
    for world in processes:
        for limit in limits:
            kinds = [(arm, True) for arm in arms] + [(arm, False) for arm in arms if arm in TRAINING_ARMS]
            runs: dict[tuple[str, bool], list[dict[str, Any]]] = {kind: [] for kind in kinds}
            for repeat in range(repeats):
                for arm, generates in kinds:
                    mark += 1
                    done = one_run(arm, world, limit, 5 + repeat, mark, prompt=prompt, generates=generates)
                    runs[arm, generates].append(done)
                    what = "step" if generates else "training"
                    console.print(f"{LABELS[arm]}, {world} x limit {limit}: {done['seconds']:.2f} s per {what}")
            rows += [row_of(world, limit, arm, runs) for arm in arms]
    show(rows, console)
    result = {
        "rows": rows,
        "gemm_gflops": rate / 1e9,
        "episodes_per_step": EPISODES,
        "group": GROUP,
        "prompt_tokens": prompt,
        "repeats": repeats,
        **about_the_run(),
    }
    if json_path:
        result_file.write(json_path, result)


def row_of(processes: int, limit: int, arm: str, runs: dict[tuple[str, bool], list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over the repeats of one arm, and its ratios to TRL's."""

    def mean(of: str, generates: bool, name: str) -> float | None:
        done = runs.get((of, generates))
        return statistics.fmean(run[name] for run in done) if done else None

    def ratio(generates: bool) -> float | None:
        theirs, own = mean("trl", generates, "seconds"), mean(arm, generates, "seconds")
        return theirs / own if theirs and own else None

    whole = runs[arm, True]
    return {
        "processes": processes,
        "limit": limit,
        "arm": arm,
        "seconds_per_step": mean(arm, True, "seconds"),
        "spread": [min(run["seconds"] for run in whole), max(run["seconds"] for run in whole)],
        "generation_s": mean(arm, True, "generation"),
        "ratio": ratio(True),
        "training_s": mean(arm, False, "seconds"),
        "training_ratio": ratio(False),
        "peak_mb": max(run["peak_mb"] for run in whole),
        "engines_mb": max(run["engines_mb"] for run in whole),
        "training_peak_mb": max((run["peak_mb"] for run in runs.get((arm, False), [])), default=None),
        "mean_length": mean(arm, True, "mean_length"),
        "equal_rewards": mean(arm, True, "equal_rewards"),
        "calls_s": whole[-1]["calls"],
    }


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the table."""
    table = Table(
        *("processes", "limit", "arm", "s per step", "ratio", "generation s", "training s", "ratio"),
        *("MB", "of it vLLM", "training MB", "mean length", "equal groups"),
    )
    for row in rows:
        table.add_row(
            str(row["processes"]),
            str(row["limit"]),
            LABELS[row["arm"]],
            f"{row['seconds_per_step']:.2f}",
            _cell(row["ratio"], ".1f", "x"),
            f"{row['generation_s']:.2f}",
            _cell(row["training_s"], ".2f"),
            _cell(row["training_ratio"], ".1f", "x"),
            f"{row['peak_mb']:,.0f}",
            f"{row['engines_mb']:,.0f}",
            _cell(row["training_peak_mb"], ",.0f"),
            f"{row['mean_length']:.0f}",
            f"{row['equal_rewards']:.0%}",
        )
    console.print(table)


def _cell(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
