"""How far the generation engine's log-probabilities are from the trainer's for the same parameters, on this machine's
processors, and what the importance weights of a correction are then.

    python benchmarks/engine_mismatch.py [--json FILE] [--tokens 128] [--samples 64]

A row for each engine and dtype: the metrics `sampling/*` of one update, with the weights of whole responses
(`sequence_mask`, TRL's default bounds). The model is a random Llama of 4 layers whose distributions are not flat. It
was not trained, so the numbers say how rounding acts and not what a trained model's would be.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl_runs import tokenizer

from trl_realloc import PPOConfig, PPOTrainer


RUNS = (("transformers", False), ("vllm", False), ("transformers", True), ("vllm", True))  # (engine, bf16)
SHOWN = {
    "sampling_logp_difference/mean": "mean difference of log-probabilities",
    "sampling_logp_difference/max": "largest",
    "kl_k3": "kl_k3",
    "importance_sampling_ratio/max": "largest weight of a response",
    "importance_sampling_ratio/clipfrac": "clipfrac",
    "effective_sample_size": "effective sample size",
}


def metrics(engine: str, bf16: bool, tokens: int, samples: int, folder: Path) -> dict[str, float]:
    """`sampling/*` of one update at learning rate 0, without the prefix."""
    words = tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.1,
        max_position_embeddings=2 * tokens + 64,
        pad_token_id=words.pad_token_id,
        num_labels=1,
    )
    critic = LlamaForSequenceClassification(config)
    args = PPOConfig(
        output_dir=str(folder),
        plan="flatten",
        generation_engine=engine,
        per_device_train_batch_size=samples,
        max_steps=1,
        num_ppo_epochs=1,
        learning_rate=0.0,
        response_length=tokens,
        temperature=1.0,
        use_cpu=True,
        bf16=bf16,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        vllm_importance_sampling_correction=True,
    )
    prompts = Dataset.from_dict({"input_ids": torch.randint(5, len(words), (samples, 16)).tolist()})
    trainer = PPOTrainer(
        args, words, LlamaForCausalLM(config), None, lambda completions, **_: [0.0] * len(completions), prompts, critic
    )
    trainer.train()
    row = next(row for row in trainer.state.log_history if "sampling/kl_k3" in row)
    trainer.close()
    return {name.removeprefix("sampling/"): value for name, value in row.items() if name.startswith("sampling/")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--tokens", type=int, default=128, help="of a response")
    parser.add_argument("--samples", type=int, default=64)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    table = Table("engine", "dtype", *SHOWN.values())
    for engine, bf16 in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found = metrics(engine, bf16, asked.tokens, asked.samples, Path(folder))
        dtype = "bfloat16" if bf16 else "float32"
        rows.append({"engine": engine, "dtype": dtype, "tokens": asked.tokens, "samples": asked.samples, **found})
        table.add_row(engine, dtype, *(f"{found[name]:.2g}" for name in SHOWN))
    Console().print(table)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
