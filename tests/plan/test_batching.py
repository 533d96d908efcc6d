"""The micro-batches of a pipeline: as many as its stages want, and as even as samples allow. Samples with tokens in
common at their beginnings, and their division."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.plan.batching import PrefixTree, balance, balance_shared, micro_batches, stage_batches, work


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


@st.composite
def trees(draw: st.DrawFn, least: int | None = None) -> tuple[list[bytes], list[int], PrefixTree]:
    """The tokens of samples, one byte each, of an alphabet of two letters; their prompts' lengths; and the tree."""
    stems = draw(st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=3))
    keys, prompts = [], []
    for _ in range(draw(st.integers(1, 10))):
        prompt = draw(st.sampled_from(stems))
        keys.append((prompt + draw(st.text("ab", max_size=8))).encode())
        prompts.append(len(prompt))
    shortest = draw(st.integers(1, 6)) if least is None else least
    return keys, prompts, PrefixTree.of(keys, prompts, 1, shortest)


def common(one: bytes, other: bytes) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def nodes(keys: list[bytes]) -> int:
    """The nodes of the trie of these keys."""
    return len({key[:length] for key in keys for length in range(1, len(key) + 1)})


@given(trees(least=1))
def test_a_tree_without_a_least_length_has_the_tries_nodes(drawn: tuple[list[bytes], list[int], PrefixTree]) -> None:
    keys, _, tree = drawn
    assert tree.tokens == nodes(keys)
    assert sorted(tree.order) == list(range(len(keys)))


@given(trees(), st.data())
def test_samples_share_the_common_alone(drawn: tuple[list[bytes], list[int], PrefixTree], data: st.DataObject) -> None:
    keys, _, tree = drawn
    kept = data.draw(st.lists(st.sampled_from(range(len(keys))), unique=True))
    for of_tree, own in ((tree, keys), (tree.select(kept), [keys[at] for at in kept])):
        assert of_tree.lengths == tuple(map(len, own)) and sorted(of_tree.order) == list(range(len(own)))
        assert of_tree.shared[:1] in ((), (0,))
        for before, at, shared in zip(of_tree.order, of_tree.order[1:], of_tree.shared[1:], strict=False):
            assert shared <= common(own[before], own[at])
        assert nodes(own) <= of_tree.tokens <= sum(map(len, own))


def test_samples_of_one_prompt_branch_at_its_end() -> None:
    """Their completions may begin with the same few tokens, but all of them have the same run of columns before."""
    keys = [b"prompt" + rest for rest in (b"aab", b"aac", b"b", b"", b"bbb")]
    tree = PrefixTree.of(keys, [6] * 5, 1, least=4)
    assert tree.shared == (0, 6, 6, 6, 6) and tree.tokens == 6 + sum(len(key) - 6 for key in keys)
    assert PrefixTree.of(keys, [6] * 5, 1, least=7).shared == (0,) * 5
    continued = [b"prompt.aab" * 2, b"prompt.aab", b"prompt.aab"]
    assert PrefixTree.of(continued, [10, 7, 7], 1, least=3).shared == (0, 10, 10)


@given(trees(), st.integers(1, 60), st.integers(1, 4))
def test_each_sample_with_a_shared_beginning_is_in_one_micro_batch_within_the_budget(
    drawn: tuple[list[bytes], list[int], PrefixTree], budget: int, stages: int
) -> None:
    keys, _, tree = drawn
    longest = max(map(len, keys))
    for batches in (micro_batches(tree.lengths, budget, tree), stage_batches(tree.lengths, budget, stages, tree)):
        assert sorted(at for batch in batches for at in batch) == list(range(len(keys)))
        assert all(batches), "none is empty"
        assert all(tree.select(batch).tokens <= max(budget, longest) for batch in batches)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 80))
def test_samples_that_share_nothing_are_packed_as_without_a_tree(lengths: list[int], budget: int) -> None:
    keys = [bytes([at]) * length for at, length in enumerate(lengths)]
    tree = PrefixTree.of(keys, [1] * len(keys), 1)
    assert micro_batches(lengths, budget, tree) == micro_batches(lengths, budget)


@given(trees(), st.integers(1, 4), st.sampled_from([20.0, math.inf]))
def test_ranks_get_samples_of_less_work_than_if_these_were_divided_one_by_one(
    drawn: tuple[list[bytes], list[int], PrefixTree], ranks: int, attention_at: float
) -> None:
    keys, _, tree = drawn

    def works(division: list[list[int]]) -> list[float]:
        parts = [tree.select(part) for part in division]
        return [sum(work(part.lengths, attention_at)) - sum(work(part.shared, attention_at)) for part in parts]

    division = balance_shared(tree, ranks, attention_at)
    one_by_one = balance(work(tree.lengths, attention_at), ranks)
    assert sorted(at for part in division for at in part) == list(range(len(keys))) and len(division) == ranks
    assert tree.work_of(division, attention_at) == pytest.approx(works(division))
    assert max(works(division)) <= max(works(one_by_one)) + 1e-9


def test_ranks_get_whole_groups() -> None:
    keys = [bytes([group]) * 40 + bytes([9, group, number]) for number in range(4) for group in range(4)]
    tree = PrefixTree.of(keys, [40] * 16, 1)
    assert tree.work_of(balance_shared(tree, 2)) == [2 * 52, 2 * 52]
    assert tree.work_of(balance_shared(tree, 8)) == [40 + 2 * 3] * 8, "each group is divided"


def test_a_group_stays_together_and_its_prompt_counts_once() -> None:
    keys = [bytes([group]) * 40 + bytes([9, group, number]) for number in range(4) for group in range(3)]
    tree = PrefixTree.of(keys, [40] * 12, 1)
    groups = [[at for at in range(12) if at % 3 == group] for group in range(3)]
    assert sorted(map(sorted, micro_batches(tree.lengths, 52, tree))) == groups
    assert [len(batch) for batch in micro_batches(tree.lengths, 2 * 52, tree)] == [8, 4]
    assert len(stage_batches(tree.lengths, 1000, 2, tree)) == 3, "two would leave one stage waiting for a longer time"


def test_a_group_that_is_too_large_is_divided() -> None:
    keys = [bytes(40) + bytes([9, number, number]) for number in range(10)]
    tree = PrefixTree.of(keys, [40] * 10, 1)
    batches = micro_batches(tree.lengths, 52, tree)
    assert [tree.select(batch).tokens for batch in batches] == [52, 52, 46]
    assert len(micro_batches(tree.lengths, 20, tree)) == 10, "each is longer than a micro-batch"
