"""`Scoring`: the arguments that TRL's GRPO and RLOO trainers will pass to reward models and functions, computed from a
completion alone, so that it can be scored while others are generated.

TRL's loop later looks scores up by its own texts (`planned_rewards`). A text that was not scored yet is scored then.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.utils import logging

from ...algorithms.nonfinite import NonFiniteError, is_infinite, problem_of_rewards, quoted
from ...algorithms.rollout import Ragged, Rollouts
from ...plan.spans import REWARD_FUNCTION
from ...runtime.calls.generate_and_score import TEXTS
from ...runtime.process_groups import all_gather_object, barrier
from ..trl_policy_trainers import TRLGRPOTrainer, parse_response
from .planned_rewards import PlannedRewardModel, followed_by
from .trl_sampling import tokenizer_of
from .user_spans import FunctionSpans


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

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Context of TRL's calls of the reward functions. Each call has a span. If one of several ranks fails, the
        message names the function."""
        trainer, reward_funcs = self.trainer, self.trainer.reward_funcs
        timed = [
            reward
            if isinstance(reward, PlannedRewardModel | nn.Module)
            else self.spans.timed(f"{REWARD_FUNCTION}{name}", reward)
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
