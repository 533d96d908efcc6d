"""Rewards as GRPO's users know them: reward models and Python functions, sync or async, several with weights.

What they return is checked here, before anything is trained on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .nonfinite import LARGEST, is_bad, quoted
from .rollout import Ragged, Rollouts


RewardFunction = Callable[..., Any]


class RewardError(ValueError):
    """A reward that cannot be trained on. The message names the function, the sample and the value."""


class NonFiniteScore(RewardError):
    """A score that is NaN, infinite, or too large to be trained on.

    Args:
        scores: (n,) float32, all that the scorer gave, infinite where that is so.
    """

    def __init__(self, message: str, scores: Tensor) -> None:
        super().__init__(message)
        self.scores = scores


@dataclass(frozen=True)
class Texts:
    """What a reward function is called with: prompts and completions as text or as conversations, and the dataset's
    other columns, each a list with one entry per sample."""

    prompts: list[Any]
    completions: list[Any]
    columns: dict[str, list[Any]]


@dataclass(frozen=True)
class RewardModelSource:
    """A reward model to be scored with: how to get it, and its own tokenizer if it has one."""

    name: str
    load: Callable[[], Any]
    processing_class: Any = None


def decode(samples: Rollouts, rows: Sequence[Mapping[str, Any]], processing_class: Any) -> Texts:
    """Samples as text: the dataset's own `prompt` where it has one, completions without special tokens; a completion
    to a conversation is a conversation of one message, as in GRPO."""
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
    """`function(prompts=…, completions=…, completion_ids=…, **columns)` -> one number (or None: does not apply) per
    sample; may be async. It is given those of its parameters' names, all of them if it takes `**kwargs`."""

    function: RewardFunction
    name: str

    def check_parameters(self, columns: Sequence[str]) -> None:
        """Refuse a function that asks for what there is not. Raises `RewardError`."""
        given = ["prompts", "completions", "completion_ids", *columns]
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # a built-in function
            raise RewardError(
                f"reward function {self.name!r} does not say its parameters; wrap it in one that takes (completions, "
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
        missing = [name for name in needed if name not in given]
        if missing:
            raise RewardError(
                f"reward function {self.name!r} takes {', '.join(map(repr, missing))}, which is no column of the "
                f"dataset; it can be given {', '.join(given)}."
            )

    def ask(self, samples: Rollouts, texts: Callable[[], Texts]) -> Any:
        """What the function returns, which may be awaitable. Raises `RewardError` with its name where it raises."""
        given = texts()
        arguments: dict[str, Any] = {
            **given.columns,
            "prompts": given.prompts,
            "completions": given.completions,
            "completion_ids": [row.tolist() for row in samples.ragged("responses").rows()],
        }
        parameters = inspect.signature(self.function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        with self._named():
            return self.function(**arguments)

    async def finish(self, answer: Any) -> Any:
        """The answer itself, once it is there."""
        with self._named():
            return await answer if inspect.isawaitable(answer) else answer

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise RewardError(f"reward function {self.name!r} raised {type(error).__name__}: {error}") from error

    def checked(self, scores: Any, samples: Rollouts, texts: Texts) -> Tensor:
        """The function's answer as scores (n,) float32, NaN for `None`.

        Raises:
            RewardError: it is no list of numbers, or not one for each sample.
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
        given = torch.tensor([0.0 if score is None else score for score in scores], dtype=torch.float32)
        _check_finite(f"reward function {self.name!r} returned", given, scores, samples, lambda: texts)
        return given.masked_fill(torch.tensor([score is None for score in scores], dtype=torch.bool), math.nan)


def _number(score: Any) -> float:
    if isinstance(score, str | bytes):  # which float() reads
        raise TypeError(f"{score!r} is text")
    return float(score)


def _check_finite(
    what: str, given: Tensor, shown: Sequence[Any], samples: Rollouts, texts: Callable[[], Texts]
) -> None:
    """Raises:
    NonFiniteScore: one of `given` (n,) float32 cannot be trained on; `shown` is what the scorer itself gave.
    """
    places = is_bad(given).nonzero()
    if not len(places):
        return
    at, read = int(places[0]), texts()
    sample = int(samples.tensor("index")[at])
    raise NonFiniteScore(
        f"{what} {float(shown[at]):g} for sample {sample} of the batch "
        f"({quoted(read.prompts[at], read.completions[at])}); scores must be finite, and at most {LARGEST:g}, so that "
        f"their squares can be summed in float32. Nothing was trained on this batch.",
        given.masked_fill(is_bad(given), math.inf),
    )


def answers_of(functions: Sequence[FunctionReward], samples: Rollouts, texts: Callable[[], Texts]) -> list[Any]:
    """Each function's answer. Those that are async run at the same time."""
    answers = [function.ask(samples, texts) for function in functions]
    if not any(inspect.isawaitable(answer) for answer in answers):
        return answers

    async def gathered() -> list[Any]:
        return await asyncio.gather(*(f.finish(answer) for f, answer in zip(functions, answers, strict=True)))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(gathered())
    with ThreadPoolExecutor(1) as pool:  # a notebook's loop runs in this thread
        return pool.submit(asyncio.run, gathered()).result()


class ModelReward:
    """A reward model in an engine. With a tokenizer of its own (`processing_class`) it reads the text anew."""

    def __init__(
        self, name: str, forward: Callable[[Rollouts], Mapping[str, Ragged]], processing_class: Any | None = None
    ) -> None:
        self.name, self.forward, self.processing_class = name, forward, processing_class

    def score(self, samples: Rollouts, texts: Callable[[], Texts]) -> Tensor:
        read = self._retokenized(samples, texts()) if self.processing_class is not None else samples
        out = self.forward(read)
        scores = out["scores"].values if out else torch.empty(0)
        _check_finite(f"reward model {self.name!r} gave", scores, scores.tolist(), samples, texts)
        return scores

    def _retokenized(self, samples: Rollouts, texts: Texts) -> Rollouts:
        tokenizer: Any = self.processing_class
        whole = [
            prompt + completion
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
            for prompt, completion in zip(texts.prompts, texts.completions, strict=True)
        ]
        ids = tokenizer(text=whole, add_special_tokens=all(isinstance(p, str) for p in texts.prompts))["input_ids"]
        limit = getattr(tokenizer, "model_max_length", None) or 1 << 30
        nothing = Ragged.of([[] for _ in ids], torch.long)
        return Rollouts(
            index=samples.tensor("index"),
            prompts=nothing,
            responses=Ragged.of([row[:limit] for row in ids], torch.long),
        )


def weighted_scores(
    models: Sequence[ModelReward],
    functions: Sequence[FunctionReward],
    weights: Mapping[str, float],
    samples: Rollouts,
    texts: Callable[[], Texts],
    *,
    refuse: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum (n,) float32 over the scorers that apply to a sample, and each scorer's own scores by name.

    Args:
        models: run first, and with no sample too: a sharded model's forward is a collective of all the call's ranks.
        weights: by name.
        refuse: a score that is not finite; otherwise it is in the result, infinite.

    Raises:
        RewardError: see `FunctionReward`, or no scorer applies to a sample.
    """
    texts = functools.cache(texts)
    table: dict[str, Tensor] = {}  # names are made unique where they are given
    failure: NonFiniteScore | None = None

    def note(name: str, score: Callable[[], Tensor]) -> None:
        nonlocal failure
        try:
            table[name] = score()
        except NonFiniteScore as error:  # raised after the last model has run
            failure, table[name] = failure or error, error.scores

    for model in models:
        note(model.name, partial(model.score, samples, texts))
    if not len(samples) or not (models or functions):
        return torch.zeros(len(samples)), {}
    for function, answer in zip(functions, answers_of(functions, samples, texts), strict=True):
        note(function.name, partial(function.checked, answer, samples, texts()))
    if failure is not None and refuse:
        raise failure
    stacked = torch.stack(list(table.values()))
    none = stacked.isnan().all(0).nonzero()
    if len(none):
        raise RewardError(
            f"every reward function returned None for sample {int(samples.tensor('index')[int(none[0])])} of the batch."
        )
    factors = torch.tensor([weights[name] for name in table], dtype=torch.float32)
    total = torch.nansum(stacked * factors[:, None], 0)
    return total.masked_fill(stacked.isinf().any(0), math.inf), table  # infinite too where its weight is 0


@dataclass(frozen=True)
class Rewards:
    """What makes up the score: models, functions, and the weight of each by name."""

    models: tuple[RewardModelSource, ...]
    functions: tuple[FunctionReward, ...]
    weights: dict[str, float]


def read_rewards(
    given: Any, load: Callable[[Any], Any], processing_classes: Any = None, weights: Sequence[float] | None = None
) -> Rewards:
    """Rewards as a user gives them: a model, a model's name, a function, or a list of those.

    Args:
        load: from a model or name to the loaded model.
        processing_classes: the tokenizer of each, `None` for the policy's.

    Raises:
        RewardError: nothing given, or lists of different lengths.
    """
    rewards = list(given) if isinstance(given, (list, tuple)) else [given]
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
    by_name: dict[str, float] = {}
    for reward, tokenizer, factor in zip(rewards, tokenizers, factors, strict=True):
        is_model = isinstance(reward, str) or hasattr(reward, "config")
        base = _reward_name(reward)
        name = base if base not in by_name else f"{base}_{sum(other.startswith(base) for other in by_name) + 1}"
        by_name[name] = factor
        if is_model:
            models.append(RewardModelSource(name, partial(load, reward), tokenizer))
        elif callable(reward):
            functions.append(FunctionReward(reward, name))
        else:
            raise RewardError(f"a reward is a model, a name or path, or a function, not {type(reward).__name__}.")
    return Rewards(tuple(models), tuple(functions), by_name)


def _reward_name(reward: Any) -> str:
    if isinstance(reward, str):
        return reward.rstrip("/").split("/")[-1]
    if hasattr(reward, "config"):
        return str(getattr(reward.config, "_name_or_path", "") or type(reward).__name__).rstrip("/").split("/")[-1]
    return str(getattr(reward, "__name__", type(reward).__name__))
