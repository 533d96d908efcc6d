"""For how long a vLLM engine stops decoding for new parameters, against one decode step and 1.25 times the raw copy.

    python benchmarks/inflight.py --json benchmarks/results/inflight.json

Llamas with random weights in float32, in four to six buckets. The engine has one core and decodes 32 samples. Each
round loads the same buckets twice: with no generation (`copy_ms`, the seconds of `load`), and during a generation.
`stop_ms` is the time from the end of the last decode step before the update to the moment at which the next may begin,
by the engine's clock. `next_ms` is the time from the end of `load` until every sample has a token of the new
parameters. `step_ms` is the mean of 32 decode steps before the update. `within` counts the rounds in which the stop was
at most one step and 1.25 copies.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trl_realloc.engines.base import Bucket, Generation, GenerationRequest, Sampling, Unfinished, Updates  # noqa: E402
from trl_realloc.engines.buckets import in_buckets  # noqa: E402
from trl_realloc.engines.generation.vllm import VLLMEngine  # noqa: E402


SAMPLES, PROMPT, RESPONSE, AT_LEAST = 32, 32, 448, 24  # the last: tokens drawn before an update
SIZES = {"3M": (256, 2, 1024), "14M": (384, 6, 4096), "38M": (512, 8, 12288)}  # hidden size, layers, vocabulary


def model_of(size: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, vocabulary = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=PROMPT + RESPONSE,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config)


def tokens_of(so_far: Sequence[Unfinished]) -> int:
    """The fewest tokens that a sample has."""
    return min(len(unfinished.token_ids) for unfinished in so_far)


def seconds_until(generation: Generation, tokens: int) -> float:
    """Until every sample has so many tokens."""
    start = time.perf_counter()
    while tokens_of(generation.peek()) < tokens:
        pass
    return time.perf_counter() - start


def seconds_until_drawn(generation: Generation, version: int) -> float:
    """Until every sample has a token of these parameters."""
    start = time.perf_counter()
    while any(unfinished.versions[-1] != version for unfinished in generation.peek()):
        pass
    return time.perf_counter() - start


class Rounds:
    """Rounds of loads with one model.

    Attributes:
        rows: milliseconds by name, one of each round.
    """

    def __init__(self, engine: VLLMEngine, buckets: list[Bucket]) -> None:
        self.engine, self.buckets, self.version = engine, buckets, 0
        self.requests = [GenerationRequest(i, tuple((i + j) % 1000 for j in range(PROMPT)), i) for i in range(SAMPLES)]
        self.rows: dict[str, list[float]] = {}

    def load(self) -> float:
        self.version += 1
        start = time.perf_counter()
        self.engine.load(self.buckets, self.version)
        return time.perf_counter() - start

    def note(self, name: str, seconds: float) -> None:
        self.rows.setdefault(name, []).append(1e3 * seconds)

    def run(self) -> None:
        self.note("copy", self.load())
        generation = self.engine.start(self.requests, Sampling(RESPONSE, 1.0), Updates.KEEP)
        seconds_until(generation, AT_LEAST)
        before = tokens_of(generation.peek())
        seconds = seconds_until(generation, before + 32)
        self.note("step", seconds / (tokens_of(generation.peek()) - before))
        self.load()
        self.note("stop", self.engine.stopped_s)
        self.note("next", seconds_until_drawn(generation, self.version))
        generation.close()


def row(size: str, parameters: int, numbers: dict[str, list[float]]) -> dict[str, Any]:
    def both(name: str, values: list[float]) -> dict[str, float]:
        at = min(len(values) - 1, round(0.95 * (len(values) - 1)))
        return {f"{name}_ms": round(median(values), 2), f"{name}_ms_95": round(sorted(values)[at], 2)}

    bound = [step + 1.25 * copy for step, copy in zip(numbers["step"], numbers["copy"], strict=True)]
    return {
        "model": size,
        "megabytes": round(4 * parameters / 1e6, 1),
        "rounds": len(bound),
        **both("step", numbers["step"]),
        **both("copy", numbers["copy"]),
        **both("stop", numbers["stop"]),
        **both("next", numbers["next"]),
        "bound_ms": round(median(numbers["step"]) + 1.25 * median(numbers["copy"]), 2),
        "within": sum(s <= b for s, b in zip(numbers["stop"], bound, strict=True)),
    }


def measure(size: str, rounds: int) -> dict[str, Any]:
    model = model_of(size)
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    parameters = sum(parameter.numel() for _, parameter in named)
    core = sorted(os.sched_getaffinity(0))[-1]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        engine = VLLMEngine(
            folder, max_model_len=PROMPT + RESPONSE, max_num_seqs=SAMPLES, kv_cache_gib=0.5, cpu_cores=[core]
        )
        try:
            made = Rounds(engine, list(in_buckets(named, lambda item: item[1].nbytes, parameters)))  # of a quarter
            made.load()
            made.run()  # to warm up
            made.rows.clear()
            for _ in range(rounds):
                made.run()
        finally:
            engine.close()
    return row(size, parameters, made.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in options.sizes:
        rows.append(measure(size, options.rounds))
        if len(rows) == 1:
            print("  ".join(f"{name:>10}" for name in rows[0]))
        print("  ".join(f"{value:>10}" for value in rows[-1].values()), flush=True)
    if options.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
        )
        about = {"commit": commit.stdout.strip(), "torch": torch.__version__, "machine": platform.machine()}
        options.json.write_text(json.dumps({**about, "cores": os.cpu_count(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
