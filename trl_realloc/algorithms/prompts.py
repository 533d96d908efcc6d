"""Reads, tokenizes and checks a user's dataset of prompts (token ids, text or conversations), before a model is loaded.
Batches of it are in `prompt_batches`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, Json

from ..common.errors import shown
from ..common.settings import no_room
from .prompt_batches import PaddingError, PromptBatch


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# advice in error messages
NO_TOKENS = "filter such prompts out, or give the tokenizer a bos token"
UNKNOWN_TOKENS = (
    "tokenize with the model's own tokenizer, or after adding tokens to it call "
    "model.resize_token_embeddings(len(tokenizer))"
)


class DataError(ValueError):
    """A dataset that cannot be trained on. The message names the rows and the remedy."""


def tokenize_prompts(
    dataset: Dataset, processing_class: PreTrainedTokenizerBase, what: str, num_proc: int | None = None
) -> Dataset:
    """Add the columns `input_ids` (lists of token ids) and `attention_mask`, if the tokenizer makes one, to a dataset
    without `input_ids`.

    Args:
        dataset: dataset with `input_ids`, or with `prompt`: text, or a conversation (a list of messages), to which the
            tokenizer's chat template is applied with a generation prompt.
        what: name of the dataset in messages, `train_dataset` or `eval_dataset`.

    Raises:
        DataError: the dataset has no rows, or neither column.
    """
    dataset = as_dataset(dataset, what)
    columns = dataset.column_names
    if "input_ids" in columns:
        return dataset
    if "prompt" not in columns:
        raise DataError(
            f"{what} has neither a `prompt` column (text or a conversation) nor `input_ids` (token ids); it has "
            f"{', '.join(map(repr, columns))}. Rename one, e.g. dataset.rename_column({columns[0]!r}, 'prompt')."
        )

    def encode(batch: Mapping[str, Sequence[object]]) -> dict[str, Any]:
        prompts = batch["prompt"]
        if prompts and not isinstance(prompts[0], str):
            try:
                tokens = processing_class.apply_chat_template(
                    list(prompts), add_generation_prompt=True, tokenize=True, return_dict=True
                )
            except Exception as error:  # no template, or one that refuses these roles
                raise DataError(f"{what}: the tokenizer's chat template cannot be applied ({error}).") from None
        else:
            tokens = processing_class(text=list(prompts))
        return {name: tokens[name] for name in ("input_ids", "attention_mask") if name in tokens}

    # one process of a host tokenizes and the others read its cache; a dataset in memory has no cache
    cached = bool(getattr(dataset, "cache_files", None))
    with PartialState().local_main_process_first() if cached else contextlib.nullcontext():
        return dataset.map(  # type: ignore[no-any-return]
            encode, batched=True, num_proc=num_proc, desc=f"Tokenizing {what}"
        )


def as_dataset(dataset: Dataset, what: str) -> Dataset:
    """A dataset of prompts as a `Dataset`.

    Args:
        dataset: a `Dataset`, which is returned unchanged unless it has a transform, or any sequence of rows. A
            transform (`set_transform`, `with_transform`) is applied once to each row.

    Raises:
        DataError: a stream, a dataset with several splits, or an object without rows.
    """
    if not isinstance(dataset, Dataset):
        dataset = _converted(dataset, what)
    if len(dataset) == 0:
        raise DataError(f"{what} is empty; PPO needs prompts to respond to.")
    if is_made_when_read(dataset):
        dataset = dataset.map(dict, batched=True, remove_columns=dataset.column_names).with_format(None)
    for column in ("input_ids",) if "input_ids" in dataset.column_names else ("prompt",):
        if column in dataset.column_names:
            _check_column(dataset, column, what)
    return dataset


def is_made_when_read(dataset: Any) -> bool:
    """True for a dataset with a transform (`set_transform`, `with_transform`), whose rows differ from its columns."""
    return isinstance(dataset, Dataset) and dataset.format["type"] == "custom"


def columns_of(dataset: Any) -> list[str]:
    """The columns of a dataset's rows; empty if they are unknown before the rows are read, as in some streams."""
    if is_made_when_read(dataset):
        return list(dataset[0]) if len(dataset) else []
    columns = getattr(dataset, "column_names", None)
    return columns if isinstance(columns, list) else []


def _converted(dataset: Dataset, what: str) -> Dataset:
    if dataset is None:
        raise DataError(f"`{what}` is required: the prompts to respond to.")
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        splits = ", ".join(map(repr, dataset))
        raise DataError(f"{what} has the splits {splits}; pass one of them, like dataset[{next(iter(dataset), '')!r}].")
    if isinstance(dataset, IterableDataset | torch.utils.data.IterableDataset):
        raise DataError(
            f"{what} is a stream ({type(dataset).__name__}), whose number of rows is not known; take as many as the "
            f"run needs, like Dataset.from_list(list(dataset.take(10_000)))."
        )
    if isinstance(dataset, Mapping):
        raise DataError(f"{what} is a mapping; make a dataset of its columns with Dataset.from_dict(…).")
    if isinstance(dataset, str | bytes | os.PathLike):
        raise DataError(
            f"{what} must be a Dataset, not the name {shown(dataset)}; load it with datasets.load_dataset(…)."
        )
    try:
        rows = [dataset[row] for row in range(len(dataset))]
    except (TypeError, KeyError, IndexError):
        raise DataError(f"{what} must be a datasets.Dataset or a list of rows, not {shown(dataset)}.") from None
    if not all(isinstance(row, Mapping) for row in rows):
        raise DataError(f"{what}: its rows must be dicts like {{'prompt': …}}, not like {shown(rows[0])}.")
    try:
        return Dataset.from_list([dict(row) for row in rows])
    except (TypeError, ValueError) as error:  # pyarrow's errors are of these types
        raise DataError(f"{what}: its rows are not all alike ({str(error).splitlines()[0]}).") from None


def _check_column(dataset: Dataset, column: str, what: str) -> None:
    """Raises `DataError` if prompts are neither text nor conversations, or `input_ids` are not token ids."""
    kind = dataset.features[column]
    item = getattr(kind, "feature", kind[0] if isinstance(kind, list) and kind else None)
    if column == "prompt" and isinstance(kind if item is None else item, Json):
        _check_json(dataset, column, what)
        return
    if column == "input_ids":
        valid, expected = _is_value(item, "int"), "lists of token ids"
    else:
        conversation = isinstance(item, Mapping) and {"role", "content"} <= set(item)
        valid, expected = (
            _is_value(kind, "string") or conversation,
            "text, or conversations (lists of role and content)",
        )
    if not valid:
        raise DataError(f"{what}: the column {column!r} must hold {expected}, and holds {_type_name(kind)}.")
    cells = dataset.data.column(column)
    absent = cells.null_count or (column == "input_ids" and pc.list_flatten(cells).null_count)
    if absent or (item is not None and pc.min(pc.list_value_length(cells)).as_py() == 0 and column == "prompt"):
        rows = [row for row, cell in enumerate(dataset.with_format(None)[column]) if _is_empty(cell)]
        if rows:
            raise DataError(
                f"{what}: {_rows(rows)} no {column!r}, an empty one, or one with None in it; filter {_them(rows)} out."
            )


def _check_json(dataset: Dataset, column: str, what: str) -> None:
    """Raises `DataError` if prompts in a JSON column, whose type does not tell, are neither all text nor all
    conversations."""
    cells = dataset.with_format(None)[column]
    is_text = isinstance(cells[0], str)
    wrong = [
        row for row, cell in enumerate(cells) if not (isinstance(cell, str) if is_text else _is_conversation(cell))
    ]
    if wrong:
        raise DataError(
            f"{what}: {_rows(wrong)} a {column!r} that is no {'text' if is_text else 'conversation'}; all must be "
            f"text, or all conversations (lists of messages, each with a role). Filter {_them(wrong)} out or rewrite "
            f"{_them(wrong)}."
        )


def _is_conversation(cell: object) -> bool:
    return isinstance(cell, list) and bool(cell) and all(isinstance(part, Mapping) and "role" in part for part in cell)


def _is_empty(cell: Any) -> bool:
    """True if a prompt is missing, is an empty list, or has `None` in it. Empty text is not counted here."""
    return cell is None or (not isinstance(cell, str) and (len(cell) == 0 or any(part is None for part in cell)))


def _is_value(kind: object, of: str) -> bool:
    """True if a column's type is text (`of` is `string`) or an integer (`of` is `int`)."""
    name = str(getattr(kind, "dtype", ""))
    return name.removeprefix("u").startswith(of) or (of == "string" and name in ("large_string", "string_view"))


def _type_name(kind: object) -> str:
    return str(getattr(kind, "dtype", None) or kind)[:120]


def check_prompts(
    dataset: Dataset,
    what: str,
    response_length: int,
    context_length: int | None,
    vocab_size: int,
    collate: Callable[[list[Any]], PromptBatch],
    *,
    all_columns: bool = False,
    model_name: str = "the model",
) -> list[int]:
    """Refuse prompts that are empty, that leave no room for the response, or whose ids are not in the vocabulary. Reads
    the dataset once.

    Args:
        response_length: most tokens of a response.
        context_length: most tokens of a sample in the model; `None` for no limit.
        collate: the collator of the training (`collate_prompts`). Its output is checked.
        all_columns: whether `collate` reads more columns than `input_ids` and `attention_mask`.
        model_name: name of the model with `context_length` in messages.

    Returns:
        The tokens of each prompt, without padding.

    Raises:
        DataError: names the first rows with the problem, or the response that leaves no room for any prompt; or the
            first row whose prompt cannot be separated from its padding (`collate_prompts`).
    """
    lengths: list[int] = []
    empty: list[int] = []
    unknown: list[int] = []
    for rows in _chunks(dataset, all_columns):
        try:
            prompts = collate(rows).prompts.ragged("prompts")
        except PaddingError as error:
            raise DataError(f"{what}: {_rows([len(lengths) + error.row])} {error}.") from None
        for ids in prompts.rows():
            row = len(lengths)
            lengths.append(len(ids))
            if not len(ids):
                empty.append(row)
            elif int(ids.max()) >= vocab_size or int(ids.min()) < 0:
                unknown.append(row)
    refuse_tokens(what, empty, unknown, vocab_size)
    room = (context_length or 1 << 60) - response_length
    if problem := no_room(response_length, context_length or None, model_name):
        raise DataError(f"{problem} (the longest prompt of {what} has {max(lengths)} tokens).")
    too_long = [row for row, length in enumerate(lengths) if length > room]
    if too_long:
        raise DataError(
            f"{what}: {_rows(too_long)} a prompt longer than the {room} tokens that {model_name}'s context of "
            f"{context_length} leaves beside response_length {response_length} (the longest has {max(lengths)}); "
            f"filter {_them(too_long)} out or lower response_length."
        )
    return lengths


def refuse_tokens(what: str, empty: Sequence[int], unknown: Sequence[int], vocab_size: int) -> None:
    """Raises `DataError` for rows without tokens, and for rows with token ids that the model has no embedding of."""
    if empty:
        raise DataError(f"{what}: {_rows(empty)} no tokens; {NO_TOKENS}.")
    if unknown:
        raise DataError(
            f"{what}: {_rows(unknown)} token ids outside the model's vocabulary of {vocab_size}; {UNKNOWN_TOKENS}."
        )


def _chunks(dataset: Dataset, all_columns: bool, rows: int = 1000) -> Iterator[list[dict[str, Any]]]:
    """The rows in order, `rows` at a time. Without `all_columns`, only the prompts' columns are decoded."""
    if not hasattr(dataset, "select_columns"):
        yield from ([dataset[j] for j in range(i, min(i + rows, len(dataset)))] for i in range(0, len(dataset), rows))
        return
    if not all_columns:
        dataset = dataset.select_columns([n for n in ("input_ids", "attention_mask") if n in dataset.column_names])
    for batch in dataset.iter(rows):
        yield [dict(zip(batch, cells, strict=True)) for cells in zip(*batch.values(), strict=True)]


def _rows(rows: Sequence[int]) -> str:
    """The rows and a verb, for messages: `row 3 has`, `rows 1, 2 have`."""
    numbers = ", ".join(map(str, rows[:5])) + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")
    return f"row {numbers} has" if len(rows) == 1 else f"rows {numbers} have"


def _them(rows: Sequence[int]) -> str:
    return "it" if len(rows) == 1 else "them"
