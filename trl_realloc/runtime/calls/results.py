"""`Iteration`: the results of one iteration and its metrics, which rank 0 computes from the outputs of all calls."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...algorithms.algorithm import Algorithm, training_inputs
from ...algorithms.corrections import AGES, GENERATED_AT, IN_FLIGHT_S, POLICY_VERSIONS
from ...algorithms.nonfinite import NonFiniteError, with_text
from ...algorithms.rollout import Rollouts
from ...plan.spans import Span, is_host_work
from ..failures.alarm import JobFailed
from .batch import Batch, CallFailure, CallsFailed


# optimizer step -> name -> (n,) float32 by position in the global batch
Statistics = dict[int, dict[str, Tensor]]


@dataclass(frozen=True)
class Iteration:
    """The results of one iteration.

    Args:
        metrics: the algorithm's metrics, by TRL's names. On every rank.
        observed: metrics of samples and calls: mean length, score of every reward, seconds of every call, bytes and
            seconds of every reallocation. On every rank.
        tokens: number of prompt and response tokens of all samples. On every rank.
        samples: the global batch with every column; on rank 0, empty on the others.
        spans: times of each call on each rank; on rank 0, empty on the others.
    """

    metrics: dict[str, float]
    observed: dict[str, float]
    tokens: int
    samples: Rollouts
    spans: tuple[Span, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Lengths of the responses, in tokens; on rank 0, empty on the others."""
        return self.samples.ragged("responses").lengths.tolist() if "responses" in self.samples else []

    def for_other_ranks(self) -> Iteration:
        """Copy for the other ranks, without samples and spans."""
        return replace(self, samples=Rollouts(), spans=())


def iteration_results(batch: Batch, names: Sequence[str], replayed: Collection[str]) -> Iteration:
    """Collect the outputs of all calls. Only on rank 0.

    Args:
        names: the calls that were run.
        replayed: the calls whose outputs were passed in.

    Raises:
        JobFailed: a call failed. Raised after the outputs or the failures of all calls have arrived.
        NonFiniteError: a number of the samples is not finite.
    """
    algorithm, graph, step = batch.algorithm, batch.plan.graph, batch.step.number
    samples, spans, failures = batch.samples, list[Span](), list[CallFailure]()
    refused: NonFiniteError | None = None
    statistics: Statistics = {}
    has_trained = False
    for name in (*replayed, *names):
        trains = graph.call(name).trains
        if trains and not failures and refused is None:
            try:
                batch.prepare(samples)  # even if rank 0 trains nothing: the batch may be refused or skipped
            except NonFiniteError as error:
                refused = error
        try:
            output = batch.outputs(name)
        except CallsFailed as failed:
            failures += failed.failures
            continue
        spans += output.spans
        if trains:
            has_trained |= len(output.samples) > 0
            add_statistics(output.samples, len(batch.samples), statistics)
        else:
            samples = samples.plus(**output.samples)
    if refused is not None:
        raise refused
    if failures:
        raise job_failed(failures, samples, batch.settings.processing_class, has_trained)
    samples = with_ages(samples, step)
    metrics: dict[str, float] = {}
    if training_inputs(algorithm.graph) <= set(samples):
        samples = samples.plus(**batch.prepare(samples))  # a training call may have read fewer columns
        metrics = sample_metrics(algorithm, samples, only_finite=batch.skips_training)
    if trainings := [name for name in names if graph.call(name).trains]:
        counts = batch.settings.skip_nonfinite
        metrics |= update_metrics(algorithm, trainings, samples, step, statistics, counts_skipped=counts)
    tokens = samples.tokens if "responses" in samples else 0
    return Iteration(metrics, observed(samples, spans, step), tokens, samples, tuple(spans))


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


def add_statistics(outputs: Rollouts, n: int, statistics: Statistics) -> None:
    """Add the outputs of a training call for each sample of each optimizer step to `statistics`.

    Args:
        outputs: columns `index`, `update` and the statistics; no columns if every step was skipped.
        n: number of samples of the global batch.
    """
    if "update" not in outputs:
        return
    which, index = outputs.tensor("update"), outputs.tensor("index")
    for update in which.unique().tolist():
        selected = which == update
        for name in set(outputs) - {"index", "update"}:
            sums = statistics.setdefault(update, {}).setdefault(name, torch.zeros(n))
            sums[index[selected]] = outputs.tensor(name)[selected]


def update_metrics(
    algorithm: Algorithm,
    trainings: Sequence[str],
    samples: Rollouts,
    step: int,
    statistics: Statistics,
    *,
    counts_skipped: bool,
) -> dict[str, float]:
    """The algorithm's metrics of the optimizer steps.

    Args:
        samples: the global batch after `Algorithm.prepare`.
        counts_skipped: add the number of skipped steps of each loss.
    """
    steps = []
    for update, mini_batch in enumerate(algorithm.mini_batches(samples, step)):
        index = mini_batch.tensor("index")
        steps.append((mini_batch, {name: sums[index] for name, sums in statistics.get(update, {}).items()}))
    metrics = algorithm.update_metrics(steps)
    if counts_skipped:
        for loss in map(algorithm.loss, trainings):
            skipped = sum(loss.statistic not in step_statistics for _, step_statistics in steps)
            metrics[f"skipped_updates/{loss.name}"] = float(skipped)
    return metrics


def sample_metrics(algorithm: Algorithm, samples: Rollouts, *, only_finite: bool) -> dict[str, float]:
    """The algorithm's metrics of a global batch after `Algorithm.prepare`."""
    metrics = algorithm.sample_metrics(samples)
    return {name: value for name, value in metrics.items() if not only_finite or math.isfinite(value)}


def observed(samples: Rollouts, spans: Iterable[Span], step: int = 0) -> dict[str, float]:
    """`Iteration.observed` of a global batch and of the spans of its calls: `completions/mean_length`,
    `rewards/<name>`, `time/<call>` (seconds of the slowest rank), `realloc/bytes/<call>` and `realloc/seconds/<call>`
    (`<call>` received the parameters), and `shared_tokens/<call>` (sum over all replicas, if samples shared tokens).
    Work on the host is `time/reward/<name>`, `time/tool/<name>` and `time/training_loop`. With a staleness also `ages`.
    """
    busy: dict[tuple[str, int], float] = defaultdict(float)  # a streamed call has several spans on a device
    metrics: dict[str, float] = {}
    for name in samples:
        if name.startswith("reward/"):
            metrics[f"rewards/{name.removeprefix('reward/')}"] = float(samples.tensor(name).nanmean())
    if "responses" in samples:
        metrics["completions/mean_length"] = float(samples.ragged("responses").lengths.float().mean())
    metrics |= ages(samples, step)
    for span in spans:
        busy[span.call, span.device] += span.seconds
        if span.shared_tokens:
            name = f"shared_tokens/{span.call}"
            metrics[name] = metrics.get(name, 0.0) + span.shared_tokens
        if " -> " in span.call:
            metrics[f"realloc/bytes/{span.call.partition(' -> ')[2]}"] = float(span.bytes)
    longest: dict[str, float] = {}
    for (call, _), seconds in busy.items():
        longest[call] = max(longest.get(call, 0.0), seconds)
    for call, seconds in longest.items():
        source, _, target = call.partition(" -> ")
        metrics[f"realloc/seconds/{target}" if target else f"time/{_key(source)}"] = seconds
    return metrics


def _key(name: str) -> str:
    """The name of a span in a metric. Trackers refuse colons and spaces."""
    return name.replace(": ", "/").replace(" ", "_") if is_host_work(name) else name


def with_ages(samples: Rollouts, step: int) -> Rollouts:
    """The samples; under a plan with a staleness, with the column `corrections.AGES`.

    Args:
        step: number of the iteration, which is its policy's number of updates.
    """
    if POLICY_VERSIONS not in samples:
        return samples
    versions = samples.ragged(POLICY_VERSIONS)
    return samples.plus(**{AGES: versions.like(step - versions.values)})


def ages(samples: Rollouts, step: int) -> dict[str, float]:
    """Ages of samples when they are trained, under a plan with a staleness; empty for other samples.

    Args:
        step: number of the iteration, which is its policy's number of updates.

    Returns:
        `staleness/mean` and `staleness/oldest`: updates between a token's policy and the trained policy, over all
        tokens. `staleness/in_flight_s` and `staleness/in_queue_s`: seconds of a sample's generation, and of its wait
        until the iteration's end; means over the samples.
    """
    if POLICY_VERSIONS not in samples or not len(samples):
        return {}
    age = with_ages(samples, step).ragged(AGES).values.double()
    waited = (time.time() - samples.tensor(GENERATED_AT)).clamp(min=0.0)
    return {
        "staleness/mean": float(age.mean()),
        "staleness/oldest": float(age.max()),
        "staleness/in_flight_s": float(samples.tensor(IN_FLIGHT_S).mean()),
        "staleness/in_queue_s": float(waited.mean()),
    }
