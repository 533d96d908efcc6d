"""Trainers without a critic on the tiny parts, GRPO's and RLOO's, for a training run that takes a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
from datasets import Dataset

from trl_realloc import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


PROMPTS = Dataset.from_dict({"prompt": [f"w{a} w{a + 7} w{a + 1}" for a in range(2, 34)]})


def distinct(completions: list[str], **columns: Any) -> list[float]:
    """Some words reward more than others."""
    return [float(len(set(text.split())) % 3) for text in completions]


def settings(folder: Path, kind: type = GRPOConfig, **changes: Any) -> Any:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "max_steps": 2}
    sizes |= {"max_completion_length": 8, "learning_rate": 1e-2, "logging_steps": 1}
    bare = {"report_to": [], "save_strategy": "no", "use_vllm": False, "bf16": False, "disable_tqdm": True}
    return kind(**{"output_dir": str(folder), **sizes, **bare, **changes})


def trainer(folder: Path, kind: Any = GRPOTrainer, *, given: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A trainer on the tiny parts; `given` replaces constructor arguments, `changes` are of the config."""
    args = settings(folder, RLOOConfig if issubclass(kind, RLOOTrainer) else GRPOConfig, **changes)
    parts = {} if given and "model" in given else {"model": tiny.policy()}  # which draws its parameters
    parts |= {"args": args, "reward_funcs": distinct, "train_dataset": PROMPTS, "processing_class": tiny.tokenizer()}
    return kind(**{**parts, **(given or {})})


def trained(folder: Path, kind: Any = GRPOTrainer, **how: Any) -> Any:
    """A trainer as of `trainer`, after its training and closed."""
    made = trainer(folder, kind, **how)
    made.train()
    made.close()
    return made
