"""The micro-batches of a pipeline: as many as its stages want, and as even as samples allow."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.plan.batching import stage_batches


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 2000), st.integers(1, 8))
def test_each_sample_is_in_one_micro_batch_within_the_budget(lengths: list[int], budget: int, stages: int) -> None:
    batches = stage_batches(lengths, budget, stages)
    assert sorted(at for batch in batches for at in batch) == list(range(len(lengths)))
    assert all(batches), "none is empty"
    longest = max(lengths, default=0)
    assert all(sum(lengths[at] for at in batch) <= max(budget, longest) for batch in batches)
    assert len(batches) >= min(stages, len(lengths))
    assert stage_batches(lengths, budget, stages) == batches


@pytest.mark.parametrize("stages", [2, 4])
def test_a_mini_batch_within_the_budget_has_one_micro_batch_for_each_stage(stages: int) -> None:
    """Each takes as long as the widest: a micro-batch more, of what was left over, would cost a whole one."""
    draw = random.Random(stages)
    lengths = [int(draw.lognormvariate(5.5, 0.7)) + 20 for _ in range(64)]
    batches = stage_batches(lengths, 1 << 30, stages)
    assert len(batches) == stages
    assert max(sum(lengths[at] for at in batch) for batch in batches) <= 1.02 * sum(lengths) / stages
