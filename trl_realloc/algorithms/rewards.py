"""Rewards as in TRL's GRPO: reward models and Python functions, sync or async, several of them with weights. Scores are
checked before anything is trained on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .async_functions import awaited
from .nonfinite import LARGEST, is_bad, is_infinite, quoted
from .rollout import Ragged, Rollouts


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


RewardFunction = Callable[..., Any]
ARGUMENTS = ("prompts", "completions", "completion_ids")  # arguments of a reward function beside the dataset's columns


class RewardError(ValueError):
    """A reward that cannot be trained on. The message names the function, the sample and the value."""


class NonFiniteScore(RewardError):
    """A score that is NaN, infinite, or too large to be trained on.

    Args:
        scores: (n,) float32, scores of all samples, with infinity in place of too large ones.
    """

    def __init__(self, message: str, scores: Tensor) -> None:
        super().__init__(message)
        self.scores = scores


@dataclass(frozen=True)
class Texts:
    """The arguments of a reward function: prompts and completions as text or as conversations, and the dataset's other
    columns. Each is a list with one entry per sample."""

    prompts: list[Any]
    completions: list[Any]
    columns: dict[str, list[Any]]


@dataclass(frozen=True)
class RewardModelSource:
    """A reward model by name, with the function that loads it, and its tokenizer if it differs from the policy's."""

    name: str
    load: Callable[[], PreTrainedModel]
    processing_class: PreTrainedTokenizerBase = None


def check_columns_free(columns: Sequence[str], dataset: str, reserved: Sequence[str] = ARGUMENTS) -> None:
    """Raises `RewardError` if a column for reward functions has the name of another argument of theirs.

    Args:
        dataset: name of the dataset with these columns, for the message.
    """
    if taken := [name for name in reserved if name in columns]:
        raise RewardError(
            f"{dataset} has the column {taken[0]!r}, but reward functions get the {taken[0]} of the run by this name; "
            f"rename it, e.g. dataset.rename_column({taken[0]!r}, 'given_{taken[0]}'), or remove it."
        )


def decode(samples: Rollouts, rows: Sequence[Mapping[str, object]], processing_class: PreTrainedTokenizerBase) -> Texts:
    """Decode samples to text without special tokens.

    A prompt is the dataset's `prompt` if there is one. The completion to a conversation is a conversation of one
    message, as in GRPO.
    """
    prompt_ids = [row.tolist() for row in samples.ragged("prompts").rows()]
    decoded = processing_class.batch_decode(prompt_ids, skip_special_tokens=True)
    prompts = [row.get("prompt", text) for row, text in zip(rows, decoded, strict=True)]
    completion_ids = [row.tolist() for row in samples.ragged("responses").rows()]
    texts = processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return Texts(prompts, completions, {name: [row.get(name) for row in rows] for name in names})


@dataclass(frozen=True)
class FunctionReward:
    """`function(prompts=…, completions=…, completion_ids=…, **columns)`, which may be async.

    It returns a number per sample, or `None` for a sample to which it does not apply. It gets the arguments that its
    parameters name, or all if it takes `**kwargs`.

    Attributes:
        times: (start, end) of its calls since `take_times`, seconds since the epoch.
    """

    function: RewardFunction
    name: str
    times: list[tuple[float, float]] = field(default_factory=list, init=False, compare=False, repr=False)

    def take_times(self) -> list[tuple[float, float]]:
        """Return `times` and clear it."""
        taken = self.times[:]
        del self.times[: len(taken)]
        return taken

    def check_parameters(self, columns: Sequence[str], dataset: str) -> None:
        """Raises `RewardError` if a parameter of the function is none of the arguments and columns.

        Args:
            dataset: name of the dataset with these columns, for the message.
        """
        available = [*ARGUMENTS, *columns]
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # a built-in function
            raise RewardError(
                f"reward function {self.name!r} has no readable signature; wrap it in one that takes (completions, "
                f"**columns)."
            ) from None
        unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if unnamed:
            raise RewardError(
                f"reward function {self.name!r} takes {', '.join(unnamed)} by position only, but is called with named "
                f"arguments (prompts=…, completions=…, columns); remove the / from its parameters."
            )
        needed = [
            p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        missing = [name for name in needed if name not in available]
        if missing:
            raise RewardError(
                f"reward function {self.name!r} takes {', '.join(map(repr, missing))}, which is no column of "
                f"{dataset}; available are {', '.join(available)}."
            )

    def call(self, samples: Rollouts, texts: Callable[[], Texts]) -> Any:
        """Call the function and return its answer, which may be awaitable. Raises `RewardError` if the function
        raises."""
        inputs = texts()
        arguments: dict[str, Any] = {
            **inputs.columns,
            "prompts": inputs.prompts,
            "completions": inputs.completions,
            "completion_ids": [row.tolist() for row in samples.ragged("responses").rows()],
        }
        parameters = inspect.signature(self.function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        with self._named(), self._timed():
            answer = self.function(**arguments)
        if inspect.isawaitable(answer):  # timed when it is awaited
            self.times.pop()
        return answer

    async def result(self, answer: object) -> Any:
        """The answer of `call`, awaited if it is awaitable."""
        if not inspect.isawaitable(answer):
            return answer
        with self._named(), self._timed():
            return await answer

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self.times.append((start, max(start, time.time())))

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise RewardError(f"reward function {self.name!r} raised {type(error).__name__}: {error}") from error

    def checked(self, scores: Any, samples: Rollouts, texts: Texts) -> Tensor:
        """The function's result as a tensor, (n,) float32, with NaN for `None`.

        Raises:
            RewardError: the result is not a list of numbers, or not one number per sample.
            NonFiniteScore: a score cannot be trained on.
        """
        try:
            if isinstance(scores, str | bytes | Mapping | Set):
                raise TypeError(f"it returned a {type(scores).__name__}")
            scores = [None if score is None else _number(score) for score in scores]
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"reward function {self.name!r} must return a list of numbers, one for each completion ({error})."
            ) from None
        if len(scores) != len(samples):
            raise RewardError(
                f"reward function {self.name!r} returned {len(scores)} scores for {len(samples)} completions; it must "
                f"return one for each. Nothing was trained on this batch."
            )
        tensor = torch.tensor([0.0 if score is None else score for score in scores], dtype=torch.float32)
        _check_finite(f"reward function {self.name!r} returned", tensor, scores, samples, lambda: texts)
        return tensor.masked_fill(torch.tensor([score is None for score in scores], dtype=torch.bool), math.nan)


def _number(score: Any) -> float:
    if isinstance(score, str | bytes):  # float() would accept it
        raise TypeError(f"{score!r} is text")
    return float(score)


def _check_finite(
    scorer: str, scores: Tensor, originals: Sequence[Any], samples: Rollouts, texts: Callable[[], Texts]
) -> None:
    """Raises `NonFiniteScore` if one of the `scores` (n,) cannot be trained on. The message begins with `scorer`, such
    as `reward model 'x' gave`, and has the score of `originals`, the scorer's result."""
    bad_positions = is_bad(scores).nonzero()
    if not len(bad_positions):
        return
    first, decoded = int(bad_positions[0]), texts()
    sample = int(samples.tensor("index")[first])
    texts_of_sample = quoted(decoded.prompts[first], decoded.completions[first])
    raise NonFiniteScore(
        f"{scorer} {float(originals[first]):g} for sample {sample} of the batch ({texts_of_sample}); scores must be "
        f"finite, and at most {LARGEST:g}, so that their squares can be summed in float32. Nothing was trained on this "
        f"batch.",
        scores.masked_fill(is_infinite(scores), math.inf),
    )


def answers_of(functions: Sequence[FunctionReward], samples: Rollouts, texts: Callable[[], Texts]) -> list[Any]:
    """The result of each function. Async functions run concurrently."""
    answers = [function.call(samples, texts) for function in functions]
    if not any(inspect.isawaitable(answer) for answer in answers):
        return answers

    async def gathered() -> list[Any]:
        return await asyncio.gather(*(f.result(answer) for f, answer in zip(functions, answers, strict=True)))

    results: list[Any] = awaited(gathered())
    return results


class ModelReward:
    """A reward model in an engine.

    Args:
        forward: function of samples that returns the column `scores`, (n,).
        processing_class: the model's own tokenizer, with which the decoded samples are tokenized again; `None` to use
            the policy's token ids.
        tokens: token ids that the model reads for each sample, instead of its prompt and response.
        positions: most tokens that the model can read; `None` for no limit.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[[Rollouts], Mapping[str, Ragged]],
        processing_class: PreTrainedTokenizerBase | None = None,
        tokens: Ragged | None = None,
        positions: int | None = None,
    ) -> None:
        self.name, self.forward, self.processing_class, self.tokens = name, forward, processing_class, tokens
        self.positions = positions

    def score(self, samples: Rollouts, texts: Callable[[], Texts]) -> Tensor:
        """Scores of the samples, (n,) float32.

        Raises:
            NonFiniteScore: a score cannot be trained on.
            RewardError: a sample has more tokens than the model can read.
        """
        if self.tokens is not None:
            inputs = whole_texts(self.tokens).plus(index=samples.tensor("index"))
        else:
            inputs = self._retokenized(samples, texts()) if self.processing_class is not None else samples
        lengths = inputs.ragged("prompts").lengths + inputs.ragged("responses").lengths if len(inputs) else None
        if self.positions is not None and lengths is not None and int(lengths.max()) > self.positions:
            raise RewardError(
                f"reward model {self.name!r} can read {self.positions} tokens, and sample "
                f"{int(inputs.tensor('index')[int(lengths.argmax())])} of the batch has {int(lengths.max())} by its "
                f"tokenizer; shorten prompts or responses, or give a model with more positions."
            )
        outputs = self.forward(inputs)
        scores = outputs["scores"].values if outputs else torch.empty(0)
        _check_finite(f"reward model {self.name!r} gave", scores, scores.tolist(), samples, texts)
        return scores

    def _retokenized(self, samples: Rollouts, texts: Texts) -> Rollouts:
        tokenizer: Any = self.processing_class
        joined = [
            prompt + completion
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
            for prompt, completion in zip(texts.prompts, texts.completions, strict=True)
        ]
        ids = tokenizer(text=joined, add_special_tokens=all(isinstance(p, str) for p in texts.prompts))["input_ids"]
        limit = getattr(tokenizer, "model_max_length", None) or 1 << 30
        cut = Ragged.of([row[:limit] for row in ids], torch.long)
        return whole_texts(cut).plus(index=samples.tensor("index"))


def whole_texts(tokens: Ragged) -> Rollouts:
    """Samples for a reward model that reads a prompt and its completion as one text: `responses` has the text's token
    ids, `prompts` are empty."""
    lengths = torch.zeros_like(tokens.lengths)
    return Rollouts(prompts=Ragged(tokens.values[:0], lengths), responses=tokens)


def weighted_scores(
    models: Sequence[ModelReward],
    functions: Sequence[FunctionReward],
    weights: Mapping[str, float],
    samples: Rollouts,
    texts: Callable[[], Texts],
    *,
    refuse: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Score samples with reward models and functions.

    Args:
        models: reward models. They run first, and also without samples, because the forward of a sharded model is a
            collective of all ranks of the call.
        weights: weights by the name of the scorer.
        refuse: whether to raise for a score that is not finite, and if no scorer applies to a sample. Otherwise the
            sample's sum is infinite or NaN.

    Returns:
        The weighted sum over the scorers that apply to a sample, (n,) float32; and the scores of each scorer by name,
        with NaN for missing scores.

    Raises:
        RewardError: see `FunctionReward` and `refuse`.
    """
    texts = functools.cache(texts)
    table: dict[str, Tensor] = {}  # `read_rewards` makes the names unique
    failure: NonFiniteScore | None = None
    unusable: list[Tensor] = []

    def add(name: str, score: Callable[[], Tensor]) -> None:
        nonlocal failure
        try:
            table[name] = score()
        except NonFiniteScore as error:  # raised after the last model has run, whose forward is a collective
            failure, table[name] = failure or error, error.scores.masked_fill(is_bad(error.scores), math.inf)
            unusable.append(error.scores)

    for model in models:
        add(model.name, partial(model.score, samples, texts))
    if not len(samples) or not (models or functions):
        return torch.zeros(len(samples)), {}
    for function, answer in zip(functions, answers_of(functions, samples, texts), strict=True):
        add(function.name, partial(function.checked, answer, samples, texts()))
    if failure is not None and refuse:
        raise failure
    stacked = torch.stack(list(table.values()))
    unscored = stacked.isnan().all(0)
    if unscored.any() and refuse:
        first, decoded = int(unscored.nonzero()[0]), texts()
        raise RewardError(
            f"{' and '.join(map(repr, table))} returned None for sample {int(samples.tensor('index')[first])} of the "
            f"batch ({quoted(decoded.prompts[first], decoded.completions[first])}). Nothing was trained on this batch; "
            f"return a number, or set skip_nonfinite_updates: true, which leaves such updates out."
        )
    factors = torch.tensor([weights[name] for name in table], dtype=torch.float32)
    total = torch.nansum(stacked * factors[:, None], 0).masked_fill(unscored, math.nan)
    for scores in reversed(unusable):  # also if the weight of the score is 0
        total = torch.where(is_bad(scores), scores, total)
    return total, table


@dataclass(frozen=True)
class Rewards:
    """The reward models and functions of a run, and the weight of each by name."""

    models: tuple[RewardModelSource, ...]
    functions: tuple[FunctionReward, ...]
    weights: dict[str, float]


def read_rewards(
    reward_model: object,
    load: Callable[[object], object],
    processing_classes: object = None,
    weights: Sequence[float] | None = None,
) -> Rewards:
    """The models and functions in the trainer's argument `reward_model`. Loads no model.

    Args:
        reward_model: a model, a model's name, a function, or a list of these.
        load: loads a model, given the model or its name.
        processing_classes: the tokenizer of each model; `None` for the policy's.

    Raises:
        RewardError: there is no reward, or lists have different lengths.
    """
    rewards = list(reward_model) if isinstance(reward_model, (list, tuple)) else [reward_model]
    if not rewards or any(reward is None for reward in rewards):
        raise RewardError(
            "reward_model is missing; give a model, a model's name or path, a function, or a list of them."
        )
    tokenizers = list(processing_classes) if isinstance(processing_classes, (list, tuple)) else [processing_classes]
    tokenizers = tokenizers if len(tokenizers) > 1 or processing_classes is not None else [None] * len(rewards)
    factors = [1.0] * len(rewards) if weights is None else [float(weight) for weight in weights]
    for name, values in (("reward_processing_classes", tokenizers), ("reward_weights", factors)):
        if len(values) != len(rewards):
            raise RewardError(f"{name} has {len(values)} entries for {len(rewards)} rewards; give one for each.")
    models: list[RewardModelSource] = []
    functions: list[FunctionReward] = []
    weight_by_name: dict[str, float] = {}
    for reward, tokenizer, weight in zip(rewards, tokenizers, factors, strict=True):
        is_model = isinstance(reward, str) or hasattr(reward, "config")
        name = base = _reward_name(reward)
        number = sum(other.startswith(base) for other in weight_by_name)
        while name in weight_by_name:
            number += 1
            name = f"{base}_{number}"
        weight_by_name[name] = weight
        if is_model:
            models.append(RewardModelSource(name, partial(load, reward), tokenizer))
        elif callable(reward):
            functions.append(FunctionReward(reward, name))
        else:
            raise RewardError(f"a reward is a model, a name or path, or a function, not {type(reward).__name__}.")
    return Rewards(tuple(models), tuple(functions), weight_by_name)


def _reward_name(reward: object) -> str:
    if isinstance(reward, str):
        return reward.rstrip("/").split("/")[-1]
    if hasattr(reward, "config"):
        return str(getattr(reward.config, "_name_or_path", "") or type(reward).__name__).rstrip("/").split("/")[-1]
    return str(getattr(reward, "__name__", type(reward).__name__))
