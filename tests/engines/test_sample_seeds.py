"""The random numbers of a response that one engine begins and another one ends."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.engines.generation.sample_seeds import seed_arguments, uniforms


@given(seed=st.integers(0, 2**63 - 1), length=st.integers(1, 200), offset=st.integers(0, 200))
def test_a_continued_response_has_the_numbers_that_it_would_have_had(seed: int, length: int, offset: int) -> None:
    offset = min(offset, length - 1)
    whole = uniforms(seed_arguments(seed, 0, True, True)["extra_args"], length)
    rest = uniforms(seed_arguments(seed, offset, True, True)["extra_args"], length - offset)
    assert np.array_equal(whole[offset:], rest)
    assert np.array_equal(whole, np.random.default_rng(seed).random(length))  # as generation by Transformers


def test_vllms_newest_sampler_needs_the_seed_alone_because_it_draws_by_position() -> None:
    assert seed_arguments(7, 0, False, True) == seed_arguments(7, 30, False, True) == {"seed": 7}


@given(seed=st.integers(0, 2**63 - 1), offsets=st.sets(st.integers(1, 10_000), min_size=2, max_size=2))
def test_vllms_older_sampler_never_draws_with_the_same_numbers_again(seed: int, offsets: set[int]) -> None:
    seeds = [seed_arguments(seed, offset, False, False)["seed"] for offset in (0, *offsets)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 3
    assert all(0 <= other < 2**63 for other in seeds)
    again = [seed_arguments(seed, offset, False, False)["seed"] for offset in (0, *offsets)]
    assert again == seeds
