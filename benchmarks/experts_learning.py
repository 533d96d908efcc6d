"""GRPO of a small mixture of experts in bfloat16 with vLLM, with and without router replay.

    python benchmarks/experts_learning.py --json FILE [--updates 64] [--seeds 0] [--learning-rate 5e-4]

The policy is a random Qwen3 mixture of the sizes of `experts.py`. It learns to answer with the word of the prompt: the
reward is the share of a completion's words that are this word. A row for each seed and setting: reward and
`sampling/token_mult_prob_error` of each update. Rows of other seeds and settings in FILE stay. The table shows means
of each eighth of the updates.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import experts
import result_file
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback
from trl_runs import tokenizer


sys.path[:0] = [str(result_file.ROOT), *(str(result_file.ROOT / "tests" / place) for place in (".", "multiprocess"))]

import mixtures  # noqa: E402
from engine_forks import EngineForks  # noqa: E402

from trl_realloc import GRPOConfig, GRPOTrainer  # noqa: E402
from trl_realloc.engines.generation import engine_process  # noqa: E402


WORDS, LENGTH = 16, 8  # different words; words of a completion
MISMATCH = "sampling/token_mult_prob_error"
SETTINGS = ("none", "rollout")
PARTS = 8  # parts of a run of which means are shown


def same_word(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The share of a completion's words that are the word of its prompt."""
    return [text.split().count(prompt) / LENGTH for prompt, text in zip(prompts, completions, strict=True)]


def learned(replay: str, seed: int, updates: int, learning_rate: float) -> dict[str, Any]:
    """One run."""
    words = tokenizer(2 + WORDS)
    draw = random.Random(seed)
    texts = [f"w{draw.randrange(2, 2 + WORDS)}" for _ in range(4096)]
    policy = mixtures.mixture("qwen3_moe", seed, replace(experts.SIZES, vocabulary=len(words)))
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            plan="flatten",
            use_vllm=True,
            use_cpu=True,
            bf16=True,
            router_replay=replay,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=LENGTH,
            max_steps=updates,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            seed=seed,
            max_mismatch=None,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
        )
        made = GRPOTrainer(policy, same_word, args, Dataset.from_dict({"prompt": texts}), processing_class=words)
        made.remove_callback(PrinterCallback)
        made.train()
        made.close()
    rows = [row for row in made.state.log_history if "reward" in row]
    return {
        "replay": replay,
        "seed": seed,
        "reward": [row["reward"] for row in rows],
        "mismatch": [row[MISMATCH] for row in rows],
    }


def means(values: list[float]) -> list[float]:
    """The means of the parts of a run."""
    edges = [len(values) * part // PARTS for part in range(PARTS + 1)]
    return [fmean(values[first:stop]) for first, stop in itertools.pairwise(edges)]


def show(rows: list[dict[str, Any]]) -> None:
    """The curves of all seeds."""
    table = Table("seed", "replay", "", *(f"{part + 1}/{PARTS}" for part in range(PARTS)))
    for row in rows:
        for what, form in (("reward", ".3f"), ("mismatch", ".4f")):
            table.add_row(str(row["seed"]), row["replay"], what, *(format(mean, form) for mean in means(row[what])))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--updates", type=int, default=64)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    asked = parser.parse_args()
    known = json.loads(asked.json.read_text())["learning"] if asked.json is not None and asked.json.is_file() else []
    rows = {(row["seed"], row["replay"]): row for row in known}
    forks = EngineForks.started()
    with contextlib.closing(forks), mock.patch.object(engine_process, "spawn", forks.spawn):
        for seed in map(int, asked.seeds.split(",")):
            for replay in SETTINGS:
                rows[seed, replay] = learned(replay, seed, asked.updates, asked.learning_rate)
                if asked.json is not None:
                    result_file.merge(asked.json, {"learning": [*rows.values()]})
    show([*rows.values()])


if __name__ == "__main__":
    main()
