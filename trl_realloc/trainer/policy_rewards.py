"""Reward models among the `reward_funcs` of TRL's trainers: they become functions that run the plan's `reward.forward`.
Reward functions stay as they are, TRL calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from ..algorithms.rewards import RewardModelSource
from ..algorithms.rollout import Ragged, Rollouts
from ..plan.dataflow import Role
from .config_checks import ConfigError


REWARD = f"{Role.REWARD}.forward"


class PlannedRewardModel:
    """A reward model as a reward function. All ranks call it together, each with its own completions.

    Args:
        name: in TRL's metrics.
        column: of the outputs of `reward.forward` with its scores.
        processing_class: the model's tokenizer.
        template: further arguments of the chat template.
        forward: runs `reward.forward` on this rank's samples.
    """

    def __init__(
        self,
        name: str,
        column: str,
        processing_class: Any,
        template: Mapping[str, Any],
        forward: Callable[[Rollouts], Rollouts],
    ) -> None:
        self.__name__, self.column, self.processing_class = name, column, processing_class
        self.template, self.forward = template, forward

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """The scores of texts or conversations, tokenized as TRL does."""
        texts = [
            prompt + completion
            if isinstance(prompt, str)
            else self.processing_class.apply_chat_template([*prompt, *completion], tokenize=False, **self.template)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        ids = self.processing_class(text=texts, add_special_tokens=False)["input_ids"]
        samples = Rollouts(prompts=Ragged.of([[] for _ in ids], torch.long), responses=Ragged.of(ids, torch.long))
        scores: list[float] = self.forward(samples).tensor(self.column).tolist()
        return scores


def reward_models(reward_funcs: Any) -> list[Any]:
    """The models, loaded or by name, among the argument `reward_funcs`."""
    given = reward_funcs if isinstance(reward_funcs, list) else [] if reward_funcs is None else [reward_funcs]
    return [reward for reward in given if _is_model(reward)]


def planned_rewards(
    arguments: Mapping[str, Any], sources: Sequence[RewardModelSource], forward: Callable[[Rollouts], Rollouts]
) -> dict[str, Any]:
    """The arguments `reward_funcs` and `reward_processing_classes` for TRL's class, with functions in the place of
    models.

    Args:
        arguments: of the constructor, by name.
        sources: of the models, in their order.
        forward: runs `reward.forward`.

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
            column = "scores" if len(sources) == 1 else f"reward/{source.name}"
            if classes[at] is None:
                classes[at] = AutoTokenizer.from_pretrained(name)
            rewards[at] = PlannedRewardModel(name.rstrip("/").split("/")[-1], column, classes[at], template, forward)
    return {"reward_funcs": rewards, "reward_processing_classes": classes}


def _is_model(reward: Any) -> bool:
    return isinstance(reward, str | nn.Module)
