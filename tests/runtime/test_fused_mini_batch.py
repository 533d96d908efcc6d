"""What is recorded of a mini-batch of two models that train together: when each stage ran each task, and was expected
to."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from trl_realloc.engines.training.fused_training import FusedMiniBatch
from trl_realloc.engines.training.stage_figures import FusedShape, StageFigures
from trl_realloc.engines.training.stage_times import StageTimes, epoch_of_clock
from trl_realloc.planner.fused.check import check
from trl_realloc.runtime.fused.mini_batch import pipelines_of, stage_spans
from trl_realloc.runtime.fused.orders import FusedOrders


CALLS = ("actor.train", "critic.train")
FIGURES = (StageFigures((0.1, 1e-3), (0.2, 2e-3), 1.0),) * 4
# four stages of the first model, two copies of the second, one of which has fewer micro-batches
SHAPE = FusedShape((((400, 300, 200, 100),), ((300, 300), (500,))), (FIGURES, FIGURES), True)


def ran(shape: FusedShape) -> FusedMiniBatch:
    """Every task takes a second."""
    orders = FusedOrders()(shape)
    times = [[(100.0 + at, 101.0 + at) for at, _ in enumerate(tasks)] for tasks in orders]
    return FusedMiniBatch(shape, orders, times, (8, 9, 10, 11))


def test_every_task_of_every_stage_is_recorded_once_in_the_order_of_the_schedule() -> None:
    mini_batch = ran(SHAPE)
    spans = stage_spans(mini_batch, CALLS, step=3)
    assert {span.step for span in spans} == {3}
    for stage, tasks in enumerate(mini_batch.orders):
        here = [span for span in spans if span.device == 8 + stage]
        assert [(CALLS.index(s.call), s.micro_batch, s.kind == "backward") for s in here] == list(tasks)
        assert [(s.start, s.end) for s in here] == mini_batch.times[stage]
    counts = Counter((span.call, span.kind) for span in spans)
    assert counts == {
        (call, kind): n for call, n in zip(CALLS, (16, 6), strict=True) for kind in ("forward", "backward")
    }


def test_expected_times_are_those_of_the_simulated_schedule() -> None:
    orders = FusedOrders()
    equal = replace(SHAPE, tokens=(((400,) * 4,), ((300, 300), (300, 300))))
    tasks = orders(equal)
    assert orders.latest is not None
    times = [[(0.0, 1.0)] * len(of_stage) for of_stage in tasks]
    spans = stage_spans(FusedMiniBatch(equal, tasks, times, (0, 1, 2, 3)), CALLS, 0)
    ends = [span.expected[1] for span in spans if span.expected is not None]
    assert max(ends) == check(pipelines_of(equal), orders.latest[1]).makespan
    for device in range(4):
        expected = [span.expected for span in spans if span.device == device]
        assert all(a is not None and b is not None and a[1] <= b[0] + 1e-9 for a, b in pairwise(expected))


def test_a_schedule_by_estimates_promises_no_seconds() -> None:
    assert {span.expected for span in stage_spans(ran(replace(SHAPE, is_measured=False)), CALLS, 0)} == {None}


def test_a_stage_keeps_the_times_of_the_latest_mini_batch_alone() -> None:
    times = StageTimes(torch.device("cpu"))
    for tasks in (5, 3):
        times.begin_mini_batch()
        times.begin_tasks()
        for at in range(tasks):
            with times.of(at % 2, False, 10):
                pass
    spans = times.of_tasks()
    assert len(spans) == 3
    assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_a_rank_that_is_interrupted_between_two_clocks_has_the_times_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tasks would else seem to begin before those that they wait for."""
    expected, interruptions, clock = epoch_of_clock(), [0.0, 0.05, 0.0, 0.02, 0.01], time.time

    def interrupted() -> float:
        now = clock()
        time.sleep(interruptions.pop(0))
        return now

    monkeypatch.setattr(time, "time", interrupted)
    assert abs(epoch_of_clock() - expected) < 1e-3 and not interruptions
