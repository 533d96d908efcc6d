"""TRL 1.12's PPOTrainer and this project's, alternating, on the same models, prompts and length distribution.

    python benchmarks/vs_trl.py --json benchmarks/results/vs_trl.json

`--algorithm grpo` compares the GRPO trainers (`vs_trl_grpo`), `--model smollm2` both on a pretrained model, and
`--device cuda` GRPO and RLOO on one GPU (`vs_trl_cases`). `--plan` replaces the preset `flatten`, whose calls are on
all devices as TRL's are.

Every run is a process (or two) of its own; TRL's PPO runs in the environment of the oldest releases, because later ones
of TRL have none (`trl_runs.trl_ppo_python`). The first update of each is warm-up and not counted. The policy ends a
response at each token with the same probability, so lengths are skewed: a quarter of the limit in the mean, and an
eighth at a limit of 1,024 (`MEAN_SHARES`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import result_file
import torch
from rich.console import Console
from rich.table import Table
from trl_runs import (
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    PAD,
    PROMPT,
    ROOT,
    VOCABULARY,
    RunFailed,
    about_the_run,
    call_seconds,
    gemm_flops,
    models,
    run_worker,
    tokenizer,
    trl_ppo_python,
)


EPISODES, EPOCHS = 32, 4
MEASURED = {128: 6, 512: 4, 1024: 4}  # updates, after one of warm-up
MEAN_SHARES = {128: 1 / 4, 512: 1 / 4, 1024: 1 / 8}  # of the limit: a response's mean length


# --- one run, in a process of its own ---


def worker(side: str, processes: int, limit: int, seed: int, out: Path, plan: str) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback

    sys.path.insert(0, str(ROOT))
    if side == "trl":
        from accelerate import PartialState
        from trl.experimental.ppo import PPOConfig, PPOTrainer

        if processes > 1:
            PartialState(backend="gloo")
    else:
        from trl_realloc import PPOConfig, PPOTrainer
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    marks: list[tuple[str, float]] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            marks.append(("end", time.perf_counter()))

    if side == "trl":
        _watch_trl(marks, lengths)
    accumulation = EPISODES // processes // 16
    ours: dict[str, Any] = {} if side == "trl" else {"generation_engine": "vllm", "plan": plan}
    updates = 1 + MEASURED[limit]
    args = PPOConfig(
        output_dir=tempfile.mkdtemp(),
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=accumulation,
        total_episodes=EPISODES * updates,
        num_ppo_epochs=EPOCHS,
        response_length=limit,
        stop_token="eos",
        temperature=1.0,
        learning_rate=1e-7,
        logging_steps=1,
        gradient_checkpointing=False,
        num_sample_generations=0,
        save_strategy="no",
        seed=seed,
        **ours,
    )
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(2, VOCABULARY, (EPISODES * updates, PROMPT), generator=draw).tolist()
    policy, critic, reward = models(limit, MEAN_SHARES[limit])
    reference = models(limit, MEAN_SHARES[limit])[0]
    made = PPOTrainer(
        args=args,
        processing_class=tokenizer(),
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        callbacks=[Clock()],
    )
    made.train()
    drawn = made.accelerator.gather(torch.tensor(lengths or [0.0])).view(processes, -1)  # TRL's, of all ranks
    if made.accelerator.is_main_process:
        ends = [at for what, at in marks if what == "end"]
        logs = [row for row in made.state.log_history if "objective/scores" in row][1:]
        seconds = (ends[-1] - ends[0]) / MEASURED[limit]
        split = _trl_split(marks) if side == "trl" else call_seconds(logs, statistics.fmean)
        of_updates = drawn[:, 1:].mean(0).tolist()  # without the warm-up
        mean = statistics.fmean(of_updates if side == "trl" else [row["completions/mean_length"] for row in logs])
        result = {"seconds_per_update": seconds, "split": split, "mean_length": mean}
        out.write_text(json.dumps(result))
    if side == "ours":
        made.close()


def _watch_trl(marks: list[tuple[str, float]], lengths: list[float]) -> None:
    """Note where TRL's update passes from generating to scoring to training, around its own functions."""
    import numpy as np
    from trl.experimental.ppo import ppo_trainer

    generate, permutation = ppo_trainer.batch_generation, np.random.permutation

    def batch_generation(*args: Any, **kwargs: Any) -> Any:
        marks.append(("generate", time.perf_counter()))
        made = generate(*args, **kwargs)
        marks.append(("score", time.perf_counter()))
        responses = made[0][:, args[1].shape[1] :]
        lengths.append(float((responses != PAD).sum(1).float().mean()))
        return made

    def permuted(*args: Any, **kwargs: Any) -> Any:
        marks.append(("train", time.perf_counter()))
        return permutation(*args, **kwargs)

    ppo_trainer.batch_generation, np.random.permutation = batch_generation, permuted


def _trl_split(marks: list[tuple[str, float]]) -> dict[str, float]:
    """Mean seconds per update after the first of each phase."""
    totals = {"generate": 0.0, "score": 0.0, "train": 0.0}
    updates = 0
    for (what, at), (_, until) in itertools.pairwise(marks):
        updates += what == "end"
        if updates and what in totals:
            totals[what] += until - at
    return {name: total / max(updates, 1) for name, total in totals.items()}


# --- the benchmark ---


def one_run(side: str, processes: int, limit: int, seed: int, mark: int, plan: str) -> dict[str, Any]:
    arguments = ["--worker", side, "--processes", str(processes), "--limit", str(limit), "--seed", str(seed)]
    python = trl_ppo_python() if side == "trl" else sys.executable
    try:
        return run_worker([*arguments, "--plan", plan], mark, processes, python=python)
    except RunFailed as failed:
        sys.exit(str(failed))


def floor_flops(mean_length: float) -> float:
    """FLOPs of one update that no layout avoids: 2 per weight and token forward, 6 with the backward; attention at the
    mean length; logits for response tokens alone. Generated once, scored by three models, two trained every epoch."""
    tokens, responses = EPISODES * (PROMPT + mean_length), EPISODES * mean_length
    weights = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE)
    body = 2 * weights + LAYERS * 2 * HIDDEN * (PROMPT + mean_length)
    head = 2 * HIDDEN * VOCABULARY
    generate, reference = tokens * body + responses * head, tokens * body + responses * head
    scoring = 2 * tokens * body
    training = EPOCHS * 3 * (2 * tokens * body + responses * head)
    return generate + reference + scoring + training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side, alternating, each with a seed")
    parser.add_argument("--algorithm", choices=["ppo", "grpo"], default="ppo")
    parser.add_argument("--limits", type=int, nargs="+", help="longest responses; PPO 128, 512 and 1024, GRPO 512")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--plan", default="flatten", help="PPO: the plan of this project's side, a preset or a file")
    parser.add_argument("--small", action="store_true", help="a quick check: GRPO, limit 64; a GPU's cases, tiny")
    parser.add_argument("--arms", nargs="+", default=["trl", "flatten", "auto"], help="GRPO: what is compared")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="GRPO: tokens of a prompt")
    parser.add_argument("--model", choices=["toy", "smollm2"], default="toy", help="smollm2: `vs_trl_cases`")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: `vs_trl_cases`")
    parser.add_argument("--cases", nargs="+", help="of `vs_trl_cases`, some of them, such as 'grpo, even'")
    parser.add_argument("--updates", type=int, default=4, help="of `vs_trl_cases`: updates that count")
    parser.add_argument("--limit-s", type=float, default=180.0, help="cuda: the most seconds of a run")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--no-generation", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model == "smollm2" or options.device == "cuda":
        compare_cases(options)
        return
    if options.algorithm == "grpo":
        compare_grpo(options)
        return
    options.limits = options.limits or list(MEASURED)
    if unknown := set(options.limits) - set(MEASURED):
        parser.error(f"PPO has no run of limit {min(unknown)}; --limits takes {', '.join(map(str, MEASURED))}.")
    if options.worker:
        worker(options.worker, options.processes[0], options.limit, options.seed, options.out, options.plan)
        return
    console, rows = Console(), []
    rate = gemm_flops()
    mark = os.getpid() * 1000
    for processes in options.processes:
        for limit in options.limits:
            runs: dict[str, list[dict[str, Any]]] = {"trl": [], "ours": []}
            for repeat in range(options.repeats):
                for side in ("trl", "ours"):
                    mark += 1
                    runs[side].append(one_run(side, processes, limit, 5 + repeat, mark, options.plan))
                    done = runs[side][-1]
                    console.print(
                        f"{side:5} {processes} x limit {limit}: {done['seconds_per_update']:.2f} s per update"
                    )
            rows.append(row_of(processes, limit, runs, rate))
    show(rows, console)
    result = {
        "rows": rows,
        "gemm_gflops": rate / 1e9,
        "episodes_per_update": EPISODES,
        "repeats": options.repeats,
        "plan": options.plan,
        **about_the_run(),
    }
    if options.json:
        result_file.write(options.json, result)


def compare_grpo(options: argparse.Namespace) -> None:
    import vs_trl_grpo

    if options.worker:
        vs_trl_grpo.worker(
            options.worker,
            options.processes[0],
            options.limit,
            options.seed,
            options.out,
            prompt=options.prompt,
            generates=not options.no_generation,
        )
        return
    limits = options.limits or ([64] if options.small else [512])
    repeats = 1 if options.small else options.repeats
    vs_trl_grpo.run(options.processes, limits, options.arms, repeats, options.prompt, options.json)


def compare_cases(options: argparse.Namespace) -> None:
    import vs_trl_cases

    device, small = options.device, options.small
    if options.worker:
        (case,) = (case for case in vs_trl_cases.cases(device, small) if case.name == options.cases[0])
        vs_trl_cases.worker(options.worker, case, options.updates, options.seed, options.out)
        return
    limit_s = options.limit_s if device == "cuda" else None
    vs_trl_cases.run(
        options.cases, options.updates, options.repeats, options.json, device=device, small=small, limit_s=limit_s
    )


def row_of(processes: int, limit: int, runs: dict[str, list[dict[str, Any]]], rate: float) -> dict[str, Any]:
    seconds = {side: statistics.fmean(run["seconds_per_update"] for run in done) for side, done in runs.items()}
    spread = {
        side: [min(r["seconds_per_update"] for r in done), max(r["seconds_per_update"] for r in done)]
        for side, done in runs.items()
    }
    lengths = {side: statistics.fmean(run["mean_length"] for run in done) for side, done in runs.items()}
    floor = {side: floor_flops(mean) / rate for side, mean in lengths.items()}  # each side's for what it drew
    return {
        "processes": processes,
        "limit": limit,
        "trl_episodes_per_s": EPISODES / seconds["trl"],
        "ours_episodes_per_s": EPISODES / seconds["ours"],
        "ratio": seconds["trl"] / seconds["ours"],
        "trl_peak_mb": max(run["peak_mb"] for run in runs["trl"]),
        "ours_peak_mb": max(run["peak_mb"] for run in runs["ours"]),
        "ours_engines_mb": max(run["engines_mb"] for run in runs["ours"]),
        "floor_s": floor,
        "ours_over_floor": seconds["ours"] / floor["ours"],
        "trl_over_floor": seconds["trl"] / floor["trl"],
        "seconds_per_update": spread,
        "mean_length": lengths,
        "trl_split_s": runs["trl"][-1]["split"],
        "ours_split_s": runs["ours"][-1]["split"],
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        "processes",
        "limit",
        "TRL episodes/s",
        "ours",
        "ratio",
        "TRL MB",
        "ours MB",
        "of it vLLM",
        "ours / floor",
        "TRL / floor",
    )
    for row in rows:
        table.add_row(
            str(row["processes"]),
            str(row["limit"]),
            f"{row['trl_episodes_per_s']:.2f}",
            f"{row['ours_episodes_per_s']:.2f}",
            f"{row['ratio']:.1f}x",
            f"{row['trl_peak_mb']:,.0f}",
            f"{row['ours_peak_mb']:,.0f}",
            f"{row['ours_engines_mb']:,.0f}",
            f"{row['ours_over_floor']:.1f}x",
            f"{row['trl_over_floor']:.1f}x",
        )
    console.print(table)
    for row in rows:
        split = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["ours_split_s"].items())
        console.print(f"{row['processes']} x {row['limit']}: TRL {row['trl_split_s']}; ours {split}")


if __name__ == "__main__":
    main()
