"""The rewards of GRPO and RLOO under a plan. `planned_rewards` replaces reward models among TRL's `reward_funcs` by
functions that run the plan's `reward.forward`. Reward functions stay functions, which TRL calls. `Scoring` times and
reports these calls, checks the rewards, and builds the texts of completions that are scored while others are generated.
TRL's loop later looks their scores up by its own texts, and scores a text that was not scored yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Trainer
from transformers.utils import logging

from ...algorithms.async_functions import is_async
from ...algorithms.nonfinite import NonFiniteError, is_infinite, problem_of_rewards, quoted
from ...algorithms.rewards import RewardModelSource
from ...algorithms.rollout import Ragged, Rollouts
from ...plan.dataflow import Role
from ...plan.spans import REWARD_FUNCTION
from ...runtime.calls.generate_and_score import TEXTS
from ...runtime.process_groups import all_gather_object, barrier
from ..checks.config_checks import ConfigError
from ..trl_policy_trainers import TRLGRPOTrainer, parse_response
from .group_rewards import GroupRewards
from .trl_sampling import tokenizer_of
from .user_spans import FunctionSpans


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


logger = logging.get_logger(__name__)
LEFT_OUT = "rewards/nonfinite"  # number of completions of a generation with an infinite reward


class Scoring:
    """The rewards of a planned run: builds the texts of completions, and checks the rewards that TRL computed.

    Args:
        trainer: a `PlannedPolicyTrainer`.
        spans: times the reward functions.
    """

    def __init__(self, trainer: Trainer, spans: FunctionSpans) -> None:
        self.trainer, self.spans = trainer, spans
        self.groups = GroupRewards(trainer, spans)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Context of TRL's calls of the reward functions. Each call has a span. If one of several ranks fails, the
        message names the function."""
        trainer, reward_funcs = self.trainer, self.trainer.reward_funcs
        timed = [
            reward
            if isinstance(reward, PlannedRewardModel | nn.Module)
            else self.groups.of(name) or self.spans.timed(f"{REWARD_FUNCTION}{name}", reward)
            for reward, name in zip(reward_funcs, trainer.reward_func_names, strict=True)
        ]
        update, alarm = f"update {trainer.state.global_step + 1}", trainer.executor.alarm
        alarm.set_activity(f"the rewards of {update}")
        # TRL reads the functions from the trainer
        trainer.reward_funcs = followed_by(
            timed, update, alarm.set_activity, lambda: barrier(trainer.placement.control)
        )
        try:
            yield
        finally:
            trainer.reward_funcs = reward_funcs
        self.spans.collect()

    def checked(self, rewards: torch.Tensor, prompts: Sequence[Any], completions: Sequence[Any]) -> torch.Tensor:
        """The rewards, if they are finite. If the settings allow it, a completion with an infinite reward counts as
        unscored, and TRL leaves it out of its group.

        Args:
            rewards: (samples of all ranks, functions) float32; NaN if a function gives no reward.

        Raises:
            NonFiniteError: a reward is infinite or too large; on every rank.
        """
        trainer, skips = self.trainer, self.trainer.args.skip_nonfinite_updates
        unusable = is_infinite(rewards).any(1)
        if skips:
            trainer._metrics["train" if trainer.model.training else "eval"][LEFT_OUT].append(float(unusable.sum()))
        error = problem_of_rewards(rewards, trainer.reward_func_names)
        if error is None:
            return rewards
        index = error.sample - trainer.accelerator.process_index * len(prompts)  # every rank has as many
        text = f" ({quoted(prompts[index], completions[index])})" if 0 <= index < len(prompts) else ""
        message = str(error) + "".join(all_gather_object(text, trainer.placement.control))
        if not skips:
            raise NonFiniteError(f"{message}. Nothing was trained on this batch.", error.sample)
        if trainer.accelerator.is_main_process:
            logger.warning(f"{message}. The completion is left out of its group.")
        return rewards.masked_fill(unusable[:, None], math.nan)

    def tokens_for_reward_models(self, samples: Rollouts) -> Mapping[str, Ragged]:
        """Token ids, int64, of these samples for each reward model, by model name (`CallSettings.reward_tokens`)."""
        # safe: from a rank of this job
        prompts = [pickle.loads(row.numpy().tobytes()) for row in samples.ragged(TEXTS).rows()]
        ids = [
            [row.tolist() for row in samples.ragged(column).rows()] if len(samples) else []
            for column in ("prompts", "responses")
        ]
        completions = self._completions(prompts, *ids)
        decoded = prompts
        if None in prompts:
            decoded = self.trainer.processing_class.batch_decode(ids[0], skip_special_tokens=True)
        prompts = [text if prompt is None else prompt for prompt, text in zip(prompts, decoded, strict=True)]
        models = [reward for reward in self.trainer.reward_funcs if isinstance(reward, PlannedRewardModel)]
        return {model.model: Ragged.of(model.tokens(prompts, completions), torch.long) for model in models}

    def _completions(
        self, prompts: Sequence[Any], prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]]
    ) -> list[Any]:
        """The completions as TRL passes them to reward functions: texts, or for conversations, one-message
        conversations."""
        texts = self.trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        return [
            text if prompt is None or isinstance(prompt, str) else [self._message(text, *ids)]
            for prompt, text, *ids in zip(prompts, texts, completion_ids, prompt_ids, strict=True)
        ]

    def _message(self, text: str, ids: list[int], prompt_ids: list[int]) -> Any:
        tokenizer: PreTrainedTokenizerBase = tokenizer_of(self.trainer.processing_class)
        schemas = (getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
        if isinstance(self.trainer, TRLGRPOTrainer) and any(schema is not None for schema in schemas):
            with contextlib.suppress(Exception):  # TRL will make the same text, and report it
                assert parse_response is not None, "this release of TRL has templates for responses"
                return parse_response(tokenizer, ids, prefix=prompt_ids)
        return {"role": "assistant", "content": text}
