"""The prompts of a run: the training and evaluation datasets, tokenized and checked against the policy.

Tokenizing and checking are in `algorithms.prompts`, batching in `algorithms.prompt_batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import DataCollatorWithPadding

from ...algorithms.prompt_batches import PromptBatch, collate_prompts
from ...algorithms.prompts import DataError, check_prompts, tokenize_prompts
from ...plan.dataflow import Role
from ..checks.input_checks import Context
from ..ppo_config import PPOConfig
from ..trainer_inputs import TrainerInputs


if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class PromptData:
    """The tokenized datasets.

    Args:
        evaluation: one dataset, several by name, or `None`, as the user passed them.
        tokenize: function of a dataset and its name for messages; returns the dataset with token ids.
        collate: function of rows; returns a `PromptBatch`.
        check: function of a tokenized dataset and its name for messages; returns the number of tokens of each prompt.
            Raises `DataError` for prompts that the policy cannot respond to (`algorithms.prompts.check_prompts`).
        mean_tokens: mean tokens of a training prompt.
        longest: tokens of the longest prompt of all datasets.
        columns: sorted columns that reward functions can take, by dataset name in messages.
    """

    train: Dataset
    evaluation: Dataset
    tokenize: Callable[[Any, str], Any]
    collate: Callable[[list[Any]], PromptBatch]
    check: Callable[[Any, str], list[int]]
    mean_tokens: float
    longest: int
    columns: Mapping[str, Sequence[str]]

    def tokenized(self, rows: Any, datasets: Dataset, *, by_vllm: bool) -> Any:
        """Tokenized evaluation prompts. The trainer's datasets were already checked in its constructor.

        Args:
            datasets: dataset of the trainer, or several by name.
            by_vllm: whether vLLM engines generate.

        Raises:
            DataError: no prompts, or prompts that the policy cannot respond to.
        """
        prompts = self.tokenize(rows, "eval_dataset")
        if any(rows is dataset for dataset in (datasets.values() if isinstance(datasets, dict) else [datasets])):
            return prompts
        longest = max(self.check(prompts, "eval_dataset"))
        if by_vllm and longest > self.longest:
            raise DataError(
                f"eval_dataset: the longest prompt has {longest} tokens, and the vLLM engines have room for "
                f"{self.longest}, as many as the longest prompt of the trainer's datasets has; give these prompts as "
                f"eval_dataset to the constructor too, which takes a dict of several datasets."
            )
        return prompts


def read_prompts(
    args: PPOConfig, inputs: TrainerInputs, context: Context, vocabulary: int, pad_token_id: int
) -> PromptData:
    """The datasets of `inputs`, tokenized and checked.

    Args:
        context: context of the run's models.
        vocabulary: number of the policy's tokens.

    Raises:
        DataError: a dataset without prompts, or prompts that the policy cannot respond to.
    """
    tokenizer, processes = inputs.processing_class, args.dataset_num_proc
    collator = inputs.data_collator
    if type(collator) is DataCollatorWithPadding:
        collator = None  # it only adds padding, which is removed again, and it fails on columns of text
    special = [getattr(tokenizer, name, None) for name in ("eos_token_id", "bos_token_id")]
    collate = collate_prompts(pad_token_id, collator, is_special=pad_token_id in special)
    all_columns = collator is not None

    # these functions outlive this call, so they must not hold the models of `inputs`
    def tokenize(rows: Any, name: str) -> Any:
        return tokenize_prompts(rows, tokenizer, name, processes)

    def token_counts(rows: Any, name: str) -> list[int]:
        return check_prompts(
            rows,
            name,
            args.response_length,
            context.tokens,
            vocabulary,
            collate,
            all_columns=all_columns,
            model_name="the model" if context.role is Role.ACTOR else f"the {context.role} model",
        )

    named_datasets: Mapping[str, Any] = inputs.eval_dataset if isinstance(inputs.eval_dataset, dict) else {}
    train = tokenize(inputs.train_dataset, "train_dataset")
    several = {key: tokenize(rows, _named(key)) for key, rows in named_datasets.items()}
    single = None if isinstance(inputs.eval_dataset, dict | None) else tokenize(inputs.eval_dataset, "eval_dataset")
    named = {"train_dataset": train, **{_named(key): rows for key, rows in several.items()}}
    if single is not None:
        named["eval_dataset"] = single
    tokens = {name: token_counts(rows, name) for name, rows in named.items()}
    return PromptData(
        train,
        several if isinstance(inputs.eval_dataset, dict) else single,
        tokenize,
        collate,
        token_counts,
        mean_tokens=sum(tokens["train_dataset"]) / len(train),
        longest=max(map(max, tokens.values())),
        columns={
            name: sorted({*rows.column_names} - {"input_ids", "attention_mask", "prompt"})
            for name, rows in named.items()
        },
    )


def _named(key: str) -> str:
    """The name of an evaluation dataset among several, for messages."""
    return f"eval_dataset {key!r}"
