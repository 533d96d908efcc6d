"""`iteration_results`: collects the outputs and failures of all calls of an iteration on rank 0.

The metrics are computed in `results`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ...algorithms.algorithm import Algorithm, training_inputs
from ...algorithms.nonfinite import NonFiniteError, with_text
from ...algorithms.prompt_batches import PromptBatch
from ...algorithms.rollout import Rollouts
from ...plan.dataflow import DataflowGraph
from ...plan.timeline import Span
from ..failures.alarm import JobFailed
from ..samples.exchange import CallFailure, CallsFailed
from ..samples.results import (
    Iteration,
    Statistics,
    add_statistics,
    observed,
    sample_metrics,
    update_metrics,
    with_ages,
)
from .call_runner import RunningIteration
from .generate_and_score import CallSettings
from .training_calls import GRAD_NORM


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def iteration_results(
    iteration: RunningIteration,
    algorithm: Algorithm,
    settings: CallSettings,
    batch: PromptBatch,
    names: Sequence[str],
    replayed: Collection[str],
) -> Iteration:
    """Collect the outputs of all calls. Only on rank 0.

    Args:
        replayed: the calls whose outputs were passed in.

    Raises:
        JobFailed: a call failed. Raised after the outputs or the failures of all calls have arrived.
        NonFiniteError: a number of the samples is not finite.
    """
    inputs, graph, step = iteration.inputs, iteration.exchange.plan.graph, iteration.step.number
    samples, spans, failures = batch.prompts, list[Span](), list[CallFailure]()
    refused: NonFiniteError | None = None
    statistics: Statistics = {}
    has_trained = False
    for name in (*replayed, *names):
        trains = graph.call(name).trains
        if trains and not failures and refused is None:
            try:
                inputs.prepare(samples)  # even if rank 0 trains nothing: the batch may be refused or skipped
            except NonFiniteError as error:
                refused = error
        try:
            output = inputs.collect(name)
        except CallsFailed as failed:
            failures += failed.failures
            continue
        spans += output.spans
        if trains:
            has_trained |= len(output.samples) > 0
            add_statistics(output.samples, len(batch), statistics)
        else:
            samples = samples.plus(**output.samples)
    if refused is not None:
        raise refused
    if failures:
        raise job_failed(failures, samples, settings.processing_class, has_trained)
    samples = with_ages(samples, step)
    metrics: dict[str, float] = {}
    if training_inputs(algorithm.graph) <= set(samples):
        samples = samples.plus(**inputs.prepare(samples))  # a training call may have read fewer columns
        metrics = sample_metrics(algorithm, samples, only_finite=inputs.skips_training)
    metrics |= _of_training(iteration, algorithm, settings, graph, names, samples, statistics)
    tokens = samples.tokens if "responses" in samples else 0
    return Iteration(metrics, observed(samples, spans, step), tokens, samples, tuple(spans))


def _of_training(
    iteration: RunningIteration,
    algorithm: Algorithm,
    settings: CallSettings,
    graph: DataflowGraph,
    names: Sequence[str],
    samples: Rollouts,
    statistics: Statistics,
) -> dict[str, float]:
    trainings = [name for name in names if graph.call(name).trains]
    if not trainings:
        return {}
    counts, step = settings.skip_nonfinite, iteration.step.number
    return update_metrics(algorithm, trainings, samples, step, statistics, counts_skipped=counts)


def job_failed(
    failures: Sequence[CallFailure], samples: Rollouts, processing_class: PreTrainedTokenizerBase, has_trained: bool
) -> JobFailed:
    """The exception for failed calls, with the text of the samples at fault. For equal messages about a call, it names
    the first rank."""
    texts, first = [], dict[tuple[str, str], CallFailure]()
    for failure in failures:
        first.setdefault((failure.call, failure.message), failure)
    for failure in first.values():
        error = NonFiniteError(str(failure), failure.sample)
        has_text = failure.sample >= 0 and "responses" in samples
        texts.append(str(with_text(error, samples, processing_class) if has_text else error))
    return JobFailed(
        "; ".join(texts), is_recoverable=not has_trained and all(f.is_recoverable for f in failures), is_shared=True
    )


def of_steps(statistics: Rollouts) -> Rollouts:
    """One row per optimizer step, with the columns that are equal in all of its rows."""
    if not len(statistics):
        return Rollouts()
    steps = statistics.tensor("update").tolist()
    return statistics.only(["update", GRAD_NORM]).select([steps.index(step) for step in dict.fromkeys(steps)])


def refusal(failed: CallsFailed) -> JobFailed | NonFiniteError:
    """The exception that every rank raises when a call that trains has failed. Only a refusal of samples that are not
    finite leaves the roles unchanged."""
    first = failed.failures[0]
    if all(failure.is_recoverable for failure in failed.failures):
        return NonFiniteError(first.message, first.sample)
    return failed.of_job()
