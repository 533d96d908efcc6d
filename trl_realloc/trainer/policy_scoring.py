"""`PolicyScoringMixin`: what TRL's GRPO and RLOO trainers will give to reward models for a completion, made from the
completion alone, so that it can be scored while others are generated.

TRL's loop asks for the scores later, by the texts that it makes itself (`policy_rewards`). A text that is not among
those that were scored is scored then.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..algorithms.rollout import Ragged, Rollouts
from ..runtime.calls import TEXTS
from .policy_rewards import PlannedRewardModel
from .trl_policy_trainers import TRLGRPOTrainer, parse_response


class PolicyScoringMixin:
    """Makes texts. The attributes are those of the trainer that the class is mixed into."""

    processing_class: Any
    reward_funcs: Sequence[Any]

    _prompts: Sequence[Any] = ()  # of the generation that is being made, as the data set has them

    def _generate(self, prompts: Any) -> Any:
        self._prompts = prompts
        try:
            return super()._generate(prompts)  # type: ignore[misc]
        finally:
            self._prompts = ()

    def prompts_of(self, count: int) -> list[bytes]:
        """This rank's prompts of the generation that is being made, pickled; `None` for each where their number is
        another than expected, because a subclass generates in its own way."""
        prompts = self._prompts if len(self._prompts) == count else [None] * count
        return [pickle.dumps(prompt) for prompt in prompts]

    def tokens_for_reward_models(self, samples: Rollouts) -> Mapping[str, Ragged]:
        """What each reward model reads of samples, by its name (`CallSettings.reward_tokens`)."""
        # safe: from a rank of this job
        prompts = [pickle.loads(row.numpy().tobytes()) for row in samples.ragged(TEXTS).rows()]
        ids = [
            [row.tolist() for row in samples.ragged(column).rows()] if len(samples) else []
            for column in ("prompts", "responses")
        ]
        completions = self._completions(prompts, *ids)
        decoded = self.processing_class.batch_decode(ids[0], skip_special_tokens=True) if None in prompts else prompts
        prompts = [text if prompt is None else prompt for prompt, text in zip(prompts, decoded, strict=True)]
        models = [reward for reward in self.reward_funcs if isinstance(reward, PlannedRewardModel)]
        return {model.model: Ragged.of(model.tokens(prompts, completions), torch.long) for model in models}

    def _completions(
        self, prompts: Sequence[Any], prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]]
    ) -> list[Any]:
        """The completions as TRL gives them to reward functions: texts, or to conversations conversations of one
        message."""
        texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        if not prompts or prompts[0] is None or isinstance(prompts[0], str):
            return list(texts)
        tokenizer: PreTrainedTokenizerBase = getattr(self.processing_class, "tokenizer", self.processing_class)
        schemas = (getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
        if isinstance(self, TRLGRPOTrainer) and any(schema is not None for schema in schemas):
            with contextlib.suppress(Exception):  # TRL will make the same text, and report it
                assert parse_response is not None, "this release of TRL has templates for responses"
                parsed = map(partial(_parsed, parse_response, tokenizer), completion_ids, prompt_ids)
                return [[message] for message in parsed]
        return [[{"role": "assistant", "content": text}] for text in texts]


def _parsed(parse: Callable[..., Any], tokenizer: Any, ids: list[int], prompt_ids: list[int]) -> Any:
    return parse(tokenizer, ids, prefix=prompt_ids)
