"""Reads the prompts of GRPO and RLOO before TRL does: their lengths in tokens (`lengths_of`), for the planner and for
the engines' limit (`context_length`), which comes with advice for a prompt that is too long (`context_limit`), and
prompts to which a policy cannot respond. TRL itself tokenizes prompts later, batch by batch (`check_tokenized`).
"""

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


EXACT = 8_000_000  # bytes of the longest prompts that are tokenized, some 6 s of one core; others have a bound
SPREAD = 512  # prompts from the shortest to the longest that are tokenized for the mean
BATCH = 64  # prompts that are tokenized at a time
READ = 1000  # prompts that are read at a time
ASSUMED = 512  # tokens of a prompt where the data set cannot be read in advance
_WORD = re.compile(r"\w")  # what every tokenizer makes a token of


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts.

    Args:
        mean: tokens of a prompt.
        longest: tokens of the longest prompt, or, of a large data set of prompts of about the same length, a bound of
            them; `None` where it is not known.
        counted: tokens of the longest prompt that was tokenized; 0 where none was.
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
    """The lengths of the prompts that are trained on, with the longest of all data sets.

    Args:
        train, evaluation: data sets; `None`, or, of the second, several by name.
        template: further arguments of the chat template.
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
    known = [each.longest for each in measured if each.longest is not None]
    if len(known) < len(measured):
        return Lengths(lengths.mean, None)
    return Lengths(lengths.mean, max(known), max(each.counted for each in measured))


def measure_lengths(
    dataset: Dataset,
    processing_class: PreTrainedTokenizerBase,
    template: Mapping[str, Any],
    what: str = "",
    vocabulary: int | None = None,
) -> Lengths:
    """The lengths of the prompts of a data set. Prompts to which the policy cannot respond are refused.

    A prompt has at most one token for each byte of its text, as in all common tokenizers. The prompts with most bytes
    are tokenized, until no other can have more tokens than the longest of them.

    Args:
        dataset: with a column `prompt` of text or conversations; otherwise, and if it has no length or makes its rows
            when they are read, nothing is known.
        template: further arguments of the chat template.
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
    by_bound = sorted(range(len(bounds)), key=lambda at: -bounds[at])
    spread = by_bound[:: max(1, len(by_bound) // SPREAD)][:SPREAD]
    counts = prompts.counts(spread)
    longest, read, at = max(counts, default=1), 0, 0
    while at < len(by_bound) and bounds[by_bound[at]] > longest and read < EXACT:
        batch = by_bound[at : at + BATCH]
        longest = max(longest, *prompts.counts(batch))
        read, at = read + sum(bounds[row] for row in batch), at + BATCH
    rest = bounds[by_bound[at]] if at < len(by_bound) else 0
    mean = sum(counts) / max(1, len(counts))
    return Lengths(max(1.0, mean), max(longest, rest), longest)


class _Prompts:
    """The prompts of a data set, each read when it is asked for.

    Args:
        column: of the data set.
    """

    def __init__(self, column: Any, processing_class: PreTrainedTokenizerBase, template: Mapping[str, Any]) -> None:
        self._column, self._tokenizer, self._template = column, processing_class, template

    def bounds(self, what: str = "", vocabulary: int | None = None) -> list[int]:
        """Most tokens of each prompt.

        Args:
            what, vocabulary, and what is raised: as of `measure_lengths`.
        """
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
            made = list(zip(rows, self._ids(self._at(rows)), strict=True))
            unknown = [row for row, ids in made if max(ids, default=0) >= vocabulary]
            refuse_tokens(what, [row for row, ids in made if not len(ids)], unknown, vocabulary)
        return bounds

    def _at(self, rows: Sequence[int]) -> list[Any]:
        return [self._column[row] for row in rows] if isinstance(self._column, list) else self._column[list(rows)]

    def counts(self, rows: Sequence[int]) -> list[int]:
        """The tokens of each of these prompts."""
        counts: list[int] = []
        for start in range(0, len(rows), BATCH):
            counts += [len(ids) for ids in self._ids(self._at(rows[start : start + BATCH]))]
        return counts

    def _texts(self) -> Iterator[str]:
        for start in range(0, len(self._column), READ):
            prompts = list(self._column[start : start + READ])
            is_text = isinstance(prompts[0], str)
            for at, prompt in enumerate(prompts, start):
                if not isinstance(prompt, str if is_text else list):
                    raise DataError(
                        f"prompt {at} of a data set is a {type(prompt).__name__} ({prompt!r:.80}); all prompts are "
                        f"texts, or all are conversations (lists of messages)."
                    )
            yield from prompts if is_text else self._in_template(prompts, tokenize=False)

    def _ids(self, prompts: Sequence[Any]) -> Any:
        if isinstance(prompts[0], str):
            return self._tokenizer(text=list(prompts))["input_ids"]
        return self._in_template(prompts, tokenize=True, return_dict=True)["input_ids"]

    def _in_template(self, prompts: Sequence[Any], **how: Any) -> Any:
        return self._tokenizer.apply_chat_template(list(prompts), add_generation_prompt=True, **how, **self._template)


def _doubts(tokenizer: PreTrainedTokenizerBase, vocabulary: int, *, may_be_empty: bool) -> Callable[[str], bool]:
    """A function that is true of texts that may have no tokens, or tokens outside the vocabulary.

    Args:
        vocabulary: number of the policy's tokens.
        may_be_empty: the tokenizer adds no tokens to a text.
    """
    beyond = {at: token.casefold() for token, at in tokenizer.get_vocab().items() if at >= vocabulary}
    # an added token stands in the text as it is written; another one may stand for any text
    may_be_any = not beyond.keys() <= set(getattr(tokenizer, "added_tokens_decoder", ()))

    def doubts(text: str) -> bool:
        if may_be_any or (may_be_empty and not _WORD.search(text)):
            return True
        return bool(beyond) and any(token in text.casefold() for token in beyond.values())

    return doubts


def check_tokenized(ids: Sequence[Sequence[int]], prompts: Sequence[Any], what: str, vocabulary: int) -> None:
    """Refuse prompts that could not be read in advance, where they are tokenized.

    Args:
        ids: the token ids of each prompt.
        prompts: texts or conversations, for messages.
        what: the data set that they are of.
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
    """The bytes of a text in UTF-8, in whichever form a tokenizer normalizes it to."""
    if text.isascii():
        return len(text)
    forms = (text, *(unicodedata.normalize(form, text) for form in ("NFD", "NFKD")))
    return max(len(form.encode("utf-8", "surrogatepass")) for form in forms)


def context_length(
    given: int | None, lengths: Lengths, completion: int, config: PretrainedConfig, *, is_open: bool = False
) -> int | None:
    """Most tokens of a prompt with its completion: the setting, or what the data sets need, or, where these do not say
    it, what the model has positions for; `None` if that is not known either.

    Args:
        given: `vllm_max_model_length`.
        completion: most tokens of a completion.
        config: the policy's Transformers config.
        is_open: prompts, or parts of them, are made while the run goes on.
    """
    positions = most_positions(config)
    if given is not None:
        return int(given)
    if is_open or lengths.longest is None:
        return positions
    needed = lengths.longest + completion
    return needed if positions is None else min(needed, positions)


def context_limit(tokens: int, config: PretrainedConfig) -> ContextLimit:
    """The limit of a context, with what to do about a prompt that is too long for it.

    Args:
        tokens: of the context.
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
    """Refuse data sets with a prompt after which the context has no room for a token.

    Args:
        context: most tokens of a prompt with its completion.
        config: the policy's Transformers config.

    Raises:
        DataError: gives the tokens of the longest prompt, and says what to do.
    """
    if lengths.counted >= context:
        raise DataError(context_limit(context, config).refusal("the longest prompt of the data sets", lengths.counted))
