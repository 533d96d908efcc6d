"""The prompts of a run: the training and evaluation datasets, tokenized and checked against the policy.

Tokenizing and checking are in `algorithms.prompts`, batching in `algorithms.prompt_batches`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..algorithms.prompt_batches import PromptBatch, collate_prompts
from ..algorithms.prompts import check_prompts, tokenize_prompts
from .ppo_config import PPOConfig
from .trainer_inputs import TrainerInputs


@dataclass(frozen=True)
class PromptData:
    """The tokenized datasets.

    Args:
        evaluation: one dataset, several by name, or `None`, as the user gave them.
        collate: makes a `PromptBatch` of rows.
        check: refuses a tokenized dataset, given with its name for messages, to which the policy cannot respond, as
            `algorithms.prompts.check_prompts` does, and gives the tokens of each prompt.
        mean_tokens: mean length of a training prompt, tokens.
        longest: tokens of the longest prompt of all datasets.
    """

    train: Any
    evaluation: Any
    collate: Callable[[list[Any]], PromptBatch]
    check: Callable[[Any, str], list[int]]
    mean_tokens: float
    longest: int

    @property
    def columns(self) -> list[str]:
        """The columns of the training dataset that reward functions can take, sorted."""
        names = set(getattr(self.train, "column_names", None) or self.train[0])
        return sorted(names - {"input_ids", "attention_mask", "prompt"})


def read_prompts(args: PPOConfig, inputs: TrainerInputs, config: Any, pad_token_id: int) -> PromptData:
    """The datasets of `inputs`, tokenized and checked.

    Args:
        config: the policy's Transformers config.

    Raises:
        DataError: a dataset without prompts, or prompts that the policy cannot respond to.
    """
    tokenizer = inputs.processing_class
    train = tokenize_prompts(inputs.train_dataset, tokenizer, "train_dataset", args.dataset_num_proc)
    evaluation = _tokenize_evaluation(args, inputs.eval_dataset, tokenizer)
    text_config = config.get_text_config()
    context_length = getattr(text_config, "max_position_embeddings", None)
    collate = collate_prompts(pad_token_id, inputs.data_collator)
    vocabulary, all_columns = text_config.vocab_size, inputs.data_collator is not None

    def token_counts(rows: Any, name: str) -> list[int]:  # it is kept, so it must not hold the models of `inputs`
        return check_prompts(
            rows, name, args.response_length, context_length, vocabulary, collate, all_columns=all_columns
        )

    train_tokens = token_counts(train, "train_dataset")
    longest = max(max(tokens) for tokens in [train_tokens, *(token_counts(rows, n) for n, rows in evaluation.items())])
    return PromptData(
        train,
        evaluation if isinstance(inputs.eval_dataset, dict) else evaluation.get("eval_dataset"),
        collate,
        token_counts,
        mean_tokens=sum(train_tokens) / len(train),
        longest=longest,
    )


def _tokenize_evaluation(args: PPOConfig, dataset: Any, tokenizer: Any) -> dict[str, Any]:
    """The evaluation datasets by name; a single one has the name `eval_dataset`."""
    if dataset is None:
        return {}
    if not isinstance(dataset, dict):
        return {"eval_dataset": tokenize_prompts(dataset, tokenizer, "eval_dataset", args.dataset_num_proc)}
    return {
        name: tokenize_prompts(rows, tokenizer, f"eval_dataset {name!r}", args.dataset_num_proc)
        for name, rows in dataset.items()
    }
