"""Schedules built from priorities: whatever these are, all tasks are placed, within the memory, as `check` finds."""

from __future__ import annotations

import numpy as np
import pytest
from fused_cases import STAGES, memory_range
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_realloc.planner.fused.chains import FusedChains
from trl_realloc.planner.fused.check import check
from trl_realloc.planner.fused.pipelines import FusedPipelines, Pipeline


ANY_NUMBER = 1_000


def random_pipelines(rng: np.random.Generator, are_equal: bool) -> FusedPipelines:
    """Up to six micro-batches of each copy, and a limit between the least memory and all of it."""
    stages = STAGES[rng.integers(len(STAGES))]
    pipelines = []
    for own in stages:
        copies, count = max(stages) // own, int(rng.integers(1, 7))
        shape = (copies, 1 if are_equal else count, own)
        forward, backward = rng.integers(0, 7, shape), rng.integers(0, 9, shape)
        pipelines.append(Pipeline.of(own, count, forward, rng.integers(1, 4, shape), backward, copies))
    free = FusedPipelines(*pipelines)
    return FusedPipelines(*pipelines, tuple(float(rng.integers(low, high + 1)) for low, high in memory_range(free)))


@settings(max_examples=150, deadline=None)
@given(are_equal=st.booleans(), number=st.integers(0, 2**32), patience=st.sampled_from([0.0, 0.5, 1.0, 3.0, np.inf]))
def test_every_priorities_give_a_schedule_within_the_memory(are_equal: bool, number: int, patience: float) -> None:
    """No schedule stops half-way because the begun micro-batches wait for each other's memory."""
    rng = np.random.default_rng(number)
    pipelines = random_pipelines(rng, are_equal)
    chains = FusedChains(pipelines)
    priorities = rng.normal(size=chains.tasks)
    in_flight = np.full((len(chains.groups), chains.stages), ANY_NUMBER)
    built, builds = chains.build_in_turn(priorities, np.array(pipelines.memory_limit), in_flight, patience)
    simulated = check(pipelines, chains.schedule(built))
    assert simulated.makespan == pytest.approx(built.makespan)
    assert max(simulated.memory_peaks) == pytest.approx(chains.peak(built))
    assert builds > 1


def test_a_schedule_keeps_a_limit_of_micro_batches_in_flight() -> None:
    pipelines = FusedPipelines.uniform((4, 2), (6, 5), (3, 2), (1, 0))
    chains = FusedChains(pipelines)
    in_flight = np.full((len(chains.groups), 4), ANY_NUMBER)
    in_flight[0] = [3, 2, 2, 1]
    built, _ = chains.build_in_turn(chains.nominal, np.full(4, np.inf), in_flight, 0.0)
    assert check(pipelines, chains.schedule(built)).memory_peaks == (3, 2, 2, 1)
