"""`vs_trl.py --model smollm2`: TRL's trainers and this project's, alternating, on SmolLM2-135M-Instruct in float32.

    python benchmarks/vs_trl.py --model smollm2 --json benchmarks/results/vs_trl_smollm2.json

Every run is a process of its own; its first update is warm-up, and the median of the others is the result. The cases:

grpo, even     2 groups of 8 completions of stories, all cut off at 48 tokens
grpo, natural  2 groups of 8 answers to sums, at most 128 tokens; the model ends them itself
ppo, natural   8 answers, at most 64 tokens; actor, critic, reference and reward model of 135 million parameters each

Rewards differ within every group, so every update trains.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import result_file
import torch
from rich.console import Console
from rich.table import Table
from trl_runs import environment_of, watched


ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "runs" / "smollm2" / "model"
GROUP = 8
THINGS = ("a river", "an old clock", "two cats", "the sea", "a lost key", "a tall tree", "snow", "a small town")


@dataclass(frozen=True)
class Case:
    """What both arms train.

    Args:
        algorithm: `grpo` or `ppo`.
        limit: the most tokens of a completion.
        episodes: completions of an update.
        is_even: all completions are cut off at the limit.
    """

    algorithm: str
    limit: int
    episodes: int
    is_even: bool

    @property
    def name(self) -> str:
        return f"{self.algorithm}, {'even' if self.is_even else 'natural'}"

    def prompts(self, count: int) -> list[str]:
        """Questions, each another one."""
        if self.is_even:
            return [f"Tell me a long story about {THINGS[i % len(THINGS)]} and {i + 2} friends." for i in range(count)]
        return [f"What is {17 + 7 * i} + {23 + 5 * i}?" for i in range(count)]


CASES = (Case("grpo", 48, 16, True), Case("grpo", 128, 16, False), Case("ppo", 64, 8, False))


# --- one run, in a process of its own ---


def worker(side: str, case: Case, updates: int, seed: int, out: Path) -> None:
    """Train for a number of updates after one of warm-up, and write the seconds of each."""
    from transformers import TrainerCallback

    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(os.cpu_count() or 1)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    make = _ppo if case.algorithm == "ppo" else _grpo
    made = make(side, case, updates + 1, seed, Clock())
    made.train()
    logs = [row for row in made.state.log_history if any(key.endswith("/mean_length") for key in row)][1:]
    lengths = [row["completions/mean_length"] for row in logs if "completions/mean_length" in row]
    calls = {key.removeprefix("time/") for row in logs for key in row if key.startswith("time/")}
    result = {
        "seconds": [end - start for start, end in zip(ends, ends[1:], strict=False)],
        "mean_length": statistics.fmean(lengths) if lengths else None,
        "calls": {name: statistics.median(row.get(f"time/{name}", 0.0) for row in logs) for name in sorted(calls)},
    }
    out.write_text(json.dumps(result))
    if side == "ours":
        made.close()


def _arguments(case: Case, updates: int, seed: int) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_accumulation_steps": 1,
        "temperature": 1.0,
        "learning_rate": 1e-6,
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "seed": seed,
        "per_device_train_batch_size": case.episodes,
    }


def _grpo(side: str, case: Case, updates: int, seed: int, clock: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if side == "ours":
        from trl_realloc import GRPOConfig, GRPOTrainer
    else:
        from trl import GRPOConfig, GRPOTrainer  # type: ignore[assignment]
    args = GRPOConfig(
        **_arguments(case, updates, seed),
        max_steps=updates,
        num_generations=GROUP,
        max_completion_length=case.limit,
        shuffle_dataset=False,
        **({"use_vllm": True} if side == "ours" else {}),
    )
    rows = [[{"role": "user", "content": text}] for text in case.prompts(updates * case.episodes // GROUP)]
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        reward_funcs=_reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        callbacks=[clock],
    )


def _reward(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Another one for almost every completion."""
    return [float(sum(ids) % 97) / 97 for ids in completion_ids]


def _ppo(side: str, case: Case, updates: int, seed: int, clock: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    if side == "ours":
        from trl_realloc import PPOConfig, PPOTrainer
    else:
        from trl.experimental.ppo import PPOConfig, PPOTrainer  # type: ignore[assignment]
    args = PPOConfig(
        **_arguments(case, updates, seed),
        total_episodes=case.episodes * updates,
        num_ppo_epochs=1,
        num_mini_batches=1,
        response_length=case.limit,
        stop_token="eos",
        num_sample_generations=0,
        **({"generation_engine": "vllm"} if side == "ours" else {}),
    )
    words = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    if words.pad_token == words.eos_token:
        words.pad_token = "<|endoftext|>" if words.eos_token != "<|endoftext|>" else "<|im_start|>"
    texts = case.prompts(updates * case.episodes)
    ids = [
        words.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in texts
    ]
    policy, reference = (AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32) for _ in range(2))
    torch.manual_seed(0)
    critic, reward = (
        AutoModelForSequenceClassification.from_pretrained(
            MODEL, num_labels=1, dtype=torch.float32, pad_token_id=words.pad_token_id
        )
        for _ in range(2)
    )
    return PPOTrainer(
        args=args,
        processing_class=words,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        callbacks=[clock],
    )


# --- the benchmark ---


def one_run(side: str, case: Case, updates: int, seed: int, mark: int) -> dict[str, Any]:
    """Start a run and wait for it. Returns what it wrote, and its peak memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        out, log_path = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, str(ROOT / "benchmarks" / "vs_trl.py"), "--model", "smollm2", "--worker", side]
        command += ["--cases", case.name, "--updates", str(updates), "--seed", str(seed), "--out", str(out)]
        with log_path.open("w") as log:
            process = subprocess.Popen(command, env=environment_of(mark), stdout=log, stderr=log)
            code, peak = watched(process, mark)
        if code:
            sys.exit(f"{side}, {case.name}, failed:\n{log_path.read_text()[-4000:]}")
        return {**json.loads(out.read_text()), "peak_mb": peak[0], "engines_mb": peak[1]}


def run(names: Sequence[str] | None, updates: int, repeats: int, json_path: Path | None) -> None:
    """Run both arms of each case, alternating, print a table, and write the results."""
    if not (MODEL / "complete").is_file():
        sys.exit(f"there is no model in {MODEL}; make it with python examples/smollm2/prepare.py")
    console, rows, mark = (
        Console(width=None if sys.stdout.isatty() else 160),
        list[dict[str, Any]](),
        os.getpid() * 1000,
    )
    for case in CASES:
        if names and case.name not in names:
            continue
        runs: dict[str, list[dict[str, Any]]] = {"trl": [], "ours": []}
        for repeat in range(repeats):
            for side, done in runs.items():
                mark += 1
                done.append(one_run(side, case, updates, 5 + repeat, mark))
                console.print(f"{side:5} {case.name}: {statistics.median(done[-1]['seconds']):.1f} s per update")
        rows.append(row_of(case, runs))
    table = Table("case", "TRL s per update", "ours", "ratio", "TRL MB", "ours MB", "mean length, TRL and ours")
    for row in rows:
        lengths = " and ".join("–" if n is None else f"{n:.0f}" for n in row["mean_length"].values())
        table.add_row(
            row["case"],
            f"{row['seconds']['trl']:.1f}",
            f"{row['seconds']['ours']:.1f}",
            f"{row['ratio']:.2f}x",
            f"{row['peak_mb']['trl']:,.0f}",
            f"{row['peak_mb']['ours']:,.0f}",
            lengths,
        )
    console.print(table)
    for row in rows:
        console.print(f"{row['case']}: " + ", ".join(f"{name} {s:.1f}" for name, s in row["calls_s"].items()))
    result = {
        "rows": rows,
        "model": "SmolLM2-135M-Instruct, float32",
        "updates": updates,
        "repeats": repeats,
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        "torch": torch.__version__,
        "commit": result_file.commit(),
    }
    if json_path:
        result_file.write(json_path, result)


def row_of(case: Case, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the updates of all repeats, and their ratio."""
    seconds = {side: statistics.median(s for run in done for s in run["seconds"]) for side, done in runs.items()}
    return {
        "case": case.name,
        "limit": case.limit,
        "episodes": case.episodes,
        "seconds": seconds,
        "of_updates": {side: [run["seconds"] for run in done] for side, done in runs.items()},
        "ratio": seconds["trl"] / seconds["ours"],
        "peak_mb": {side: max(run["peak_mb"] for run in done) for side, done in runs.items()},
        "mean_length": {side: done[-1]["mean_length"] for side, done in runs.items()},
        "calls_s": runs["ours"][-1]["calls"],
    }
