"""Ragged columns, batches of samples, and how samples are dealt to ranks and to micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan.algorithm_graphs import ROUTES
from trl_realloc.plan.batching import balance, micro_batches, work


ROWS = st.lists(st.lists(st.integers(-100, 100), max_size=6), max_size=7)
LENGTHS = st.lists(st.integers(1, 200), max_size=40)
fast = settings(max_examples=60, deadline=None)


def batch(n: int, start: int = 0) -> Rollouts:
    return Rollouts(
        index=torch.arange(start, start + n),
        prompts=Ragged.of([range(1, 2 + i % 3) for i in range(n)], torch.long),
        responses=Ragged.of([range(10, 11 + i % 5) for i in range(n)], torch.long),
        scores=torch.linspace(-1, 1, n),
        logprobs=Ragged.of([[-0.5 * i] * (1 + i % 5) for i in range(n)], torch.float32),
        has_eos=torch.arange(n) % 2 == 0,
    )


def as_lists(column: Ragged | Tensor) -> list[object]:
    return [row.tolist() for row in column.rows()] if isinstance(column, Ragged) else column.tolist()


def assert_equal(ours: Rollouts, expected: Rollouts) -> None:
    assert list(ours) == list(expected) and len(ours) == len(expected)
    for name in expected:
        a, b = ours[name], expected[name]
        assert type(a) is type(b)
        assert (a.values if isinstance(a, Ragged) else a).dtype == (b.values if isinstance(b, Ragged) else b).dtype
        assert as_lists(a) == as_lists(b), name


# --- ragged columns -----------------------------------------------------------------------------------------------


@fast
@given(ROWS)
def test_a_ragged_column_is_its_rows(rows: list[list[int]]) -> None:
    column = Ragged.of(rows, torch.long)
    assert len(column) == len(rows)
    assert as_lists(column) == rows
    assert [column[i].tolist() for i in range(len(rows))] == rows
    assert column.row_of.tolist() == [i for i, row in enumerate(rows) for _ in row]


@fast
@given(ROWS, st.integers(-3, 3))
def test_padding_and_unpadding_are_inverse(rows: list[list[int]], fill: int) -> None:
    column = Ragged.of(rows, torch.float32)
    rectangle = column.pad(fill)
    longest = max((len(row) for row in rows), default=0)
    assert rectangle.tolist() == [row + [fill] * (longest - len(row)) for row in rows]
    assert as_lists(Ragged.unpad(rectangle, column.lengths)) == rows


@fast
@given(ROWS, st.data())
def test_sum_spread_crop_and_select_act_row_by_row(rows: list[list[int]], data: st.DataObject) -> None:
    column = Ragged.of(rows, torch.float64)
    assert column.sum().tolist() == [sum(row) for row in rows]
    spread = column.spread(torch.arange(len(rows)))
    assert spread.tolist() == [i for i, row in enumerate(rows) for _ in row]
    kept = [data.draw(st.integers(0, len(row))) for row in rows]
    cropped = column.crop(torch.tensor(kept, dtype=torch.long))
    assert as_lists(cropped) == [row[:k] for row, k in zip(rows, kept, strict=True)]
    picked = data.draw(st.lists(st.sampled_from(range(len(rows))), max_size=9)) if rows else []
    assert as_lists(column.select(picked)) == [rows[i] for i in picked]
    assert as_lists(column.select(torch.tensor(picked, dtype=torch.long))) == [rows[i] for i in picked]


@fast
@given(st.lists(ROWS, min_size=1, max_size=4))
def test_concatenation_appends_rows(parts: list[list[list[int]]]) -> None:
    together = Ragged.cat([Ragged.of(rows, torch.long) for rows in parts])
    assert as_lists(together) == [row for rows in parts for row in rows]


def test_a_row_sum_has_gradients() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (Ragged(values, torch.tensor([2, 0, 1])).sum() * torch.tensor([5.0, 7.0, 11.0])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [5.0, 5.0, 11.0]


def test_lengths_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="sum to 3, but it has 4 values"):
        Ragged(torch.zeros(4), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="lengths"):
        Ragged.of([[1], [2, 3]], torch.long).crop(torch.tensor([2, 2]))


# --- batches of samples -------------------------------------------------------------------------------------------


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length.*'index': 2.*'scores': 3"):
        Rollouts(index=torch.arange(2), scores=torch.zeros(3))


def test_a_batch_counts_samples_and_names_columns() -> None:
    samples = batch(5)
    assert len(samples) == 5
    assert list(samples) == ["index", "prompts", "responses", "scores", "logprobs", "has_eos"]
    assert samples.lengths.tolist() == [2, 4, 6, 5, 7]
    assert samples.tokens == 24
    assert list(samples.only(["scores", "index"])) == ["scores", "index"]
    more = samples.plus(values=torch.zeros(5), scores=torch.ones(5))
    assert "values" not in samples and samples.tensor("scores").tolist() != more.tensor("scores").tolist()


@fast
@given(st.integers(1, 9), st.data())
def test_selecting_takes_whole_samples_and_sorting_undoes_a_shuffle(n: int, data: st.DataObject) -> None:
    samples = batch(n)
    order = data.draw(st.permutations(range(n)))
    shuffled = samples.select(order)
    for name in samples:
        assert as_lists(shuffled[name]) == [as_lists(samples[name])[i] for i in order]
    assert_equal(shuffled.sorted(), samples)


@fast
@given(st.integers(1, 20), st.integers(1, 5))
def test_dealing_out_and_collecting_gives_the_batch_back(n: int, ranks: int) -> None:
    samples = batch(n)
    parts = [samples.select(part) for part in balance(samples.lengths.tolist(), ranks)]
    assert_equal(Rollouts.cat(parts).sorted(), samples)


def test_parts_without_samples_need_no_columns() -> None:
    nothing = Rollouts(index=torch.arange(0))
    assert_equal(
        Rollouts.cat([nothing, batch(2), nothing, batch(1, start=2)]).only(["index"]), batch(3).only(["index"])
    )
    assert len(Rollouts.cat([nothing, nothing])) == 0


@pytest.mark.parametrize("recorded", [(True, False), (False, True), (False, False)])
def test_samples_of_a_part_without_routes_have_empty_routes(recorded: tuple[bool, bool]) -> None:
    routes = Ragged.of([torch.ones(3, 4), torch.ones(2, 4)], torch.uint8)
    parts = [batch(2).plus(**{ROUTES: routes} if has else {}) for has in recorded]
    together = Rollouts.cat(parts)
    assert (ROUTES in together) == any(recorded)
    if any(recorded):
        lengths = [n for has in recorded for n in ([3, 2] if has else [0, 0])]
        assert together.ragged(ROUTES).lengths.tolist() == lengths
        assert together.ragged(ROUTES).values.shape == (5, 4)


@fast
@given(st.integers(0, 6))
def test_bytes_carry_a_batch_whole(n: int) -> None:
    samples = batch(n).plus(
        half=Ragged.of([[0.5] * i for i in range(n)], torch.bfloat16), grid=torch.arange(6 * n).reshape(n, 2, 3)
    )
    assert_equal(Rollouts.from_bytes(samples.to_bytes()), samples)


def test_bytes_carry_a_column_that_is_a_part_of_another_tensor() -> None:
    grid = torch.arange(30).reshape(2, 15)
    for count in (0, 1, 2):
        column = grid[:count, 3]
        samples = Rollouts(index=column, responses=Ragged(column, torch.ones(count, dtype=torch.long)))
        assert_equal(Rollouts.from_bytes(samples.to_bytes()), samples)


def test_a_sample_that_travels_alone_takes_few_more_bytes_than_its_tokens() -> None:
    responses, drawn_eos = Ragged.of([[7] * 32], torch.long), torch.tensor([True])
    sample = Rollouts(index=torch.arange(1), responses=responses, has_eos=drawn_eos)
    data = sample.to_bytes()
    assert len(data) < 32 * 8 + 300
    assert_equal(Rollouts.from_bytes(data), sample)


# --- dealing out --------------------------------------------------------------------------------------------------


@fast
@given(LENGTHS, st.integers(1, 9))
def test_balance_deals_every_sample_once_and_evenly(lengths: list[int], parts: int) -> None:
    dealt = balance(lengths, parts)
    assert len(dealt) == parts
    assert sorted(i for part in dealt for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in dealt)
    assert dealt == balance(list(lengths), parts)
    loads = [sum(lengths[i] for i in part) for part in dealt]
    best = max(sum(lengths) / parts, max(lengths, default=0))  # no deal can do better than this
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert max(loads) <= 2 * best


def test_balance_keeps_grahams_bound_on_his_worst_case() -> None:
    lengths = [5, 5, 4, 4, 3, 3, 3]  # three ranks: 9 tokens each are possible, 11 is what the rule gives
    assert sorted(sum(lengths[i] for i in part) for part in balance(lengths, 3)) == [8, 8, 11]


def test_work_is_the_length_where_attention_is_not_counted_and_twice_it_where_it_weighs_as_much_as_all_else() -> None:
    assert work([3, 0, 100], math.inf) == [3, 0, 100]
    assert work([100, 50], 100) == [200, 75]


def test_a_long_sample_has_fewer_beside_it_than_its_tokens_say() -> None:
    """Of long contexts, where attention takes as long as all else at 61,000 tokens, as in an 8B model."""
    lengths = [32_000] + [4_000] * 32
    by_tokens, by_work = balance(lengths, 4), balance(work(lengths, 61_000), 4)
    loads = [[sum(work([lengths[i] for i in part], 61_000)) for part in parts] for parts in (by_tokens, by_work)]
    assert max(loads[1]) < 0.9 * max(loads[0])
    assert by_work[0] == [0] and sorted(map(len, by_work[1:])) == [10, 11, 11]


def test_balance_spreads_equal_samples_by_count() -> None:
    assert [len(part) for part in balance([7] * 8, 4)] == [2, 2, 2, 2]
    assert [len(part) for part in balance([], 3)] == [0, 0, 0]


@fast
@given(LENGTHS, st.integers(1, 300))
def test_micro_batches_hold_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = micro_batches(lengths, budget)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    assert all(batches), "an empty micro-batch"
    assert all(len(b) == 1 or sum(lengths[i] for i in b) <= budget for b in batches)
    assert batches == micro_batches(list(lengths), budget)


@fast
@given(LENGTHS, st.integers(1, 300))
def test_no_two_micro_batches_would_fit_in_one(lengths: list[int], budget: int) -> None:
    loads = sorted(sum(lengths[i] for i in b) for b in micro_batches(lengths, budget))
    assert len(loads) < 2 or loads[0] + loads[1] > budget


def test_no_rows_of_a_large_batch_are_sent_without_its_values() -> None:
    whole = Ragged(torch.zeros(100_000), torch.full((100,), 1000))
    assert len(Rollouts(values=whole.select([])).to_bytes()) < 10_000
