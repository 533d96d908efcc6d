"""Global batches of prompts: the order of a dataset's rows, and the batches of a range of updates."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from ..common.notices import notice
from .rollout import Ragged, Rollouts


if TYPE_CHECKING:
    from datasets import Dataset


class PromptBatch:
    """One global batch: `prompts` with the columns `index` and `prompts`, and `rows`, the other columns of each
    sample."""

    def __init__(self, prompts: Rollouts, rows: Sequence[Mapping[str, object]]) -> None:
        self.prompts, self.rows = prompts, tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)


class SeededOrder(Sampler[int]):
    """Permutes the rows in every pass over the data, from (seed, pass).

    An update's number therefore determines its position in the data, so a resumed run continues where the earlier one
    stopped.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed, self.epoch = size, seed, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        seed = int(np.random.SeedSequence((self.seed, self.epoch)).generate_state(1, np.uint64)[0])
        generator = torch.Generator().manual_seed(seed >> 1)
        yield from torch.randperm(self.size, generator=generator).tolist()


class PaddingError(ValueError):
    """A row whose prompt cannot be separated from its padding.

    Args:
        row: position of the row among the collated rows.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


def collate_prompts(
    pad_token_id: int | None,
    data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
    *,
    is_special: bool = False,
) -> Callable[[list[Mapping[str, Any]]], PromptBatch]:
    """Makes the function that turns rows into a `PromptBatch`. It raises `PaddingError`.

    Args:
        data_collator: the user's collator. Only its `input_ids` and `attention_mask` are used, and their padding is
            removed, because engines pad on their own.
        is_special: whether the pad token is also the eos or the bos token, so that a prompt may contain it.
    """

    def collate(rows: list[Mapping[str, Any]]) -> PromptBatch:
        ids = [torch.as_tensor(row["input_ids"], dtype=torch.long) for row in rows]
        masks = [row.get("attention_mask") for row in rows]
        if data_collator is not None:
            collated = data_collator([dict(row) for row in rows])
            ids = list(torch.as_tensor(collated["input_ids"]).long())
            masks = list(collated.get("attention_mask", [None] * len(ids)))
        prompts = []
        for position, (row, mask) in enumerate(zip(ids, masks, strict=True)):
            try:
                prompts.append(_unpadded(row, mask, pad_token_id, is_special))
            except ValueError as error:
                raise PaddingError(str(error), position) from None
        index = torch.arange(len(rows))
        others = [{k: v for k, v in row.items() if k not in ("input_ids", "attention_mask")} for row in rows]
        return PromptBatch(Rollouts(index=index, prompts=Ragged.of(prompts, torch.long)), others)

    return collate


def _unpadded(ids: torch.Tensor, mask: object, pad_token_id: int | None, is_special: bool) -> torch.Tensor:
    """The token ids that `mask` keeps; without a mask, the ids without the padding at both ends.

    Without a mask, a special pad token at the beginning is padding, as in TRL. A single one at the end belongs to the
    prompt.

    Raises:
        ValueError: `mask` has another length, or several special pad tokens stand at the end.
    """
    if mask is not None:
        keeps = torch.as_tensor(mask).bool()
        if len(keeps) != len(ids):
            raise ValueError(f"an attention_mask of {len(keeps)} entries for {len(ids)} input_ids; give one for each")
        return ids[keeps]
    if not len(ids) or pad_token_id is None or pad_token_id not in (int(ids[0]), int(ids[-1])):
        return ids
    real = (ids != pad_token_id).nonzero().flatten().tolist()
    start, stop = (real[0], real[-1] + 1) if real else (len(ids), len(ids))
    if not is_special:
        return ids[start:stop]
    after = len(ids) - stop if real else len(ids)
    if after > 1:
        raise ValueError(
            f"{after} tokens {pad_token_id} at its end, which is the pad token and the eos or bos token: they may be "
            f"padding or prompt; give the column attention_mask, pad on the left, or give the tokenizer a separate pad "
            f"token"
        )
    if real and start:
        _notice_left_padding(pad_token_id)
    return ids[start:] if real else ids


@functools.cache
def _notice_left_padding(token: int) -> None:
    notice(
        f"prompts without an attention_mask begin with token {token}, which is the pad token and the eos or bos token: "
        f"it is taken for padding, as in TRL, and left out; give the column attention_mask to keep it."
    )


def prompt_loader(
    dataset: Dataset, batch_size: int, collate: Callable[[list[Any]], PromptBatch], order: Sampler[int] | None
) -> DataLoader[PromptBatch]:
    """Global batches, the same on every rank, because the plan assigns samples to devices.

    With `order` all batches are full, and the rows of a last partial one are left out of the pass. Without it all rows
    come in their order in the dataset.
    """
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=order,
        shuffle=False if order is None else None,
        collate_fn=collate,
        drop_last=order is not None,
    )


class Upcoming(NamedTuple):
    """The batch of one update.

    Args:
        is_first, is_last: whether it is the first or last batch that is read in its pass over the data.
        following: batches of the next updates, including those of the next passes.
    """

    batch: PromptBatch
    is_first: bool
    is_last: bool
    following: tuple[PromptBatch, ...]


def batches_of(loader: DataLoader[PromptBatch], start: int, stop: int, ahead: int = 1) -> Iterator[Upcoming]:
    """The batches of updates `start` to `stop`, in as many passes over the data as they need.

    Args:
        ahead: most batches that are read before their update.
    """
    window: deque[tuple[PromptBatch, bool, bool]] = deque()
    source = _in_passes(loader, start, stop)
    while True:
        window.extend(islice(source, ahead + 1 - len(window)))
        if not window:
            return
        batch, is_first, is_last = window.popleft()
        yield Upcoming(batch, is_first, is_last, tuple(of_next for of_next, _, _ in window))


def _in_passes(loader: DataLoader[PromptBatch], start: int, stop: int) -> Iterator[tuple[PromptBatch, bool, bool]]:
    """(batch, whether it is the first of its pass, whether it is the last of its pass)."""
    per_pass, step = len(loader), start
    while step < stop:
        if isinstance(loader.sampler, SeededOrder):
            loader.sampler.epoch = step // per_pass
        first_position = step % per_pass
        count = min(stop - step, per_pass - first_position)
        for position, batch in enumerate(islice(loader, first_position, first_position + count)):
            yield batch, not position, position == count - 1
        step += count
