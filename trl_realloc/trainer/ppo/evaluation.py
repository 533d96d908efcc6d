"""`evaluate` and `generate_completions`: the calls of an iteration that do not train, on the evaluation prompts.

How completions are printed is in `completions`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from torch.utils.data import DataLoader
from transformers.trainer_utils import speed_metrics

from ...algorithms.ppo_metrics import COUNTS
from ...algorithms.prompt_batches import PromptBatch, prompt_loader
from ...algorithms.prompts import DataError, tokenize_prompts
from ...plan.dataflow import CallKind, Role
from ...runtime.calls.generate_and_score import EVALUATION_STEP
from ..report.completions import completion_rows, show_completions
from ..run.planned_run import PlannedRun
from .ppo_host import PPOHost
from .ppo_setup import Setup


NEAR_GREEDY = 0.01 + 1e-7  # TRL's temperature for completions


class EvaluationMixin:
    """`evaluate` and `generate_completions` of `PPOTrainer`. The annotated attributes are those of the trainer that the
    class is mixed into."""

    args: Any
    state: Any
    control: Any
    eval_dataset: Any
    processing_class: Any
    callback_handler: Any
    accelerator: Any
    setup: Setup
    plan: Any
    sample_generations_freq: Any
    run: PlannedRun[Setup, PPOHost]
    log: Callable[[dict[str, float]], None]
    _end_together: Callable[[], None]
    _follow_settings: Callable[[], None]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[PromptBatch]:
        """Global batches of evaluation prompts, the same on every rank; by default of the constructor's dataset. A name
        is that of one of its datasets."""
        rows = self._evaluated(eval_dataset)
        size = self.args.per_device_eval_batch_size * self.args.world_size
        return prompt_loader(rows, size, self.setup.collate, None)

    def _evaluated(self, given: Any) -> Any:
        """The dataset that is meant by the argument `eval_dataset` of a method."""
        if not isinstance(given, str):
            return self.eval_dataset if given is None else given
        own = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
        if given not in own:
            names = f"those are {', '.join(map(repr, own))}" if own else "it was given no dict of datasets"
            raise ValueError(f"eval_dataset={given!r} is not the name of a dataset of the trainer; {names}.")
        return own[given]

    def _checked(self, rows: Any) -> Any:
        """Prompts to evaluate on, tokenized. Those of the constructor have been checked there."""
        own = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        tokenized = tokenize_prompts(rows, self.processing_class, "eval_dataset", self.args.dataset_num_proc)
        if any(rows is of_constructor for of_constructor in own):
            return tokenized
        longest = max(self.setup.check_prompts(tokenized, "eval_dataset"))
        most = self.setup.context_length - self.args.response_length
        if self.plan["actor.generate"].engine == "vllm" and longest > most:
            raise DataError(
                f"eval_dataset: the longest prompt has {longest} tokens, and the vLLM engines have room for {most}, as "
                f"many as the longest prompt of the trainer's datasets has; give these prompts as eval_dataset to the "
                f"constructor too, which takes a dict of several datasets."
            )
        return tokenized

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Generate responses to the evaluation prompts and score them. Nothing is trained.

        Args:
            eval_dataset: prompts as in the constructor, a dict of several datasets, or the name of one in the
                constructor's dict; by default the constructor's.

        Returns:
            `{prefix}_objective/*`: the means over the prompts. `{prefix}_val/num_eos_tokens`: the sum over the prompts.

        Raises:
            DataError: a dataset without prompts, or prompts that the policy cannot respond to.
        """
        rows = self._evaluated(eval_dataset)
        if isinstance(rows, dict):
            metrics: dict[str, float] = {}
            for name, part in rows.items():
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        if rows is None:
            raise ValueError("evaluate needs an eval_dataset; none was given to the trainer nor to this call.")
        rows = self._checked(rows)
        start, count = time.time(), 0
        sums, counts = defaultdict[str, float](float), Counter[str]()  # a batch has no metric that is not finite
        with self.run.failing_together():
            self.run.placed.start()
            self._follow_settings()
            graph = self.plan.graph
            scoring = [call for call in graph.order if not graph.call(call).trains]
            for batch in self.get_eval_dataloader(rows):
                iteration = self.run.placed.executor.run(batch, EVALUATION_STEP, {}, only=scoring, first=count)
                for name, value in iteration.metrics.items():
                    sums[name] += value if name in COUNTS else value * len(batch)
                    counts[name] += len(batch)
                count += len(batch)
            self._end_together()
        metrics = {
            f"{metric_key_prefix}_{name}": total if name in COUNTS else total / counts[name]
            for name, total in sums.items()
        }
        metrics |= speed_metrics(metric_key_prefix, start, num_samples=count)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def generate_completions(self, sampling: bool = False) -> list[dict[str, Any]]:
        """Near-greedy completions of the evaluation prompts with their scores. Five of them are printed as a table.

        Args:
            sampling (`bool`, *optional*, defaults to `False`):
                Only the first batch of prompts.

        Returns:
            `list[dict]`: `query`, `model response` and `score` of each prompt; empty without an evaluation dataset, and
            on ranks other than 0.
        """
        if self.eval_dataset is None:
            return []
        rows = next(iter(self.eval_dataset.values())) if isinstance(self.eval_dataset, dict) else self.eval_dataset
        table: list[dict[str, Any]] = []
        count = 0
        near_greedy = replace(self.setup.call_settings.sampling, temperature=NEAR_GREEDY)
        with self.run.failing_together():
            self.run.placed.start()
            graph = self.plan.graph
            only = (*graph.calls_of(CallKind.GENERATE), *graph.calls_of(CallKind.FORWARD, Role.REWARD))
            for batch in self.get_eval_dataloader(rows):
                iteration = self.run.placed.executor.run(
                    batch, EVALUATION_STEP, {}, only=only, sampling=near_greedy, first=count
                )
                count += len(batch)
                if "responses" in iteration.samples:  # on rank 0
                    table += completion_rows(iteration.samples, self.processing_class)
                if sampling:
                    break
            self._end_together()
        if self.accelerator.is_main_process:
            show_completions(table, self.args.report_to, self.state.global_step)
        return table

    def predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not for PPO, whose data have no labels.

        Raises:
            NotImplementedError: names the methods to use.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no predict, which compares logits with labels; evaluate(dataset) scores the "
            f"completions of a data set, and generate_completions() returns them."
        )

    def _show_completions(self) -> None:
        """After an update: print a few completions where `num_sample_generations` asks for them."""
        if self._shows_completions(self.state.global_step):
            self.generate_completions(sampling=True)

    def _shows_completions(self, done: int) -> bool:
        """True if completions are shown after this many updates."""
        is_due = self.args.num_sample_generations > 0 and (done - 1) % self.sample_generations_freq == 0
        return is_due and self.eval_dataset is not None


__all__ = ["EvaluationMixin"]
