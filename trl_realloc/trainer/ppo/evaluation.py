"""An evaluation: the calls of an iteration that do not train, on evaluation prompts. `PPOTrainer` has the methods that
run one.

Completions are printed in `completions`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...algorithms.ppo_metrics import COUNTS
from ...algorithms.prompt_batches import PromptBatch
from ...plan.dataflow import CallKind, Role
from ...runtime.calls.generate_and_score import EVALUATION_STEP
from ...runtime.executor import Executor
from ..report.completions import CompletionRow, completion_rows


if TYPE_CHECKING:
    from datasets import Dataset


NEAR_GREEDY = 0.01 + 1e-7  # TRL's temperature for completions


def dataset_of(selected: Dataset, datasets: Dataset) -> Any:
    """The dataset that a method's argument `eval_dataset` selects; `None` if there is none.

    Args:
        datasets: dataset of the trainer, or several by name.

    Raises:
        ValueError: the name is not one of the trainer's datasets.
    """
    if not isinstance(selected, str):
        return datasets if selected is None else selected
    named = datasets if isinstance(datasets, dict) else {}
    if selected not in named:
        names = f"those are {', '.join(map(repr, named))}" if named else "the trainer has no named datasets"
        raise ValueError(f"eval_dataset={selected!r} is not the name of a dataset of the trainer; {names}.")
    return named[selected]


def mean_metrics(executor: Executor, batches: Iterable[PromptBatch]) -> tuple[dict[str, float], int]:
    """The mean of each metric over responses to prompts (sums for `COUNTS`), and the number of prompts."""
    sums, counts, done = defaultdict[str, float](float), Counter[str](), 0  # a batch that is not finite has no metrics
    graph = executor.placement.plan.graph
    scoring = [call for call in graph.order if not graph.call(call).trains]
    for batch in batches:
        iteration = executor.run(batch, EVALUATION_STEP, {}, only=scoring, first=done)
        for name, value in iteration.metrics.items():
            sums[name] += value if name in COUNTS else value * len(batch)
            counts[name] += len(batch)
        done += len(batch)
    return {name: total if name in COUNTS else total / counts[name] for name, total in sums.items()}, done


def completions(executor: Executor, batches: Iterable[PromptBatch]) -> list[CompletionRow]:
    """Near-greedy completions of prompts with their scores, as rows of a table; empty on ranks other than 0."""
    settings, graph = executor.runner.settings, executor.placement.plan.graph
    near_greedy = replace(settings.sampling, temperature=NEAR_GREEDY)
    only = (*graph.calls_of(CallKind.GENERATE), *graph.calls_of(CallKind.FORWARD, Role.REWARD))
    table: list[CompletionRow] = []
    done = 0
    for batch in batches:
        iteration = executor.run(batch, EVALUATION_STEP, {}, only=only, sampling=near_greedy, first=done)
        done += len(batch)
        if "responses" in iteration.samples:  # on rank 0
            table += completion_rows(iteration.samples, settings.processing_class)
    return table


__all__ = ["NEAR_GREEDY", "completions", "dataset_of", "mean_metrics"]
