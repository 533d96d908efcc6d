"""What a run keeps of its updates."""

from __future__ import annotations

import tracemalloc

import torch

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan.spans import Span
from trl_realloc.runtime.calls.results import Iteration
from trl_realloc.trainer.run.metrics import RunMetrics


def test_of_a_long_run_the_spans_of_the_latest_updates_are_kept() -> None:
    samples = Rollouts(
        index=torch.tensor([0]), prompts=Ragged.of([[5]], torch.long), responses=Ragged.of([[7, 8]], torch.long)
    )
    for most, kept in ((15, [17, 18, 19]), (0, [19])):
        metrics = RunMetrics(spans=most)
        for step in range(20):
            spans = tuple(Span("actor.generate", rank, step, step + 1.0, step) for rank in range(3))
            metrics.add(Iteration({}, {}, 3, samples, spans), step, step + 1.0, 0.1)
        assert sorted({span.step for span in metrics.timeline.spans}) == kept
        assert len(metrics.timeline.spans) == (3 + 2) * len(kept), "with the loop's before and after the calls"


def test_a_run_that_never_logs_takes_no_more_memory_with_every_update() -> None:
    metrics = RunMetrics(spans=0)
    tracemalloc.start()
    for step in range(4_000):
        losses = {"loss/policy_avg": step + 0.25, "loss/value_avg": 2.0, "skipped_updates/other": 1.0}
        metrics.add(Iteration(losses, {}, 3, Rollouts(), ()), step, step + 1.0, 0.5)
        if step == 500:
            before, _ = tracemalloc.get_traced_memory()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 20_000
    assert metrics.mean_loss() == 1999.5 + 0.25 + 1.0
    means = metrics.take()
    assert means["loss/policy_avg"] == 1999.75 and means["skipped_updates/other"] == 4_000
    assert metrics.take() == {}
