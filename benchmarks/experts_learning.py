"""GRPO of a small mixture of experts in bfloat16 with vLLM, with and without router replay.

    python benchmarks/experts_learning.py --json FILE [--updates 80] [--seeds 2] [--learning-rate 1e-3]

The policy is a random Qwen3 mixture with 16 experts a layer. It learns to answer with the first word of the prompt: the
reward is the share of a completion's words that are this word. A row for each seed and setting: reward and
`sampling/token_mult_prob_error` of each update.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import result_file
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl_runs import tokenizer

from trl_realloc import GRPOConfig, GRPOTrainer


WORDS, LENGTH = 24, 12  # different words of the prompts; words of a completion
MISMATCH = "sampling/token_mult_prob_error"
LAST = 10  # updates of which a mean is shown


def policy(vocabulary: int, seed: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        initializer_range=0.06,
        max_position_embeddings=128,
    )
    return Qwen3MoeForCausalLM(config)


def first_word(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The share of a completion's words that are the first word of its prompt."""
    return [text.split().count(prompt.split()[0]) / LENGTH for prompt, text in zip(prompts, completions, strict=True)]


def learned(replay: str, seed: int, updates: int, learning_rate: float) -> dict[str, Any]:
    """One run."""
    words = tokenizer()
    ids = sorted(words.get_vocab().values())[8 : 8 + WORDS]
    draw = random.Random(seed)
    texts = [" ".join(words.convert_ids_to_tokens(draw.sample(ids, 3))) for _ in range(2048)]
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            plan="flatten",
            use_vllm=True,
            use_cpu=True,
            bf16=True,
            router_replay=replay,
            per_device_train_batch_size=64,
            num_generations=16,
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
        made = GRPOTrainer(
            policy(len(words), seed), first_word, args, Dataset.from_dict({"prompt": texts}), processing_class=words
        )
        made.train()
        made.close()
    rows = [row for row in made.state.log_history if "reward" in row]
    return {
        "replay": replay,
        "seed": seed,
        "reward": [row["reward"] for row in rows],
        "mismatch": [row[MISMATCH] for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    table = Table("seed", "replay", f"reward of the first {LAST}", f"of the last {LAST}", "mismatch", "largest")
    for seed in range(asked.seeds):
        for replay in ("none", "rollout"):
            row = learned(replay, seed, asked.updates, asked.learning_rate)
            rows.append(row)
            rewards, mismatch = row["reward"], row["mismatch"]
            first, last = (sum(part) / len(part) for part in (rewards[:LAST], rewards[-LAST:]))
            mean = sum(mismatch) / len(mismatch)
            table.add_row(str(seed), replay, f"{first:.3f}", f"{last:.3f}", f"{mean:.4f}", f"{max(mismatch):.3f}")
            if asked.json is not None:
                result_file.merge(asked.json, {"learning": rows})
    Console().print(table)


if __name__ == "__main__":
    main()
