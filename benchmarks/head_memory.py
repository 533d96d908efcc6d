"""Peak memory and seconds of a policy's forward and of its training at a large vocabulary, with the logits in memory
and in slices.

    python benchmarks/head_memory.py --json benchmarks/results/head_memory.json

A Llama of one layer and of hidden size 256 with random weights and a vocabulary of 152,000, in float32 and under
autocast to bfloat16, one micro-batch. Each row is a process of its own. `peak_mb` is its anonymous memory above that
with the model loaded, and in training with its gradients, read every 2 ms by a thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread
from typing import Any

import result_file
import torch


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
VOCABULARY, SAMPLES, MB = 152_000, 8, 1e6


def memory() -> int:
    """Bytes of this process's anonymous memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most anonymous memory inside, as a list of one number."""
    most, done = [memory()], Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], memory())

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def measure(trains: bool, sliced: bool, bf16: bool, tokens: int) -> dict[str, Any]:
    """A row of the table."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from trl_realloc.algorithms.rollout import Ragged, Rollouts
    from trl_realloc.engines.training import heads
    from trl_realloc.engines.training.heads import PolicyHead

    if not sliced:
        heads.MAX_WHOLE_ON_CPU = 1 << 62
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
    head = PolicyHead(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)), 1.0)
    each = torch.full((SAMPLES,), tokens // SAMPLES)
    prompts = Ragged(torch.randint(0, VOCABULARY, (SAMPLES,)), torch.ones(SAMPLES, dtype=torch.long))
    responses = Ragged(torch.randint(0, VOCABULARY, (int(each.sum()),)), each)
    samples = Rollouts(index=torch.arange(SAMPLES), prompts=prompts, responses=responses)

    def run(samples: Rollouts) -> None:
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            logprobs = head(samples)["logprobs"].values
        if trains:
            logprobs.sum().backward()

    with torch.set_grad_enabled(trains):
        run(samples.select([0]))  # allocates the gradients
        before, start = memory(), time.perf_counter()
        with peak() as most:
            run(samples)
        seconds = time.perf_counter() - start
    assert head.may_slice
    names = {"call": "train" if trains else "forward", "logits": "in slices" if sliced else "in memory"}
    numbers = {"dtype": "bfloat16" if bf16 else "float32", "tokens": tokens, "vocabulary": VOCABULARY}
    return {**names, **numbers, "peak_mb": round((most[0] - before) / MB), "seconds": round(seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--row", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        trains, sliced, bf16 = map(bool, options.row)
        print(json.dumps(measure(trains, sliced, bf16, options.tokens)))
        return
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
    }
    rows = []
    for trains in (0, 1):
        for bf16 in (0, 1):
            for sliced in (0, 1):
                command = [sys.executable, __file__, "--tokens", str(options.tokens)]
                command += ["--row", str(trains), str(sliced), str(bf16)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(done.stderr)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(rows[-1], flush=True)
    if options.json:
        about = {"commit": result_file.commit(), "torch": torch.__version__, "machine": platform.machine()}
        result_file.write(options.json, {**about, "cores": os.cpu_count(), "rows": rows})


if __name__ == "__main__":
    main()
