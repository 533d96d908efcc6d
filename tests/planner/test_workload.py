"""Lengths as distributions: how an engine's batch shrinks as samples finish."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamas import work

from trl_realloc.common.errors import PlanError
from trl_realloc.planner.cost.workload import BATCHES, Workload


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    episodes=st.integers(1, 200),
    slots=st.integers(1, 64),
)
def test_every_token_is_decoded_whatever_the_slots(lengths: list[int], episodes: int, slots: int) -> None:
    workload = work(response_tokens=tuple(lengths), episodes=episodes)
    phases = workload.decoding(1, slots).phases
    decoded = sum(steps * batch for steps, batch, _ in phases)
    ordered = sorted(lengths)
    if episodes % len(lengths) == 0:  # neighbouring phases are joined where there are many, and batches are whole
        assert decoded == pytest.approx(sum(ordered) * episodes // len(lengths), rel=0.15)
    assert all(batch <= slots or slots < 1 for _, batch, _ in phases) or episodes > 4096
    assert sum(steps for steps, _, _ in phases) >= max(lengths) * (episodes >= len(lengths))
    assert len(phases) <= 48


def test_equal_lengths_decode_in_one_batch() -> None:
    assert work(episodes=8, response_tokens=(100,)).decoding(1, 64) == (((100, 8, 128 + 50),), 0)


def test_waiting_samples_take_the_place_of_finished_ones() -> None:
    phases = work(episodes=8, response_tokens=(100,)).decoding(1, 4).phases
    assert [(steps, batch) for steps, batch, _ in phases] == [(100, 4), (100, 4)]


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    groups=st.integers(1, 3),
    completions=st.sampled_from([1, 4, 8]),
    share=st.floats(0, 1),
)
def test_what_an_engine_holds_at_a_time_fits_in_its_cache_and_no_token_is_lost(
    lengths: list[int], groups: int, completions: int, share: float
) -> None:
    episodes = completions * groups * len(lengths)
    workload = work(response_tokens=tuple(lengths), episodes=episodes, completions=completions)
    held = workload.engine_prompt(episodes)
    least = 128 + max(lengths) + 16  # one sample alone
    room = least + share * max(0.0, workload.most_cached(episodes) - least)
    phases, reread = workload.decoding(1, episodes, room)
    # neighbouring phases are joined where there are many, and their batches are whole
    decoded = sum(steps * batch for steps, batch, _ in phases)
    assert decoded == pytest.approx(sum(lengths) * episodes // len(lengths), rel=0.15)
    assert all((batch - 1) * (cached - 128 + held + 8) <= room for _, batch, cached in phases)
    whole = workload.decoding(1, episodes)
    assert sum(steps for steps, _, _ in phases) >= sum(steps for steps, _, _ in whole.phases)
    assert not whole.reread and reread >= 0


def test_a_sample_that_the_cache_has_no_room_for_waits_and_is_computed_again() -> None:
    """Four samples of 128 + 8 tokens grow by 91 each, until the cache is full. One waits with its 91 tokens, until the
    others have ended; its prompt and these are computed again."""
    made = work(episodes=4, response_tokens=(100,)).decoding(1, 4, 4 * (128 + 8 + 91) + 3)
    assert [(steps, batch) for steps, batch, _ in made.phases] == [(91, 4), (9, 3), (9, 1)]
    assert made.reread == 128 + 91


@pytest.mark.parametrize(
    ("samples", "completions", "prompt", "computed"),
    [
        (32, 8, 400, (400 + 7 * 8) / 8),  # four groups of 8, whose prompts share all but half a block
        (12, 8, 400, (400 + 5 * 8) / 6),  # a group of 8 and half of another
        (5, 8, 400, (400 + 4 * 8) / 5),
        (32, 1, 400, 400),
        (32, 8, 6, 6),  # less than a block
    ],
)
def test_an_engine_computes_a_groups_prompt_once(samples: int, completions: int, prompt: int, computed: float) -> None:
    assert work(prompt_tokens=prompt, completions=completions).engine_prompt(samples) == pytest.approx(computed)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    episodes=st.integers(1, 300),
    engines=st.integers(1, 16),
)
def test_engines_get_lengths_alike_and_the_slowest_is_priced(lengths: list[int], episodes: int, engines: int) -> None:
    engines = min(engines, episodes)
    workload = work(response_tokens=tuple(lengths), episodes=episodes)
    drawn = workload.engine_lengths(engines)
    assert sum(map(len, drawn)) == episodes
    assert max(map(len, drawn)) - min(map(len, drawn)) <= 1
    ordered = sorted(lengths)
    expected = sorted(ordered[(2 * at + 1) * len(lengths) // (2 * episodes)] for at in range(episodes))
    assert sorted(length for engine in drawn for length in engine) == expected
    assert sum(steps for steps, _, _ in workload.decoding(engines, episodes).phases) == expected[-1]


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    episodes=st.integers(1, 300),
    engines=st.integers(1, 16),
)
def test_batches_share_lengths_each_as_its_slowest_engine_has(lengths: list[int], episodes: int, engines: int) -> None:
    engines = min(engines, episodes)
    workload = work(response_tokens=tuple(lengths), episodes=episodes)
    batches = workload.longest_engine_by_batch(engines)
    assert len(batches) == BATCHES
    assert {len(batch) for batch in batches} <= {episodes // engines, -(-episodes // engines)}
    assert len({len(batch) for batch in batches}) == 1
    total = BATCHES * episodes
    dealt = sorted(lengths)[(2 * total - 1) * len(lengths) // (2 * total)]
    assert max(length for batch in batches for length in batch) == dealt, "the longest sample is in its batch's engine"
    if engines == 1:
        drawn = sorted(length for batch in batches for length in batch)
        assert drawn == [sorted(lengths)[(2 * at + 1) * len(lengths) // (2 * total)] for at in range(total)]


def test_a_length_that_half_of_the_batches_have_is_not_in_every_batch() -> None:
    """One sample in 100 is long, and a batch has 48."""
    workload = work(episodes=48, response_tokens=(*[20] * 99, 1000))
    longest = [max(batch) for batch in workload.longest_engine_by_batch(1)]
    assert set(longest) == {20, 1000}
    assert longest.count(1000) <= round(BATCHES * 48 / 100)


def test_a_long_tail_is_kept() -> None:
    """One sample in 500 is ten times as long as the others."""
    lengths = [100] * 1996 + [1000] * 4
    workload = work(episodes=512).of_lengths(lengths)
    assert workload.response_tokens[-1] == 1000
    assert sum(steps for steps, _, _ in workload.decoding(32, 64).phases) == 1000


def test_a_measured_distribution_keeps_its_mean() -> None:
    lengths = [*range(1, 1001)]
    kept = Workload.quantiles(lengths)
    assert sum(kept) / len(kept) == pytest.approx(500, rel=0.02)
    assert work().of_lengths(lengths).mean_response == pytest.approx(500, rel=0.02)


@pytest.mark.parametrize(
    "wrong", [{"episodes": 0}, {"response_tokens": ()}, {"response_tokens": (0, 5)}, {"epochs": 0}]
)
def test_a_workload_of_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="workload"):
        work(**wrong)


@given(mean=st.floats(20, 2000), ratio=st.floats(1, 8))
def test_lengths_with_a_tail_have_the_mean_and_99th_percentile_that_were_asked_for(mean: float, ratio: float) -> None:
    lengths = Workload.tail(mean, mean * ratio, 1_000_000)
    assert list(lengths) == sorted(lengths)
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.03)  # a tail of quantiles lacks its last 0.2 %
    assert lengths[int(0.99 * len(lengths))] == pytest.approx(mean * ratio, rel=0.05)
    assert max(Workload.tail(mean, mean * ratio, round(mean * ratio) + 1)) <= round(mean * ratio) + 1


@pytest.mark.parametrize(
    ("mean", "p99", "said"),
    [(0.5, 10, "the mean is 1 or more"), (100, 50, "from the mean"), (100, 2000, "1,024"), (10, 1000, "at most 150")],
)
def test_lengths_that_no_responses_can_have_are_refused(mean: float, p99: float, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Workload.tail(mean, p99, 1024)
