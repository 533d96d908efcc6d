"""Replaces reward models among TRL's `reward_funcs` by functions that run the plan's `reward.forward`. Reward functions
stay functions, which TRL calls; `followed` reports their calls to the watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ...algorithms.async_functions import is_async
from ...algorithms.rewards import RewardModelSource
from ...plan.dataflow import Role
from ..checks.config_checks import ConfigError


REWARD = f"{Role.REWARD}.forward"
Score = Callable[[str, Sequence[Sequence[int]]], list[float]]


class PlannedRewardModel:
    """A reward model as a reward function. All ranks call it together, each with its own completions.

    Args:
        name: name in TRL's metrics.
        model: name among the models of `reward.forward`.
        processing_class: the model's tokenizer.
        template: extra arguments of the chat template.
        score: runs one model of `reward.forward` on the token ids of this rank's texts.
    """

    def __init__(
        self,
        name: str,
        model: str,
        processing_class: PreTrainedTokenizerBase,
        template: Mapping[str, Any],
        score: Score,
    ) -> None:
        self.__name__, self.model, self.processing_class = name, model, processing_class
        self.template, self.score = template, score

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """The scores of texts or conversations."""
        return self.score(self.model, self.tokens(prompts, completions))

    def tokens(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[list[int]]:
        """The token ids of each text or conversation, as TRL tokenizes them, up to the token where TRL reads the score:
        the last one that is not the pad token (the eos token if the tokenizer has no pad token)."""
        texts = [
            prompt + completion
            if isinstance(prompt, str)
            else self.processing_class.apply_chat_template([*prompt, *completion], tokenize=False, **self.template)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if not texts:
            return []
        ids: list[list[int]] = self.processing_class(text=texts, add_special_tokens=False)["input_ids"]
        pad = self.processing_class.pad_token_id
        return [
            _without_padding(of_text, self.processing_class.eos_token_id if pad is None else pad) for of_text in ids
        ]


def followed_by(
    rewards: Sequence[Any], update: str, at: Callable[[str], None], barrier: Callable[[], None]
) -> list[Any]:
    """The reward functions wrapped by `followed`. After the last one this rank waits for the others, whose judges may
    be slower, because TRL then gathers the rewards with a device collective.

    Args:
        barrier: barrier of all ranks.
    """
    functions = [not isinstance(reward, PlannedRewardModel | nn.Module) for reward in rewards]
    count = itertools.count(1)

    def ended() -> None:
        if next(count) == sum(functions):
            barrier()

    return [
        followed(reward, update, at, ended) if is_function else reward
        for reward, is_function in zip(rewards, functions, strict=True)
    ]


def followed(reward: Any, update: str, at: Callable[[str], None], ended: Callable[[], None]) -> Any:
    """A reward function that reports when it is called and when it has returned.

    Args:
        update: the update it is called in, in words.
        at: sets this rank's activity (`Alarm.at`).
        ended: called when it has returned.
    """
    activity = f"reward function {getattr(reward, '__name__', type(reward).__name__)!r} of {update}"

    @contextlib.contextmanager
    def saying() -> Iterator[None]:
        at(activity)
        try:
            yield
        except Exception:
            at(activity)  # another async function may have begun since
            raise
        at(f"the rewards of {update}")

    if is_async(reward):

        @functools.wraps(reward, updated=())
        async def called_async(**arguments: Any) -> Any:
            with saying():
                rewards = await reward(**arguments)
            await asyncio.to_thread(ended)  # the loop has other things to do
            return rewards

        return called_async

    @functools.wraps(reward, updated=())
    def called(**arguments: Any) -> Any:
        with saying():
            rewards = reward(**arguments)
        ended()
        return rewards

    return called


def _without_padding(ids: list[int], pad: int | None) -> list[int]:
    """The token ids without trailing pad tokens; the first one always stays."""
    end = len(ids)
    while end > 1 and ids[end - 1] == pad:
        end -= 1
    return ids[:end]


def reward_models(reward_funcs: Any) -> list[Any]:
    """The reward models, loaded or by name, among the argument `reward_funcs`."""
    rewards = reward_funcs if isinstance(reward_funcs, list) else [] if reward_funcs is None else [reward_funcs]
    return [reward for reward in rewards if _is_model(reward)]


def planned_rewards(arguments: Mapping[str, Any], sources: Sequence[RewardModelSource], score: Score) -> dict[str, Any]:
    """The arguments `reward_funcs` and `reward_processing_classes` for TRL's class, with models replaced by functions.

    Args:
        arguments: constructor arguments by name.
        sources: sources of the models, in their order.
        score: see `PlannedRewardModel`.

    Raises:
        ConfigError: there are not as many tokenizers as rewards.
    """
    reward_funcs, tokenizers = arguments.get("reward_funcs"), arguments.get("reward_processing_classes")
    rewards = list(reward_funcs) if isinstance(reward_funcs, list) else [] if reward_funcs is None else [reward_funcs]
    if not sources:
        return {"reward_funcs": reward_funcs, "reward_processing_classes": tokenizers}
    if tokenizers is None:
        tokenizers = [None] * len(rewards)
    classes = list(tokenizers) if isinstance(tokenizers, list) else [tokenizers]
    if len(classes) != len(rewards):
        raise ConfigError(
            f"the number of reward_processing_classes, {len(classes)}, must match that of reward_funcs, "
            f"{len(rewards)}; give a list with one for each, None for a function."
        )
    models = iter(sources)
    template = arguments["args"].chat_template_kwargs or {}
    for index, reward in enumerate(rewards):
        if _is_model(reward):
            source = next(models)
            name = reward if isinstance(reward, str) else reward.config._name_or_path
            if classes[index] is None:
                classes[index] = AutoTokenizer.from_pretrained(
                    name, trust_remote_code=bool(getattr(arguments["args"], "trust_remote_code", False))
                )
            short = name.rstrip("/").split("/")[-1]
            rewards[index] = PlannedRewardModel(short, source.name, classes[index], template, score)
    return {"reward_funcs": rewards, "reward_processing_classes": classes}


def _is_model(reward: Any) -> bool:
    return isinstance(reward, str | nn.Module)
