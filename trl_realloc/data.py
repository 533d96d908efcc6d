"""Prompts: from a user's dataset (tokenised, text or conversations) to token ids with the columns beside them.

Everything that can be wrong with the data is found here, before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, Sampler

from .rollout import Ragged, Rollouts


class DataError(ValueError):
    """A dataset that PPO cannot train on. The message names the rows and what to do."""


def tokenize_prompts(dataset: Any, processing_class: Any, what: str, num_proc: int | None = None) -> Dataset:
    """A dataset with `input_ids` (lists without padding) and all its other columns, `prompt` among them where it had
    one.

    Args:
        dataset: with `input_ids`, or with `prompt`: text, or a conversation (a list of messages), to which the
            tokenizer's chat template is applied with a generation prompt.
        what: `train_dataset` or `eval_dataset`, for messages.

    Raises:
        DataError: no rows, or neither column.
    """
    if len(dataset) == 0:
        raise DataError(f"{what} is empty; PPO needs prompts to respond to.")
    columns = list(getattr(dataset, "column_names", None) or dataset[0])
    if "input_ids" in columns:
        return dataset  # type: ignore[no-any-return]
    if "prompt" not in columns:
        raise DataError(
            f"{what} has neither a `prompt` column (text or a conversation) nor `input_ids` (token ids); it has "
            f"{', '.join(map(repr, columns))}. Rename one, e.g. dataset.rename_column({columns[0]!r}, 'prompt')."
        )

    def encode(batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        prompts = batch["prompt"]
        if prompts and not isinstance(prompts[0], str):
            ids = processing_class.apply_chat_template(
                list(prompts), add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        else:
            ids = processing_class(text=list(prompts))["input_ids"]
        return {"input_ids": ids}

    return dataset.map(encode, batched=True, num_proc=num_proc, desc=f"Tokenizing {what}")  # type: ignore[no-any-return]


def check_prompts(dataset: Any, what: str, response_length: int, context_length: int | None, vocab_size: int) -> None:
    """Refuse prompts that leave no room for the response, that are empty, or whose ids the model does not know.

    Raises:
        DataError: naming the first rows concerned.
    """
    rows = [row["input_ids"] for row in dataset]
    empty = [at for at, row in enumerate(rows) if len(row) == 0]
    if empty:
        raise DataError(f"{what}: {_rows(empty)} no tokens; remove {_them(empty)} or give the tokenizer a bos token.")
    unknown = [at for at, row in enumerate(rows) if int(max(row)) >= vocab_size or int(min(row)) < 0]
    if unknown:
        raise DataError(
            f"{what}: {_rows(unknown)} token ids outside the model's vocabulary of {vocab_size}; tokenize with the "
            f"model's own tokenizer."
        )
    if context_length is None:
        return
    room = context_length - response_length
    long = [at for at, row in enumerate(rows) if len(row) > room]
    if long:
        longest = max(len(rows[at]) for at in long)
        raise DataError(
            f"{what}: {_rows(long)} a prompt longer than the {max(room, 0)} tokens that the model's context of "
            f"{context_length} leaves beside response_length {response_length} (the longest has {longest}); filter "
            f"{_them(long)} out or lower response_length."
        )


def _rows(at: Sequence[int]) -> str:
    shown = ", ".join(map(str, at[:5])) + (f" and {len(at) - 5} more" if len(at) > 5 else "")
    return f"row {shown} has" if len(at) == 1 else f"rows {shown} have"


def _them(at: Sequence[int]) -> str:
    return "it" if len(at) == 1 else "them"


class PromptBatch:
    """One global batch: `prompts` as `Rollouts` (`index`, `prompts`) and each sample's other columns as a dict."""

    def __init__(self, prompts: Rollouts, rows: Sequence[Mapping[str, Any]]) -> None:
        self.prompts, self.rows = prompts, tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)


class SeededOrder(Sampler[int]):
    """A new order of the rows for every pass, from (seed, pass): so a position in the data is a number, and a resumed
    run reads on where the other stopped. Another seed gives other orders in every pass."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed, self.epoch = size, seed, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        seed = int(np.random.SeedSequence((self.seed, self.epoch)).generate_state(1, np.uint64)[0])
        generator = torch.Generator().manual_seed(seed >> 1)
        yield from torch.randperm(self.size, generator=generator).tolist()


def collate_prompts(
    pad_token_id: int | None, data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None
) -> Callable[[list[Mapping[str, Any]]], PromptBatch]:
    """Rows to a `PromptBatch`. A user's collator is asked for `input_ids` (and `attention_mask`), whose padding is
    taken off again: padding is an engine's business."""

    def collate(rows: list[Mapping[str, Any]]) -> PromptBatch:
        ids = [torch.as_tensor(row["input_ids"], dtype=torch.long) for row in rows]
        masks = [row.get("attention_mask") for row in rows]
        if data_collator is not None:
            made = data_collator([dict(row) for row in rows])
            ids = list(torch.as_tensor(made["input_ids"]).long())
            masks = list(made.get("attention_mask", [None] * len(ids)))
        prompts = [_unpadded(row, mask, pad_token_id) for row, mask in zip(ids, masks, strict=True)]
        index = torch.arange(len(rows))
        others = [{k: v for k, v in row.items() if k not in ("input_ids", "attention_mask")} for row in rows]
        return PromptBatch(Rollouts(index=index, prompts=Ragged.of(prompts, torch.long)), others)

    return collate


def _unpadded(ids: torch.Tensor, mask: Any, pad_token_id: int | None) -> torch.Tensor:
    if mask is not None:
        return ids[torch.as_tensor(mask).bool()]
    if pad_token_id is None or int(ids[0]) != pad_token_id:
        return ids
    real = (ids != pad_token_id).nonzero()
    return ids[int(real[0]) :] if len(real) else ids


def prompt_loader(
    dataset: Any, batch_size: int, collate: Callable[[list[Any]], PromptBatch], order: Sampler[int] | None
) -> DataLoader[PromptBatch]:
    """Global batches, the same on every rank: a plan, not the launcher, deals samples to devices.

    In `order` whole batches only (a last partial one is left to the next pass); without one all rows in turn.
    """
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=order,
        shuffle=False if order is None else None,
        collate_fn=collate,
        drop_last=order is not None,
    )


def batches_of(loader: DataLoader[PromptBatch], start: int, stop: int) -> Iterator[tuple[PromptBatch, bool, bool]]:
    """The batches of updates `start` to `stop`, pass after pass, each in an order of its own. With each batch: whether
    it is the first that is read of its pass, and the last."""
    per_pass = len(loader)
    step = start
    while step < stop:
        if isinstance(loader.sampler, SeededOrder):
            loader.sampler.epoch = step // per_pass
        begins, first = True, step % per_pass
        for at, batch in enumerate(loader):
            if at < first:
                continue
            step += 1
            ends = at + 1 == per_pass or step == stop
            yield batch, begins, ends
            begins = False
            if ends:
                break
