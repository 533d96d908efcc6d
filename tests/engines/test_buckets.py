"""How tensors are put into buckets."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.engines.buckets import in_buckets


SIZES = st.lists(st.tuples(st.integers(0, 40), st.sampled_from("ab")))


@given(SIZES, st.integers(0, 60))
def test_buckets_keep_the_order_the_limit_and_the_kind(items: list[tuple[int, str]], limit: int) -> None:
    made = list(in_buckets(items, lambda item: item[0], limit, lambda item: item[1]))
    assert [item for bucket in made for item in bucket] == items
    for bucket in made:
        assert bucket and len({kind for _, kind in bucket}) == 1
        assert len(bucket) == 1 or sum(size for size, _ in bucket) <= limit


@given(SIZES, st.integers(0, 60))
def test_a_bucket_ends_only_where_the_next_item_does_not_fit(items: list[tuple[int, str]], limit: int) -> None:
    made = list(in_buckets(items, lambda item: item[0], limit, lambda item: item[1]))
    for bucket, following in itertools.pairwise(made):
        is_full = sum(size for size, _ in bucket) + following[0][0] > limit
        assert is_full or following[0][1] != bucket[0][1]


def test_items_are_read_no_further_than_needed() -> None:
    read: list[int] = []

    def items() -> object:
        for number in range(10):
            read.append(number)
            yield number

    next(in_buckets(items(), lambda item: 1, 3))  # type: ignore[arg-type]
    assert read == [0, 1, 2, 3]
