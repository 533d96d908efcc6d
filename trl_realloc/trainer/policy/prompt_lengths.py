"""Reads the prompts of GRPO and RLOO before TRL does: their lengths in tokens (`lengths_of`), for the planner and for
the engines' limit (`context_length`), and prompts that a policy cannot respond to. `context_limit` adds advice for
prompts that are too long. TRL tokenizes prompts later, batch by batch (`check_tokenized`)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...algorithms.prompts import (
    NO_TOKENS,
    UNKNOWN_TOKENS,
    DataError,
    columns_of,
    is_made_when_read,
    refuse_tokens,
)
from ...engines.model_configs import most_positions
from ...runtime.samples.context_limit import ContextLimit
from .trl_sampling import tokenizer_of


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


EXACT = 8_000_000  # bytes of prompts to tokenize, some 6 s on one core; other prompts get an upper bound
SPREAD = 512  # prompts, spread over all lengths, that are tokenized for the mean
BATCH = 64  # prompts that are tokenized at a time
READ = 1000  # prompts that are read at a time
ASSUMED = 512  # tokens of a prompt where the data set cannot be read in advance
_WORD = re.compile(r"\w")  # a character that every tokenizer encodes


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts.

    Args:
        mean: mean number of tokens of a prompt.
        longest: tokens of the longest prompt, or an upper bound in a large data set of similar lengths; `None` if
            unknown.
        counted: tokens of the longest prompt that was tokenized; 0 if none was.
    """

    mean: float
    longest: int | None
    counted: int = 0

    @property
    def usual(self) -> int:
        """Tokens of a long prompt, for sizes that a longer one may exceed."""
        return self.counted or int(2 * self.mean)


def lengths_of(
    train: Dataset,
    evaluation: Dataset,
    processing_class: PreTrainedTokenizerBase,
    template: Mapping[str, Any],
    vocabulary: int,
) -> Lengths:
    """The lengths of the training prompts, with the longest of all data sets.

    Args:
        train, evaluation: data sets, or `None`; the second may be several by name.
        template: extra arguments of the chat template.
        vocabulary: number of the policy's tokens.

    Raises:
        DataError: see `measure_lengths`.
    """
    data = {"train_dataset": train}
    if isinstance(evaluation, Mapping):
        data |= {f"eval_dataset {name!r}": rows for name, rows in evaluation.items()}
    elif evaluation is not None:
        data["eval_dataset"] = evaluation
    measured = [measure_lengths(rows, processing_class, template, what, vocabulary) for what, rows in data.items()]
    lengths = measured[0]
    longest = [part.longest for part in measured if part.longest is not None]
    if len(longest) < len(measured):
        return Lengths(lengths.mean, None)
    return Lengths(lengths.mean, max(longest), max(part.counted for part in measured))


def measure_lengths(
    dataset: Dataset,
    processing_class: PreTrainedTokenizerBase,
    template: Mapping[str, Any],
    what: str = "",
    vocabulary: int | None = None,
) -> Lengths:
    """The lengths of the prompts of a data set. Prompts that the policy cannot respond to are refused.

    A prompt has at most one token per byte of its text, as in all common tokenizers. Prompts with the most bytes are
    tokenized first, until no other can exceed the longest of them.

    Args:
        dataset: rows with a column `prompt` of text or conversations. Otherwise, or if it has no length or creates its
            rows when they are read, nothing is known.
        template: extra arguments of the chat template.
        what: the name of the data set in messages.
        vocabulary: number of the policy's tokens; `None` for lengths alone.

    Raises:
        DataError: names rows without tokens, or with token ids outside the vocabulary.
    """
    if isinstance(dataset, list) and all(isinstance(row, Mapping) and "prompt" in row for row in dataset):
        # rows, which TRL evaluates on, have no columns
        _Prompts([row["prompt"] for row in dataset], processing_class, template).bounds(what, vocabulary)
        return Lengths(ASSUMED, None)
    if not hasattr(dataset, "__len__") or is_made_when_read(dataset) or "prompt" not in columns_of(dataset):
        return Lengths(ASSUMED, None)
    prompts = _Prompts(dataset["prompt"], processing_class, template)
    bounds = prompts.bounds(what, vocabulary)
    by_bound = sorted(range(len(bounds)), key=lambda index: -bounds[index])
    spread = by_bound[:: max(1, len(by_bound) // SPREAD)][:SPREAD]
    counts = prompts.counts(spread)
    longest, read, index = max(counts, default=1), 0, 0
    while index < len(by_bound) and bounds[by_bound[index]] > longest and read < EXACT:
        batch = by_bound[index : index + BATCH]
        longest = max(longest, *prompts.counts(batch))
        read, index = read + sum(bounds[row] for row in batch), index + BATCH
    rest = bounds[by_bound[index]] if index < len(by_bound) else 0
    mean = sum(counts) / max(1, len(counts))
    return Lengths(max(1.0, mean), max(longest, rest), longest)


class _Prompts:
    """The prompts of a data set, each read when needed."""

    def __init__(self, column: Any, processing_class: PreTrainedTokenizerBase, template: Mapping[str, Any]) -> None:
        self._column, self._tokenizer, self._template = column, processing_class, template

    def bounds(self, what: str = "", vocabulary: int | None = None) -> list[int]:
        """Maximum tokens of each prompt. Arguments and errors are those of `measure_lengths`."""
        (empty,) = self._tokenizer(text=[""])["input_ids"]
        added = len(empty) + 1  # the tokens around a text, and the space that some tokenizers put before it
        if vocabulary is None:
            return [added + _most_tokens(text) for text in self._texts()]
        doubts = _doubts(tokenizer_of(self._tokenizer), vocabulary, may_be_empty=not empty)
        bounds: list[int] = []
        doubtful: list[int] = []
        for row, text in enumerate(self._texts()):
            bounds.append(added + _most_tokens(text))
            if doubts(text):
                doubtful.append(row)
        for start in range(0, len(doubtful), BATCH):
            rows = doubtful[start : start + BATCH]
            tokenized = list(zip(rows, self._ids(self._at(rows)), strict=True))
            unknown = [row for row, ids in tokenized if max(ids, default=0) >= vocabulary]
            refuse_tokens(what, [row for row, ids in tokenized if not len(ids)], unknown, vocabulary)
        return bounds

    def _at(self, rows: Sequence[int]) -> list[Any]:
        return [self._column[row] for row in rows] if isinstance(self._column, list) else self._column[list(rows)]

    def counts(self, rows: Sequence[int]) -> list[int]:
        counts: list[int] = []
        for start in range(0, len(rows), BATCH):
            counts += [len(ids) for ids in self._ids(self._at(rows[start : start + BATCH]))]
        return counts

    def _texts(self) -> Iterator[str]:
        for start in range(0, len(self._column), READ):
            prompts = list(self._column[start : start + READ])
            is_text = isinstance(prompts[0], str)
            for index, prompt in enumerate(prompts, start):
                if not isinstance(prompt, str if is_text else list):
                    raise DataError(
                        f"prompt {index} of a data set is a {type(prompt).__name__} ({prompt!r:.80}); all prompts are "
                        f"texts, or all are conversations (lists of messages)."
                    )
            yield from prompts if is_text else self._in_template(prompts, tokenize=False)

    def _ids(self, prompts: Sequence[Any]) -> Any:
        if isinstance(prompts[0], str):
            return self._tokenizer(text=list(prompts))["input_ids"]
        return self._in_template(prompts, tokenize=True, return_dict=True)["input_ids"]

    def _in_template(self, prompts: Sequence[Any], **extra: Any) -> Any:
        return self._tokenizer.apply_chat_template(list(prompts), add_generation_prompt=True, **extra, **self._template)


def _doubts(tokenizer: PreTrainedTokenizerBase, vocabulary: int, *, may_be_empty: bool) -> Callable[[str], bool]:
    """A function that is true for texts that may have no tokens, or tokens outside the vocabulary. `may_be_empty`: the
    tokenizer adds no tokens to a text."""
    beyond = {token_id: token.casefold() for token, token_id in tokenizer.get_vocab().items() if token_id >= vocabulary}
    # an added token appears literally in the text; any other may encode any text
    may_be_any = not beyond.keys() <= set(getattr(tokenizer, "added_tokens_decoder", ()))

    def doubts(text: str) -> bool:
        if may_be_any or (may_be_empty and not _WORD.search(text)):
            return True
        return bool(beyond) and any(token in text.casefold() for token in beyond.values())

    return doubts


def check_tokenized(ids: Sequence[Sequence[int]], prompts: Sequence[Any], what: str, vocabulary: int) -> None:
    """When prompts are tokenized, refuse those that could not be read in advance.

    Args:
        ids: token ids of each prompt.
        prompts: texts or conversations, for messages.
        what: name of their data set.
        vocabulary: number of the policy's tokens.

    Raises:
        DataError: quotes a prompt without tokens, or with token ids outside the vocabulary.
    """
    for of_prompt, prompt in zip(ids, prompts, strict=True):
        if not len(of_prompt):
            raise DataError(f"{what}: the prompt {prompt!r:.200} has no tokens; {NO_TOKENS}.")
        if max(of_prompt) >= vocabulary:
            raise DataError(
                f"{what}: the prompt {prompt!r:.200} has the token id {max(of_prompt)}, outside the model's vocabulary "
                f"of {vocabulary}; {UNKNOWN_TOKENS}."
            )


def _most_tokens(text: str) -> int:
    """The bytes of a text in UTF-8, at most, in any normalization of a tokenizer."""
    if text.isascii():
        return len(text)
    forms = (text, *(unicodedata.normalize(form, text) for form in ("NFD", "NFKD")))
    return max(len(form.encode("utf-8", "surrogatepass")) for form in forms)


def context_length(
    setting: int | None, lengths: Lengths, completion: int, config: PretrainedConfig, *, is_open: bool = False
) -> int | None:
    """Maximum tokens of a prompt with its completion: the setting, otherwise what the data sets need, otherwise the
    model's positions; `None` if unknown.

    Args:
        setting: value of `vllm_max_model_length`.
        completion: maximum tokens of a completion.
        config: the policy's Transformers config.
        is_open: whether prompts, or parts of them, are created during the run.
    """
    positions = most_positions(config)
    if setting is not None:
        return int(setting)
    if is_open or lengths.longest is None:
        return positions
    needed = lengths.longest + completion
    return needed if positions is None else min(needed, positions)


def context_limit(tokens: int, config: PretrainedConfig) -> ContextLimit:
    """The limit of a context, with advice for a prompt that is too long.

    Args:
        tokens: maximum tokens of the context.
        config: the policy's Transformers config.
    """
    positions = most_positions(config)
    if positions is not None and tokens >= positions:
        no_more = "the model has no more positions: filter long prompts out of the data set"
        return ContextLimit(tokens, no_more, f"{no_more}, or lower max_completion_length")
    return ContextLimit(
        tokens, "set vllm_max_model_length to the tokens of the longest prompt and max_completion_length together"
    )


def check_lengths(lengths: Lengths, context: int, config: PretrainedConfig) -> None:
    """Refuse data sets with a prompt that leaves no room for a token in the context.

    Args:
        context: maximum tokens of a prompt with its completion.
        config: the policy's Transformers config.

    Raises:
        DataError: gives the tokens of the longest prompt, and advice.
    """
    if lengths.counted >= context:
        raise DataError(context_limit(context, config).refusal("the longest prompt of the data sets", lengths.counted))
