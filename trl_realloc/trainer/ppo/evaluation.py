"""An evaluation: the calls of an iteration that do not train, on evaluation prompts. `PPOTrainer` has the methods that
run one.

How completions are printed is in `completions`.
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


def dataset_of(given: Dataset, own: Dataset) -> Any:
    """The dataset that is meant by the argument `eval_dataset` of a method; `None` if there is none.

    Args:
        own: the trainer's dataset, or several by name.

    Raises:
        ValueError: a name that is none of the trainer's.
    """
    if not isinstance(given, str):
        return own if given is None else given
    named = own if isinstance(own, dict) else {}
    if given not in named:
        names = f"those are {', '.join(map(repr, named))}" if named else "it was given no dict of datasets"
        raise ValueError(f"eval_dataset={given!r} is not the name of a dataset of the trainer; {names}.")
    return named[given]


def mean_metrics(executor: Executor, batches: Iterable[PromptBatch]) -> tuple[dict[str, float], int]:
    """The means of the metrics of responses to prompts, of `COUNTS` the sums, and the number of prompts."""
    sums, counts, done = defaultdict[str, float](float), Counter[str](), 0  # no metric of a batch that is not finite
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
    settings, graph = executor.settings, executor.placement.plan.graph
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
