"""Checks the data sets of GRPO and RLOO before engines start.

TRL reads them when it builds a batch, and trains on nothing if they do not fill one generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.utils import is_peft_available

from ...algorithms.prompts import DataError, columns_of, is_made_when_read
from ...algorithms.rewards import check_columns_free


if TYPE_CHECKING:
    from datasets import Dataset


def check_types(inputs: Mapping[str, object]) -> None:
    """Refuse a model, tokenizer or adapter config of the wrong type.

    Args:
        inputs: constructor arguments of the trainer, by name.

    Raises:
        TypeError: names the argument and the type.
    """
    kinds: dict[str, tuple[tuple[type, ...], str]] = {
        "model": ((str, nn.Module), "a loaded model, or a name or path"),
        "processing_class": ((PreTrainedTokenizerBase, ProcessorMixin, NoneType), "a tokenizer or a processor"),
    }
    if is_peft_available():
        from peft import PeftConfig

        kinds["peft_config"] = (PeftConfig, NoneType), "a peft.PeftConfig, such as LoraConfig(r=16)"
    for name, (types, words) in kinds.items():
        value = inputs.get(name)
        if not isinstance(value, types):
            raise TypeError(f"{name} must be {words}, not {type(value).__name__}.")


def check_columns(inputs: Mapping[str, object]) -> None:
    """Refuse data sets without prompts, unless there are environments, and those with columns that TRL cannot pass to
    reward functions beside its own arguments.

    Args:
        inputs: constructor arguments of the trainer, by name.

    Raises:
        DataError: names the data set and its columns.
        RewardError: names the data set and the column.
    """
    makes_prompts = bool(inputs.get("environment_factory"))
    rewards = inputs.get("reward_funcs")
    rewards = rewards if isinstance(rewards, list) else [rewards]
    has_functions = any(callable(reward) and not isinstance(reward, nn.Module) for reward in rewards)
    for what, dataset in _datasets(inputs):
        columns = columns_of(dataset)
        if has_functions:
            check_columns_free(columns, what, ("prompts", "completions"))  # TRL drops `completion_ids`
        if columns and "prompt" not in columns and not makes_prompts:
            remedy = (
                "Let its transform return one."
                if is_made_when_read(dataset)
                else f"Rename one, e.g. dataset.rename_column({columns[0]!r}, 'prompt')."
            )
            raise DataError(
                f"{what} has no `prompt` column (text or a conversation); it has {', '.join(map(repr, columns))}. "
                f"{remedy}"
            )


def _datasets(inputs: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    yield "train_dataset", inputs.get("train_dataset")
    evaluation = inputs.get("eval_dataset")
    if isinstance(evaluation, Mapping) and not hasattr(evaluation, "column_names"):
        yield from ((f"eval_dataset {name!r}", dataset) for name, dataset in evaluation.items())
    else:
        yield "eval_dataset", evaluation


def check_rows(args: TrainingArguments, dataset: Dataset, processes: int) -> None:
    """Refuse a training data set that does not fill one generation: nothing would be trained.

    Args:
        args: TRL's `GRPOConfig` or `RLOOConfig`.
        dataset: training data set.

    Raises:
        DataError: gives the number of rows, and the number in a generation.
    """
    needed = args.generation_batch_size // args.num_generations
    if hasattr(dataset, "__len__") and len(dataset) < needed:
        raise DataError(
            f"train_dataset has {len(dataset)} rows, fewer than the {_generation(args, processes)}, so nothing would "
            f"be trained; lower one of the first three, or give more prompts."
        )


def stream_too_short(args: TrainingArguments, processes: int) -> DataError:
    """The error for a stream that ended before it filled one generation. Only the training reads it, once.

    Args:
        args: TRL's `GRPOConfig` or `RLOOConfig`.
    """
    return DataError(
        f"train_dataset is a stream that has ended before it gave the {_generation(args, processes)}, so nothing was "
        f"trained; lower one of the first three, or give more prompts."
    )


def _generation(args: TrainingArguments, processes: int) -> str:
    """The prompts of one generation, and the settings that determine their number, in words."""
    return (
        f"{args.generation_batch_size // args.num_generations} prompts of one generation ({processes} processes x "
        f"per_device_train_batch_size {args.per_device_train_batch_size} x steps_per_generation "
        f"{args.steps_per_generation} / num_generations {args.num_generations})"
    )
