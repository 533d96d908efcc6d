"""Models, tokenizer and prompts so small that a training run takes a second."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from trl_realloc import PPOConfig, PPOTrainer


PAD, EOS, VOCABULARY = 0, 1, 100
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
# arguments of any trainer of a model so small: every step is logged, nothing is saved or shown
BARE: dict[str, Any] = {"report_to": [], "bf16": False, "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
BARE |= {"gradient_checkpointing": False, "save_strategy": "no"}


def forget_accelerate() -> None:
    """Accelerate keeps its state in class attributes, and a trainer would take over that of the one before it."""
    AcceleratorState._reset_state(reset_partial_state=True)


def tokenizer(pad: str | None = "<pad>") -> PreTrainedTokenizerFast:
    """One token for each word w2 … w99."""
    words = {"<pad>": PAD, "<eos>": EOS, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    whole_words = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    whole_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=whole_words, eos_token="<eos>", padding_side="left")
    if pad is not None:
        made.pad_token = pad
    made.chat_template = TEMPLATE
    return made


def config(**changes: Any) -> LlamaConfig:
    """Two layers; heads of 32, the least that vLLM's attention has on a CPU."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "vocab_size": VOCABULARY}
    return LlamaConfig(**{**sizes, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None, **changes})


def policy(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(**changes))


def quantized(folder: Path, seed: int = 0, **settings: Any) -> Any:
    """The policy as bitsandbytes quantizes it, by the settings of `BitsAndBytesConfig`. It is saved in the folder."""
    whole = policy(seed, hidden_size=64, initializer_range=0.1)
    whole.config.save_pretrained(folder)
    # in a job `save_pretrained` of a model writes on rank 0 alone
    save_file(whole.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**settings), dtype=torch.float32
    )


def classifier(seed: int = 1, **changes: Any) -> Any:
    torch.manual_seed(seed)
    changes = {"num_labels": 1, **changes}
    return AutoModelForSequenceClassification.from_config(config(**changes))


def prompts(rows: int = 64, **columns: Any) -> Dataset:
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(2, VOCABULARY)}" for _ in range(draw.randrange(2, 9))) for _ in range(rows)]
    return Dataset.from_dict({"prompt": texts, **columns})


def short(completions: list[str], **columns: Any) -> list[float]:
    """A reward that wants three words."""
    return [-abs(len(text.split()) - 3) / 3 for text in completions]


def always_one(completions: list[str], **columns: Any) -> list[float]:
    """A reward by which no completion is better than another."""
    return [1.0] * len(completions)


def arguments(folder: Path, **changes: Any) -> PPOConfig:
    of_run = {"per_device_train_batch_size": 8, "max_steps": 2, "num_ppo_epochs": 2, "learning_rate": 1e-2}
    draws = {"stop_token": "eos", "response_length": 12, "temperature": 1.0, "generation_engine": "transformers"}
    return PPOConfig(output_dir=str(folder), **{**BARE, **of_run, **draws, "num_sample_generations": 0, **changes})


def every(steps: int) -> dict[str, Any]:
    """The settings of a run that evaluates and saves after so many steps."""
    return {"eval_strategy": "steps", "eval_steps": steps, "save_strategy": "steps", "save_steps": steps}


def trainer(
    folder: Path, *, kind: type = PPOTrainer, callbacks: Any = None, given: dict[str, Any] | None = None, **changes: Any
) -> PPOTrainer:
    """A trainer on the tiny parts; `given` replaces constructor arguments, `changes` are of the config."""
    parts: dict[str, Any] = {"processing_class": tokenizer(), "model": policy(), "ref_model": None}
    parts |= {"reward_model": short, "train_dataset": prompts(), "value_model": classifier(), **(given or {})}
    return kind(args=arguments(folder, **changes), callbacks=callbacks, **parts)


def trained(folder: Path, **how: Any) -> PPOTrainer:
    """A trainer as of `trainer`, after its training."""
    made = trainer(folder, **how)
    made.train()
    return made


def updates(made: PPOTrainer) -> list[dict[str, float]]:
    """The logs of the updates, less what time makes differ."""
    volatile = ("time/", "realloc/seconds/", "tokens/s", "eps")
    return [
        {key: value for key, value in row.items() if not key.startswith(volatile)}
        for row in made.state.log_history
        if "objective/scores" in row
    ]


def change_ppo(made: Any, **changes: Any) -> None:
    """Change numbers of PPO past the config's checks."""
    algorithm = made.executor.runner.algorithm
    made.executor.runner.algorithm = replace(algorithm, settings=replace(algorithm.settings, **changes))


def resumed(checkpoint: Path, folder: Path, **changes: Any) -> PPOTrainer:
    """A trainer of this process alone, with the state of a checkpoint."""
    made = trainer(folder, **changes)
    found = made.run.checkpoints.find(str(checkpoint))
    assert found is not None
    made.run.placed.start()
    made.run.checkpoints.load_models(found)
    return made


def weights(made: PPOTrainer) -> dict[str, torch.Tensor]:
    """Copies of the policy's and the critic's parameters."""
    engines = {"policy": made.placement.engine("actor.train"), "critic": made.placement.engine("critic.train")}
    return {
        f"{role}.{name}": tensor.clone()
        for role, engine in engines.items()
        if engine is not None
        for bucket in engine.export(merged=False)
        for name, tensor in bucket
    }
