"""`PolicyCompletionsMixin`: completions of the evaluation prompts, for TRL's GRPO and RLOO trainers, which have no
method for them.

How they are printed is in `completions`.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ...engines.base import Sampling
from ...runtime.host_calls import HostCalls
from ...runtime.process_groups import from_every_rank
from ..checks.config_checks import ConfigError
from ..ppo.evaluation import NEAR_GREEDY
from ..report.completions import show_completions
from ..run.planned_run import PlannedRun
from .policy_host import PolicyHost
from .policy_setup import PolicySetup
from .trl_sampling import tokenizer_of


class PolicyCompletionsMixin:
    """Generates completions. The attributes are those of the trainer that the class is mixed into."""

    args: Any
    state: Any
    accelerator: Any
    eval_dataset: Any
    _pending_extra_logs: Any
    _pending_metrics: Any
    _metrics: Any
    processing_class: Any
    calls: HostCalls
    reward_weights: torch.Tensor
    run: PlannedRun[PolicySetup, PolicyHost] | None
    _mode_kept: Callable[[], contextlib.AbstractContextManager[None]]
    _tokenize_prompts: Callable[..., Any]
    _calculate_rewards: Callable[..., torch.Tensor]

    def generate_completions(self) -> list[dict[str, Any]]:
        """Near-greedy completions of the evaluation prompts, one of each, with their scores. A completion is a single
        turn, without tools or environments. Five are printed as a table. All ranks together.

        Returns:
            `list[dict]`: `query`, `model response` and `score` (the weighted sum of the rewards) of each prompt, in the
            dataset's order; empty without an evaluation dataset, and on ranks other than 0.

        Raises:
            ConfigError: Accelerate trains this run.
        """
        if self.run is None:
            raise ConfigError(
                "generate_completions is for runs that the plan's engines train, and Accelerate trains this one; leave "
                "it out."
            )
        data = next(iter(self.eval_dataset.values())) if isinstance(self.eval_dataset, dict) else self.eval_dataset
        rows = [] if data is None else list(data)
        if not rows:
            return []
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        share = -(-len(rows) // world)
        # TRL gathers rewards from shares of one size, so the last ranks have the last prompt several times
        own = [rows[min(at, len(rows) - 1)] for at in range(rank * share, (rank + 1) * share)]
        with self.run.failing_together(), self._mode_kept():
            self.run.placed.start()
            self.calls.at(self.state.global_step, evaluates=True)
            self.calls.begin_evaluation()
            table = self._completions_of(own)
            gathered = from_every_rank(table, self.run.placed.placement.control)
            self.calls.take_spans()
        if rank:
            return []
        table = [row for part in gathered for row in part][: len(rows)]
        show_completions(table, self.args.report_to, self.state.global_step)
        return table

    @contextlib.contextmanager
    def _drawing_by(self, sampling: Sampling) -> Iterator[None]:
        """Inside, tokens are drawn by another sampling than the run's."""
        executor = self.calls.executor
        settings = executor.settings
        executor.settings = replace(settings, sampling=sampling)
        try:
            yield
        finally:
            executor.settings = settings

    def _completions_of(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The completions of this rank's rows of the dataset."""
        if getattr(self, "environment_factories", None) is not None:
            raise ConfigError("generate_completions has no environments; leave it out, or evaluate the trainer.")
        prompts = [row["prompt"] for row in rows]
        near_greedy = replace(self.calls.executor.settings.sampling, temperature=NEAR_GREEDY)
        with self._drawing_by(near_greedy):
            made = self.calls.generate(self._tokenize_prompts(prompts)[0], [pickle.dumps(of) for of in prompts])
        ids = [row.tolist() for row in made.ragged("responses").rows()]
        tokenizer: PreTrainedTokenizerBase = tokenizer_of(self.processing_class)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        queries, completions = prompts, texts
        if not isinstance(prompts[0], str):  # conversations
            queries = ["\n".join(str(message["content"]) for message in prompt) for prompt in prompts]
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        logged = copy.deepcopy((self._pending_extra_logs, self._pending_metrics, self._metrics))
        everything = self._calculate_rewards(rows, prompts, completions, ids)  # of all ranks
        # what is logged of these rewards does not belong to the training's logs
        self._pending_extra_logs, self._pending_metrics, self._metrics = logged
        scores = (everything.cpu() * self.reward_weights.cpu()).nansum(1)
        first = self.accelerator.process_index * len(rows)
        return [
            {"query": query, "model response": text, "score": float(score)}
            for query, text, score in zip(queries, texts, scores[first : first + len(rows)], strict=True)
        ]
