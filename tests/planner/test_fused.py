"""Fused schedules: valid, on the bound in the published cases, optimal in small ones; a broken schedule is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fused_cases import exists, memory_range, random_small
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_realloc.common.errors import PlanError
from trl_realloc.planner.fused.check import check, lower_bound, memory_bound, one_f_one_b, serial_memory, serial_time
from trl_realloc.planner.fused.pipelines import FusedPipelines, FusedSchedule, Pipeline, Task
from trl_realloc.planner.fused.schedule_search import search


# stages, micro-batches, forward times, memory of A and B; 1F1B one after the other, and what RLHFuse's search reached
PUBLISHED = [
    ((8, 4), (16, 8), (5, 4), (1.95, 2), 477, 372),
    ((8, 8), (32, 32), (5, 2), (1.95, 1), 819, 702),
    ((8, 8), (8, 8), (5, 2), (1.95, 1), 315, 225),
    ((16, 8), (32, 16), (2, 2), (1.64, 2), 420, 330),
    ((16, 8), (16, 8), (2, 2), (1.64, 2), 276, 186),
    ((16, 16), (32, 32), (2, 1), (1.64, 1), 423, 318),
]
SMALL = 60  # `benchmarks/fused.py --small 2000` has more
SMALL_EFFORT = 300_000


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_cases_reach_the_bound_with_little_memory(case: tuple) -> None:
    *sizes, serial, reached = case
    pipelines = FusedPipelines.uniform(*sizes)
    assert serial_time(pipelines) == serial
    assert lower_bound(pipelines) == reached
    found = search(pipelines, effort=2_000_000)
    assert found.simulated.makespan == reached
    assert max(found.simulated.memory_peaks) <= 1.25 * serial_memory(pipelines)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_schedule_is_valid_and_between_the_bound_and_one_model_after_the_other(number: int) -> None:
    pipelines = random_small(np.random.default_rng(number))
    found = search(pipelines, effort=5_000)
    simulated = check(pipelines, found.schedule)
    assert simulated == found.simulated
    assert lower_bound(pipelines) - 1e-6 <= simulated.makespan
    if pipelines.memory_limit is None:
        assert simulated.makespan <= serial_time(pipelines) + 1e-6


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.floats(1e-6, 1e6))
def test_the_unit_of_time_does_not_matter(number: int, unit: float) -> None:
    pipelines = random_small(np.random.default_rng(number))
    scaled = FusedPipelines(
        *(Pipeline(p.forward * unit, p.backward * unit, p.memory) for p in (pipelines.a, pipelines.b)),
        pipelines.memory_limit,
    )
    found = search(scaled, effort=20_000)
    assert found.simulated.makespan == pytest.approx(check(pipelines, found.schedule).makespan * unit)


def test_small_schedules_are_optimal() -> None:
    """The makespan of each, and its memory peak where the makespan is; at this effort some may be missed."""
    rng = np.random.default_rng(7)
    slower, larger = [], []
    for number in range(SMALL):
        pipelines = random_small(rng)
        found = search(pipelines, effort=SMALL_EFFORT)
        makespan, peak = found.simulated.makespan, max(found.simulated.memory_peaks)
        if makespan > found.bound and exists(pipelines, makespan - 1, pipelines.memory_limit):
            slower.append(number)
        elif exists(
            pipelines, makespan, tuple(np.minimum(pipelines.memory_limit or np.inf, [peak - 1] * pipelines.stages))
        ):
            larger.append(number)
    assert len(slower) <= 2 and len(larger) <= 2, (slower, larger)


def test_the_exhaustive_search_finds_what_is_there_and_nothing_else() -> None:
    single = FusedPipelines(Pipeline.of(1, 2, 1, 1), Pipeline.of(1, 1, 2, 1))
    assert exists(single, 12, None) and not exists(single, 11, None)
    assert exists(single, 12, (1.0,)) and not exists(single, 100, (0.5,))


def test_the_same_seed_gives_the_same_schedule() -> None:
    pipelines = FusedPipelines.uniform((4, 2), (6, 5), (3.1, 2.3), (2, 1))
    first, again = (search(pipelines, seed=3, effort=400_000) for _ in range(2))
    assert first.schedule == again.schedule


def test_unequal_stages_and_micro_batches_keep_a_memory_limit() -> None:
    rng = np.random.default_rng(0)
    a = Pipeline.of(4, 8, rng.uniform(1, 3, (8, 4)), rng.uniform(1, 2, (8, 1)), copies=1)
    b = Pipeline.of(2, 6, rng.uniform(0.5, 2, (2, 6, 2)), 1.0, copies=2)
    limit = (6.0, 5.0, 4.0, 3.5)
    found = search(FusedPipelines(a, b, limit), effort=2_000_000)
    assert all(peak <= most for peak, most in zip(found.simulated.memory_peaks, limit, strict=True))
    assert found.simulated.makespan < 0.9 * serial_time(FusedPipelines(a, b))


def test_the_lower_bound_of_equal_times_includes_each_models_own_1f1b() -> None:
    pipelines = FusedPipelines.uniform((8, 4), (5, 9), (3, 2), (1, 1))
    assert one_f_one_b(pipelines, "A")[0] == (5 + 7) * 9
    assert one_f_one_b(pipelines, "B")[0] == (9 + 3) * 6
    assert lower_bound(pipelines) >= 108


def test_no_schedule_is_below_the_bound_that_knows_of_memory() -> None:
    rng, raised = np.random.default_rng(5), 0
    for _ in range(100):
        pipelines = random_small(rng)
        memory = pipelines.memory_limit or tuple(float(low) for low, _ in memory_range(pipelines))
        bound = memory_bound(pipelines, np.array(memory))
        assert bound >= lower_bound(pipelines)
        if bound > lower_bound(pipelines):
            raised += 1
            assert not exists(pipelines, np.ceil(bound) - 1, memory)
    assert raised > 10


def test_the_bound_that_knows_of_memory_counts_the_forwards_before_the_first_backward() -> None:
    """Stage 3 could begin at 6 and has no backward before 28. Ten micro-batches have room, whose forwards take 20."""
    pipelines = FusedPipelines.uniform((8, 8), (32, 32), (2, 2), (2.43, 2.25))
    within = np.full(8, 1.25 * serial_memory(pipelines))
    assert lower_bound(pipelines) == 402
    assert memory_bound(pipelines, within) == 404
    assert memory_bound(pipelines, 2 * within) == 402


def test_1f1bs_memory_is_that_of_its_warm_up() -> None:
    assert serial_memory(FusedPipelines.uniform((8, 4), (16, 8), (5, 4), (1.95, 2))) == pytest.approx(8 * 1.95)
    assert serial_memory(FusedPipelines.uniform((8, 8), (3, 8), (5, 4), (1.0, 0.1))) == pytest.approx(3)


EXAMPLE = FusedPipelines.uniform((2, 2), (2, 2), (1, 1), (1, 1), memory_limit=(3.0, 3.0))


def moved(schedule: FusedSchedule, stage: int, tasks: Callable[[list[Task]], list[Task]]) -> FusedSchedule:
    stages = [list(row) for row in schedule.stages]
    stages[stage] = tasks(stages[stage])
    return FusedSchedule(tuple(tuple(row) for row in stages))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tasks: tasks[1:], "lacks 1 tasks"),
        (lambda tasks: [*tasks, tasks[0]], "has 1 duplicate or misplaced tasks"),
        (lambda tasks: [tasks[0]._replace(copy=1), *tasks[1:]], "A copy 1|B copy 1"),
        (lambda tasks: [tasks[0]._replace(micro_batch=9), *tasks[1:]], "micro-batch 9"),
        (lambda tasks: tasks[::-1], "wait for each other"),
    ],
)
def test_a_broken_schedule_is_refused(change: Callable[[list[Task]], list[Task]], problem: str) -> None:
    found = search(EXAMPLE, effort=20_000)
    check(EXAMPLE, found.schedule)
    with pytest.raises(PlanError, match=problem):
        check(EXAMPLE, moved(found.schedule, 0, change))


def test_a_schedule_with_all_forwards_first_exceeds_a_memory_limit() -> None:
    def tasks(kind: str, *models: str) -> tuple[Task, ...]:
        return tuple(Task(model, 0, number, kind) for model in models for number in range(2))

    order = FusedSchedule(
        (
            tasks("forward", "A", "B") + tasks("backward", "B", "A"),
            tasks("forward", "B", "A") + tasks("backward", "A", "B"),
        )
    )
    with pytest.raises(PlanError, match="Stage 0 holds 4 of activations, more than its limit of 3"):
        check(EXAMPLE, order)


def test_stages_that_wait_for_each_others_model_are_refused() -> None:
    a, b = ([Task(model, 0, 0, "forward"), Task(model, 0, 0, "backward")] for model in ("A", "B"))
    circle = FusedSchedule((tuple(b + a), tuple(a + b)))
    with pytest.raises(PlanError, match="stage 0 at forward of B copy 0 micro-batch 0, stage 1 at forward of A"):
        check(FusedPipelines.uniform((2, 2), (1, 1), (1, 1), (1, 1)), circle)
    with pytest.raises(PlanError, match="The schedule has 1 stages, the pipelines 2"):
        check(EXAMPLE, FusedSchedule((circle.stages[0],)))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: FusedPipelines.uniform((6, 4), (1, 1), (1, 1), (1, 1)), "one number must divide the other"),
        (lambda: FusedPipelines.uniform((2, 2), (0, 1), (1, 1), (1, 1)), "0 micro-batches"),
        (lambda: FusedPipelines.uniform((2, 2), (1, 1), (-1, 1), (1, 1)), "negative or not finite"),
        (lambda: FusedPipelines.uniform((2, 2), (1, 1), (np.nan, 1), (1, 1)), "negative or not finite"),
        (
            lambda: FusedPipelines.uniform((2, 2), (1, 1), (1, 1), (4, 1), (5.0, 3.0)),
            "needs 4 on stage 1, more than its limit",
        ),
        (lambda: FusedPipelines.uniform((2, 2), (1, 1), (1, 1), (4, 1), (5.0,)), "1 values for 2 stages"),
        (lambda: Pipeline(np.ones((1, 2, 2)), np.ones((1, 2, 3)), np.ones((1, 2, 2))), "backward has shape"),
        (lambda: FusedPipelines(Pipeline.of(2, 1, 1, 1), Pipeline.of(4, 1, 1, 1)), "cover the same stages"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        make()
