"""Which rank writes which chunk of a training state, and the list of them."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.planner import SavePlan

from trl_realloc.engines.training_state import StateTensor, TensorSpec
from trl_realloc.trainer.checkpoint.chunk_division import Chunks, Division
from trl_realloc.trainer.checkpoint.chunk_plans import Entries, Saving
from trl_realloc.trainer.checkpoint.state_storage import file_of


Cuts = list[tuple[int, int]]


@st.composite
def states(draw: st.DrawFn) -> list[Entries]:
    """Of each rank: every tensor is cut into a grid, and each cell is on one rank or on several."""
    per_rank: list[Entries] = [{} for _ in range(draw(st.integers(1, 4)))]
    ranks = st.sets(st.integers(0, len(per_rank) - 1), min_size=1)
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        grid: list[Cuts] = []
        for size in shape:
            edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
            grid.append(list(pairwise(edges)))
        for box in product(*grid):
            for rank in draw(ranks):
                cell = torch.zeros([stop - start for start, stop in box], dtype=dtype)
                name = f"policy/{number}/master"
                if name not in per_rank[rank]:
                    per_rank[rank][name] = StateTensor(TensorSpec(shape, dtype), [])
                per_rank[rank][name].cells.append((box, cell))
        for rank in draw(ranks):
            per_rank[rank][f"policy/{number}/scalars"] = {"step": 1}
    return per_rank


def plans_of(per_rank: list[Entries]) -> list[SavePlan]:
    return [Saving(entries).create_local_plan() for entries in per_rank]


@given(states())
def test_each_chunk_is_written_once_and_the_list_is_that_of_dcp(per_rank: list[Entries]) -> None:
    plans = plans_of(per_rank)
    division = Division.of([Chunks.of(plan) for plan in plans])
    written = [[plan.items[at].index for at in kept.tolist()] for plan, kept in zip(plans, division.kept, strict=True)]
    every = {item.index for plan in plans for item in plan.items}
    assert sum(map(len, written)) == len(every) and {index for own in written for index in own} == every
    _, expected = create_default_global_save_plan(dedup_save_plans(plans))
    ours = division.metadata.state_dict_metadata
    assert ours.keys() == expected.state_dict_metadata.keys()
    for name, stored in expected.state_dict_metadata.items():
        assert type(ours[name]) is type(stored)
        if hasattr(stored, "chunks"):
            assert (ours[name].size, ours[name].properties) == (stored.size, stored.properties)
            assert sorted(ours[name].chunks, key=str) == sorted(stored.chunks, key=str)
    lengths = [np.arange(1, len(own) + 1) for own in written]
    assert division.is_written(lengths)
    results = division.results(lengths, [file_of(rank) for rank in range(len(plans))])
    for rank, (own, found) in enumerate(zip(written, results, strict=True)):
        assert [result.index for result in found] == own
        places = [(r.storage_data.relative_path, r.storage_data.offset, r.storage_data.length) for r in found]
        assert places == [(file_of(rank), sum(range(1, n)), n) for n in range(1, len(own) + 1)]
    if every:
        assert not division.is_written([np.zeros(0, dtype=np.int64)] * len(plans))


@given(st.integers(1, 5), st.integers(1, 40))
def test_replicas_share_what_they_write_by_bytes(ranks: int, tensors: int) -> None:
    entries: Entries = {}
    for number in range(tensors):
        cell = torch.zeros(number + 1)
        entries[f"critic/{number}/master"] = StateTensor(
            TensorSpec(tuple(cell.shape), cell.dtype), [(((0, len(cell)),), cell)]
        )
    division = Division.of([Chunks.of(plan) for plan in plans_of([entries] * ranks)])
    loads = [sum(4 * (at + 1) for at in kept.tolist()) for kept in division.kept]
    assert sum(loads) == 4 * tensors * (tensors + 1) // 2
    assert max(loads) - min(loads) <= 4 * tensors, "no more than the largest tensor"


def test_a_tensor_of_which_a_part_is_on_no_rank_is_refused() -> None:
    half = StateTensor(TensorSpec((4, 2), torch.float32), [(((0, 2), (0, 2)), torch.zeros(2, 2))])
    with pytest.raises(ValueError, match=r"the ranks have 4 of 8 elements of policy/w/master"):
        Division.of([Chunks.of(plan) for plan in plans_of([{"policy/w/master": half}])])
    assert prod(half.spec.shape) == 8
