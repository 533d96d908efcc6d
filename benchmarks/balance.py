"""Seconds of an optimizer step on two replicas whose samples are divided by their tokens, and by their work.

    python benchmarks/balance.py --json benchmarks/results/balance.json

A Llama of two layers and of hidden size 256 with random weights, float32, two gloo processes of one core. Batches of
sixteen samples with log-normal lengths (median 700 tokens, at most 6,000), each trained on under both divisions, in
turn. Attention takes as long as all else at some 3,100 tokens, as that of an 8B model does at 57,000. Before it a
table of the same divisions for that model, computed, not run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import result_file
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trl_realloc.plan.batching import balance, work
from trl_realloc.plan.model_spec import ModelSpec


SAMPLES, MEDIAN, SIGMA, LONGEST, PROMPT = 16, 700, 0.9, 6_000, 8
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
LARGE = {  # Llama 3.1 8B
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
DIVISIONS = ("tokens", "work")


def lengths_of(rng: np.random.Generator, count: int, median: float, sigma: float, longest: int) -> list[int]:
    return np.clip(rng.lognormal(np.log(median), sigma, count), PROMPT + 1, longest).astype(int).tolist()


def divided(lengths: Sequence[int], parts: int, attention_at: float, by: str) -> list[list[int]]:
    return balance(lengths if by == "tokens" else work(lengths, attention_at), parts)


def rank(number: int, folder: str, batches: int) -> None:
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    from trl_realloc.algorithms.ppo import ValueLoss
    from trl_realloc.algorithms.rollout import Ragged, Rollouts
    from trl_realloc.engines.mesh_group import MeshGroup
    from trl_realloc.engines.training.heads import ValueHead
    from trl_realloc.engines.training.replicated import ReplicatedEngine

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=number, world_size=2)
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_labels=1, pad_token_id=0)
    attention_at = ModelSpec.from_config(config.to_dict(), "score", bytes_per_element=4).attention_at
    engine = ReplicatedEngine(
        ValueHead(AutoModelForSequenceClassification.from_config(config)),
        MeshGroup((0, 1), number, dist.group.WORLD),
        torch.device("cpu"),
        make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.0),
    )
    rng, seconds = np.random.default_rng(0), list[dict[str, float]]()
    for batch in range(batches + 1):
        lengths = lengths_of(rng, SAMPLES, MEDIAN, SIGMA, LONGEST)
        responses = [length - PROMPT for length in lengths]
        values = Ragged(torch.zeros(sum(responses)), torch.tensor(responses))
        samples = Rollouts(
            index=torch.arange(SAMPLES),
            prompts=Ragged.of([torch.randint(1, 999, (PROMPT,)) for _ in lengths], torch.long),
            responses=Ragged.of([torch.randint(1, 999, (n,)) for n in responses], torch.long),
            returns=values,
            old_values=values,
            value_weight=torch.full((SAMPLES,), 1 / sum(responses)),
        )
        took: dict[str, float] = {}
        for by in random.Random(batch).sample(DIVISIONS, 2):
            own = samples.select(divided(lengths, 2, attention_at, by)[number])
            dist.barrier()
            start = time.perf_counter()
            engine.train(own, ValueLoss(0.2, 0.1), 1024, learning_rate=0.0)
            dist.barrier()
            took[by] = time.perf_counter() - start
        if batch:  # the first one is slower
            seconds.append(took)
    if number == 0:
        torch.save({"seconds": seconds, "attention_at": attention_at}, f"{folder}/seconds")
    dist.destroy_process_group()


def measured(batches: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (folder, batches), nprocs=2)
        found = torch.load(f"{folder}/seconds", weights_only=True)
    by = {name: [took[name] for took in found["seconds"]] for name in DIVISIONS}
    gains = [tokens / of_work for tokens, of_work in zip(by["tokens"], by["work"], strict=True)]
    return {
        "attention_at": found["attention_at"],
        **{f"{name}_s": statistics.median(of) for name, of in by.items()},
        "gain": statistics.median(gains),
        "gains": gains,
        "seconds": found["seconds"],
    }


def computed(batches: int = 300) -> list[dict[str, Any]]:
    """How much longer the replica with the most work takes than the mean."""
    spec = ModelSpec.from_config(LARGE, bytes_per_element=2)
    rows = []
    for median, longest, samples, replicas in (
        (500, 4_096, 64, 8),
        (2_000, 16_384, 64, 8),
        (4_000, 32_768, 64, 8),
        (8_000, 65_536, 64, 8),
        (4_000, 32_768, 256, 8),
        (4_000, 32_768, 64, 16),
    ):
        rng, over = np.random.default_rng(0), {by: list[float]() for by in DIVISIONS}
        for _ in range(batches):
            lengths = lengths_of(rng, samples, median, SIGMA, longest)
            took = work(lengths, spec.attention_at)
            for by in DIVISIONS:
                parts = divided(lengths, replicas, spec.attention_at, by)
                over[by].append(max(sum(took[at] for at in part) for part in parts) / (sum(took) / replicas))
        means = {by: statistics.mean(of) for by, of in over.items()}
        row = {"median": median, "longest": longest, "samples": samples, "replicas": replicas, **means}
        rows.append({**row, "gain": means["tokens"] / means["work"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=120)
    rows = computed()
    table = Table(*rows[0], title="an 8B model, computed: the slowest replica's work over the mean's")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else f"{value:,}" for value in row.values()))
    console.print(table)
    found = measured(options.batches)
    console.print(
        f"two replicas, measured: {found['tokens_s']:.2f} s by tokens, {found['work_s']:.2f} s by work; "
        f"{found['gain']:.2f}x in the median of {options.batches} batches, {min(found['gains']):.2f} to "
        f"{max(found['gains']):.2f}"
    )
    if options.json:
        result_file.write(options.json, {"measured": found, "computed": rows, **result_file.about()})


if __name__ == "__main__":
    main()
