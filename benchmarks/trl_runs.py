"""What the comparisons with TRL's trainers have in common: models, tokenizer, memory of a run, speed of the machine."""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch


PROMPT, VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS = 16, 1000, 256, 704, 4
EOS, PAD = 1, 0


def models(limit: int, mean_share: float = 1 / 4) -> tuple[Any, Any, Any]:
    """Policy, critic and reward model of 3.5 million parameters. Channel 0 of the residual stream is made a constant,
    by which the eos token's logit is set.

    Args:
        limit: the most tokens of a response.
        mean_share: the mean length of a response without the limit, as a share of it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        num_labels=1,
    )
    torch.manual_seed(0)
    policy = LlamaForCausalLM(config)
    with torch.no_grad():
        policy.model.embed_tokens.weight[:, 0] = 10.0
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        policy.lm_head.weight[:, 0] = 0
        chance = 1 / (mean_share * limit)
        policy.lm_head.weight[EOS, 0] = math.log(chance / (1 - chance) * (VOCABULARY - 1)) / math.sqrt(HIDDEN)
        policy.lm_head.weight[PAD, 0] = -1.0  # never: TRL takes a sampled pad token for the end
    return policy, LlamaForSequenceClassification(config), LlamaForSequenceClassification(config)


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )


def memory_mb(session: int) -> tuple[float, float]:
    """Proportional set size of every process that carries this run's mark, and of those that are vLLM engines."""
    total = engines = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"VS_TRL={session}\0".encode() in (entry / "environ").read_bytes():
                    is_engine = b"vllm_host" in (entry / "cmdline").read_bytes()
                    for line in (entry / "smaps_rollup").read_text().splitlines():
                        if line.startswith("Pss:"):
                            total += int(line.split()[1])
                            engines += is_engine * int(line.split()[1])
            except OSError:
                continue
    return total / 1024, engines / 1024


def environment_of(mark: int, processes: int = 1) -> dict[str, str]:
    """The environment of a run on a CPU.

    Args:
        mark: by which its processes are found (`memory_mb`).
        processes: among which the cores are divided.
    """
    return {
        **os.environ,
        "VS_TRL": str(mark),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "DS_ACCELERATOR": "cpu",
    }


def watched(process: subprocess.Popen[Any], mark: int) -> tuple[int, tuple[float, float]]:
    """Wait for a run. Returns its exit code, and the most memory that it had (`memory_mb`).

    Args:
        mark: of the processes of the run, as for `memory_mb`.
    """
    peak, stop = (0.0, 0.0), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(3.0):  # walking the pages of a process holds it up
            peak = max(peak, memory_mb(mark))

    thread = threading.Thread(target=watch)
    thread.start()
    code = process.wait()
    stop.set()
    thread.join()
    return code, peak


def gemm_flops() -> float:
    """This machine's float32 matrix multiplication at the models' shapes, all cores, FLOP/s."""
    torch.set_num_threads(os.cpu_count() or 1)
    left, right = torch.randn(2048, HIDDEN), torch.randn(HIDDEN, INTERMEDIATE)
    best = math.inf
    for _ in range(30):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return 2 * 2048 * HIDDEN * INTERMEDIATE / best
