"""`Scoring`: what TRL's GRPO and RLOO trainers will give to reward models and functions for a completion,
made from the completion alone, so that it can be scored while others are generated. When functions are called is in
`group_scores`.

TRL's loop asks for the scores later, by the texts that it makes itself (`planned_rewards`). A text that is not among
those that were scored is scored then.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.utils import logging

from ...algorithms.nonfinite import NonFiniteError, is_infinite, problem_of_rewards, quoted
from ...algorithms.rollout import Ragged, Rollouts
from ...common.notices import notice
from ...plan.timeline import REWARD_FUNCTION
from ...runtime.calls.generate_and_score import TEXTS
from ...runtime.process_groups import from_every_rank, meet
from ..trl_policy_trainers import TRLGRPOTrainer, parse_response
from .group_scores import Batch, GroupScores, groupable, groups_of
from .host_spans import HostSpans
from .planned_rewards import PlannedRewardModel, followed_by
from .plug import takes_turns
from .trl_sampling import tokenizer_of


logger = logging.get_logger(__name__)
LEFT_OUT = "rewards/nonfinite"  # how many completions of a generation have an infinite reward
_TOKENIZING = threading.Lock()  # a tokenizer must not change its padding in one thread and be used in another


class Scoring:
    """The rewards of a run under a plan: makes the texts of completions, and checks what TRL has made of them.

    Args:
        trainer: a `PlannedPolicyTrainer`.
        spans: of the reward functions.
    """

    def __init__(self, trainer: Trainer, spans: HostSpans) -> None:
        self.trainer, self.spans = trainer, spans
        self._given: list[Any] = []  # reward models and functions
        self._timed: list[Any] = []  # the same in the same order, with spans of the functions
        self._prompts: Sequence[Any] = ()  # of the generation that is being made, as the data set has them
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._group_scores: GroupScores | None = None
        self._why_not_early = ""  # why reward functions are not called for each group, though the settings say so

    @contextlib.contextmanager
    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Around the generation of completions for rows of the data set, and their scoring."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = ()
            if self._group_scores is not None:
                self._group_scores.drop()

    @contextlib.contextmanager
    def of_prompts(self, prompts: Sequence[Any]) -> Iterator[None]:
        """Around the generation of completions of these prompts."""
        self._prompts = prompts
        try:
            yield
        finally:
            self._prompts = ()

    def prompts_of(self, count: int) -> list[bytes]:
        """This rank's prompts of the generation that is being made, pickled; `None` for each where their number is
        another than expected, because a subclass generates in its own way."""
        prompts = self._prompts if len(self._prompts) == count else [None] * count
        return [pickle.dumps(prompt) for prompt in prompts]

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Around TRL's calls of the reward functions. It gets what functions have returned for groups in place of
        calling them again. The message of a failure on one of several ranks names the function."""
        trainer, given = self.trainer, self.trainer.reward_funcs
        timed = self._timed_functions()
        called = timed if self._group_scores is None else self._group_scores.as_called_by_trl(timed)
        update, alarm = f"update {trainer.state.global_step + 1}", trainer.executor.alarm
        alarm.at(f"the rewards of {update}")
        # TRL reads the functions from the trainer
        trainer.reward_funcs = followed_by(called, update, alarm.at, lambda: meet(trainer.placement.control))
        try:
            yield
        finally:
            trainer.reward_funcs = given
        self.spans.collect()

    def _timed_functions(self) -> list[Any]:
        """The trainer's reward models, and its reward functions with spans; the same objects each time."""
        given = self.trainer.reward_funcs
        if len(given) != len(self._given) or any(a is not b for a, b in zip(given, self._given, strict=True)):
            self._given = list(given)
            self._timed = [
                reward
                if isinstance(reward, PlannedRewardModel | nn.Module)
                else self.spans.timed(f"{REWARD_FUNCTION}{name}", reward)
                for reward, name in zip(given, self.trainer.reward_func_names, strict=True)
            ]
        return self._timed

    def checked(self, rewards: torch.Tensor, prompts: Sequence[Any], completions: Sequence[Any]) -> torch.Tensor:
        """The rewards of this rank's prompts and completions, if they are finite. A completion that has an infinite
        reward counts as one that no function gives a reward, if the settings say so: TRL leaves it out of its group.

        Args:
            rewards: (samples of all ranks, functions) float32, NaN where a function gives no reward.

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
        own = error.sample - trainer.accelerator.process_index * len(prompts)  # every rank has as many
        text = f" ({quoted(prompts[own], completions[own])})" if 0 <= own < len(prompts) else ""
        message = str(error) + "".join(from_every_rank(text, trainer.placement.control))
        if not skips:
            raise NonFiniteError(f"{message}. Nothing was trained on this batch.", error.sample)
        if trainer.accelerator.is_main_process:
            logger.warning(f"{message}. The completion is left out of its group.")
        return rewards.masked_fill(unusable[:, None], math.nan)

    def follow(self, prompts: Sequence[Sequence[int]]) -> Callable[[int, Rollouts], None] | None:
        """Call the reward functions for each group of this rank's prompts as its last sample ends, if the settings say
        so.

        Returns:
            What is to be called when a sample ends; `None` if nothing is.
        """
        trainer = self.trainer
        if not trainer.args.score_groups_early:
            return None
        environments = getattr(trainer, "environment_factories", None) is not None
        why_not = "with tools, environments or rollout_func" if takes_turns(trainer) or environments else ""
        if trainer.calls.ahead is not None:
            why_not = "under a plan with a staleness"
        if why_not != self._why_not_early:
            self._why_not_early = why_not
            notice(
                f"score_groups_early: reward functions are called on the whole batch {why_not}"
                if why_not
                else "score_groups_early: reward functions are called for each group again"
            )
        if why_not:
            self._group_scores = None
            return None
        if self._group_scores is None:
            self._group_scores = GroupScores(trainer.accelerator.device)
        scores, rows = self._group_scores, self._rows
        if not len(prompts) == len(rows) == len(self._prompts):
            return lambda at, sample: None
        size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        # columns of these names TRL drops, or hides behind arguments of its own
        dropped = {"prompt", "completion", "completion_ids", "trainer_state", "log_extra", "log_metric"}
        keys = [key for key in rows[0] if key not in dropped] if rows else []
        timed = self._timed_functions()
        batch = Batch(
            {at: timed[at] for at in groupable(trainer.reward_funcs)},
            rows,
            self._prompts,
            groups_of(len(rows), size, trainer.accelerator.process_index * len(rows)),
            {key: [row[key] for row in rows] for key in keys},
            {"trainer_state": trainer.state},
        )
        texts, ids = list(self._prompts), [list(map(int, prompt)) for prompt in prompts]

        def ended(at: int, sample: Rollouts) -> None:
            response: list[int] = sample.ragged("responses").values.tolist()
            (completion,) = self._completions([texts[at]], [ids[at]], [response])
            scores.add(at, response, completion)

        scores.begin(batch)
        return ended

    def tokens_for_reward_models(self, samples: Rollouts) -> Mapping[str, Ragged]:
        """Token ids, int64, that each reward model reads for these samples, by the name of the model
        (`CallSettings.reward_tokens`)."""
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
        with _TOKENIZING:
            return {model.model: Ragged.of(model.tokens(prompts, completions), torch.long) for model in models}

    def _completions(
        self, prompts: Sequence[Any], prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]]
    ) -> list[Any]:
        """The completions as TRL gives them to reward functions: texts, or to conversations conversations of one
        message."""
        with _TOKENIZING:
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
