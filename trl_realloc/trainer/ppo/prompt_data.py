"""The prompts of a run: the training and evaluation datasets, tokenized and checked against the policy.

Tokenizing and checking are in `algorithms.prompts`, batching in `algorithms.prompt_batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import DataCollatorWithPadding

from ...algorithms.prompt_batches import PromptBatch, collate_prompts
from ...algorithms.prompts import check_prompts, tokenize_prompts
from ..ppo_config import PPOConfig
from ..trainer_inputs import TrainerInputs


@dataclass(frozen=True)
class PromptData:
    """The tokenized datasets.

    Args:
        evaluation: one dataset, several by name, or `None`, as the user gave them.
        collate: makes a `PromptBatch` of rows.
        check: from a tokenized dataset and its name for messages to the number of tokens of each prompt. Raises
            `DataError` for prompts to which the policy cannot respond (`algorithms.prompts.check_prompts`).
        mean_tokens: mean length of a training prompt, tokens.
        longest: tokens of the longest prompt of all datasets.
        columns: of each dataset, by its name for messages, the columns that reward functions can take, sorted.
    """

    train: Any
    evaluation: Any
    collate: Callable[[list[Any]], PromptBatch]
    check: Callable[[Any, str], list[int]]
    mean_tokens: float
    longest: int
    columns: Mapping[str, Sequence[str]]


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
    collator = inputs.data_collator
    if type(collator) is DataCollatorWithPadding:
        collator = None  # it only adds padding, which is removed again, and it fails on columns of text
    collate = collate_prompts(pad_token_id, collator)
    vocabulary, all_columns = text_config.vocab_size, collator is not None

    def token_counts(rows: Any, name: str) -> list[int]:  # it is kept, so it must not hold the models of `inputs`
        return check_prompts(
            rows, name, args.response_length, context_length, vocabulary, collate, all_columns=all_columns
        )

    several = isinstance(inputs.eval_dataset, dict)
    named = {"train_dataset": train}
    named |= {_named(key) if several else key: rows for key, rows in evaluation.items()}
    tokens = {name: token_counts(rows, name) for name, rows in named.items()}
    return PromptData(
        train,
        evaluation if several else evaluation.get("eval_dataset"),
        collate,
        token_counts,
        mean_tokens=sum(tokens["train_dataset"]) / len(train),
        longest=max(map(max, tokens.values())),
        columns={
            name: sorted({*rows.column_names} - {"input_ids", "attention_mask", "prompt"})
            for name, rows in named.items()
        },
    )


def _tokenize_evaluation(args: PPOConfig, dataset: Any, tokenizer: Any) -> dict[str, Any]:
    """The evaluation datasets by name; a single one has the name `eval_dataset`."""
    if dataset is None:
        return {}
    if not isinstance(dataset, dict):
        return {"eval_dataset": tokenize_prompts(dataset, tokenizer, "eval_dataset", args.dataset_num_proc)}
    return {key: tokenize_prompts(rows, tokenizer, _named(key), args.dataset_num_proc) for key, rows in dataset.items()}


def _named(key: str) -> str:
    """One of several evaluation datasets in messages."""
    return f"eval_dataset {key!r}"
