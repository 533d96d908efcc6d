"""Swaps of neighbours: schedules stay valid, within their memory and no longer than before; some reach the bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fused_cases import exists, memory_range, random_small
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fused_chains import ANY_NUMBER, random_pipelines

from trl_realloc.planner.fused_chains import FusedChains
from trl_realloc.planner.fused_check import check, lower_bound, memory_bound, serial_memory
from trl_realloc.planner.fused_pipelines import FusedPipelines
from trl_realloc.planner.fused_search import search


ROUNDS = 300
EFFORT = 4_000_000


@pytest.mark.parametrize("are_equal", [True, False])
@settings(max_examples=100, deadline=None)
@given(number=st.integers(0, 2**32))
def test_swaps_keep_a_schedule_valid_and_within_its_memory(are_equal: bool, number: int) -> None:
    rng = np.random.default_rng(number)
    pipelines = random_pipelines(rng, are_equal)
    chains, memory = FusedChains(pipelines), np.array(pipelines.memory_limit)
    in_flight = np.full((len(chains.groups), chains.stages), ANY_NUMBER)
    built = chains.build(rng.normal(size=chains.tasks), memory, in_flight, np.inf, False)
    improved, done = chains.improve(built, memory, 0.0, ROUNDS, ROUNDS, rng)
    assert improved.makespan <= built.makespan and done == ROUNDS
    simulated = check(pipelines, chains.schedule(improved))
    assert simulated.makespan == pytest.approx(improved.makespan)
    assert simulated.memory_peak == pytest.approx(chains.peak(improved))
    assert np.sort(np.concatenate(simulated.starts)) == pytest.approx(np.sort(improved.starts))


def test_swaps_end_at_the_target_or_when_they_are_in_vain() -> None:
    pipelines = FusedPipelines.uniform((4, 4), (8, 8), (6, 4), (1.7, 3))
    chains, memory = FusedChains(pipelines), np.full(4, np.inf)
    in_flight = np.full((2, 4), ANY_NUMBER)
    built = chains.build(chains.nominal, memory, in_flight, 0.0, False)
    rng = np.random.default_rng(0)
    assert chains.improve(built, memory, built.makespan, ROUNDS, ROUNDS, rng) == (built, 0)
    _, done = chains.improve(built, memory, 0.0, 10**6, 50, rng)
    assert 50 <= done < 10**6


@pytest.mark.parametrize(
    "case",
    [
        ((8, 4), (16, 8), (3, 6), (1.39, 2)),
        ((8, 8), (32, 32), (2, 3), (1.65, 1.46)),
    ],
)
def test_the_bound_is_reached_within_little_memory_where_building_alone_does_not(case: tuple) -> None:
    pipelines = FusedPipelines.uniform(*case)
    most = 1.25 * serial_memory(pipelines)
    found = search(replace(pipelines, memory_limit=(most,) * pipelines.stages), effort=EFFORT)
    assert found.on_bound


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
