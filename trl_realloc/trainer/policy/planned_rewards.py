"""Reward models among the `reward_funcs` of TRL's trainers: they become functions that run the plan's `reward.forward`.
Reward functions stay functions, which TRL calls; `followed` tells the watchdog of their calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ...algorithms.rewards import RewardModelSource, is_async
from ...plan.dataflow import Role
from ..checks.config_checks import ConfigError


REWARD = f"{Role.REWARD}.forward"
Score = Callable[[str, Sequence[Sequence[int]]], list[float]]


class PlannedRewardModel:
    """A reward model as a reward function. All ranks call it together, each with its own completions.

    Args:
        name: in TRL's metrics.
        model: its name among the models of `reward.forward`.
        processing_class: the model's tokenizer.
        template: further arguments of the chat template.
        score: runs a model of `reward.forward` on the token ids of this rank's texts.
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
        """The token ids of each text or conversation, as TRL makes them, up to the token at which TRL reads the model:
        the last one that is not the pad token, which is the eos token where the tokenizer has none."""
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


def followed_by(rewards: Sequence[Any], update: str, at: Callable[[str], None], meet: Callable[[], None]) -> list[Any]:
    """The reward functions as `followed` makes them. After the last of them has returned, this rank waits for the
    others, which may have slower judges: TRL gathers the rewards next, by a collective of the devices.

    Args:
        meet: waits for all ranks.
    """
    functions = [not isinstance(reward, PlannedRewardModel | nn.Module) for reward in rewards]
    count = itertools.count(1)

    def ended() -> None:
        if next(count) == sum(functions):
            meet()

    return [
        followed(reward, update, at, ended) if is_function else reward
        for reward, is_function in zip(rewards, functions, strict=True)
    ]


def followed(reward: Any, update: str, at: Callable[[str], None], ended: Callable[[], None]) -> Any:
    """A reward function that says when it is called and when it has returned.

    Args:
        update: in which it is called, in words.
        at: sets what this rank is doing (`Alarm.at`).
        ended: called when it has returned.
    """
    own = f"reward function {getattr(reward, '__name__', type(reward).__name__)!r} of {update}"

    @contextlib.contextmanager
    def saying() -> Iterator[None]:
        at(own)
        try:
            yield
        except Exception:
            at(own)  # another async function may have begun since
            raise
        at(f"the rewards of {update}")

    if is_async(reward):

        @functools.wraps(reward, updated=())
        async def called_async(**given: Any) -> Any:
            with saying():
                rewards = await reward(**given)
            await asyncio.to_thread(ended)  # the loop has other things to do
            return rewards

        return called_async

    @functools.wraps(reward, updated=())
    def called(**given: Any) -> Any:
        with saying():
            rewards = reward(**given)
        ended()
        return rewards

    return called


def _without_padding(ids: list[int], pad: int | None) -> list[int]:
    """The token ids without pad tokens at the end; the first one in any case."""
    end = len(ids)
    while end > 1 and ids[end - 1] == pad:
        end -= 1
    return ids[:end]


def reward_models(reward_funcs: Any) -> list[Any]:
    """The models, loaded or by name, among the argument `reward_funcs`."""
    given = reward_funcs if isinstance(reward_funcs, list) else [] if reward_funcs is None else [reward_funcs]
    return [reward for reward in given if _is_model(reward)]


def planned_rewards(arguments: Mapping[str, Any], sources: Sequence[RewardModelSource], score: Score) -> dict[str, Any]:
    """The arguments `reward_funcs` and `reward_processing_classes` for TRL's class, with functions in the place of
    models.

    Args:
        arguments: of the constructor, by name.
        sources: of the models, in their order.
        score: as of `PlannedRewardModel`.

    Raises:
        ConfigError: there are not as many tokenizers as rewards.
    """
    given, tokenizers = arguments.get("reward_funcs"), arguments.get("reward_processing_classes")
    rewards = list(given) if isinstance(given, list) else [] if given is None else [given]
    if not sources:
        return {"reward_funcs": given, "reward_processing_classes": tokenizers}
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
    for at, reward in enumerate(rewards):
        if _is_model(reward):
            source = next(models)
            name = reward if isinstance(reward, str) else reward.config._name_or_path
            if classes[at] is None:
                classes[at] = AutoTokenizer.from_pretrained(
                    name, trust_remote_code=bool(getattr(arguments["args"], "trust_remote_code", False))
                )
            short = name.rstrip("/").split("/")[-1]
            rewards[at] = PlannedRewardModel(short, source.name, classes[at], template, score)
    return {"reward_funcs": rewards, "reward_processing_classes": classes}


def _is_model(reward: Any) -> bool:
    return isinstance(reward, str | nn.Module)
