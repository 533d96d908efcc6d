"""Copies in one layout of parameters, compared with those in another, without processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.realloc.layout import Box, Layout, flat_boxes, whole
from trl_realloc.runtime.parameters.copy_digests import CopyDigests, DigestSums


SHAPES = {"embed": (10, 6), "norm": (7,), "proj": (6, 8)}
SPEC = ModelSpec.of_shapes(list(SHAPES.items()), bytes_per_element=4)
Boxes = dict[int, dict[str, list[Box]]]
Values = dict[str, list[tuple[Box, Tensor]]]


def layout(name: str) -> Boxes:
    if name == "whole on 0":
        return {0: {name: [whole(shape)] for name, shape in SHAPES.items()}}
    if name == "whole on 1, 2":
        return {rank: {name: [whole(shape)] for name, shape in SHAPES.items()} for rank in (1, 2)}
    if name == "flat in 3":
        thirds = {n: -(-torch.Size(s).numel() // 3) for n, s in SHAPES.items()}
        ends = {n: torch.Size(s).numel() for n, s in SHAPES.items()}
        return {
            r: {n: list(flat_boxes(s, r * thirds[n], min(ends[n], (r + 1) * thirds[n]))) for n, s in SHAPES.items()}
            for r in range(3)
        }
    assert name == "tp 2, twice"  # the norm on all four, columns of a matrix, rows of the other
    return {
        rank: {
            "embed": [((5 * (rank % 2), 5 * (rank % 2) + 5), (0, 6))],
            "norm": [whole((7,))],
            "proj": [((0, 6), (4 * (rank % 2), 4 * (rank % 2) + 4))],
        }
        for rank in range(4)
    }


def held(boxes: dict[str, list[Box]], values: dict[str, Tensor]) -> Values:
    return {n: [(box, values[n][tuple(slice(*i) for i in box)].clone()) for box in of] for n, of in boxes.items()}


def difference(source: str, target: str, spoil: Callable[[int, Values], None]) -> str | None:
    """What all ranks together say of copies that are filled rightly and then spoiled."""
    draw = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    boxes = layout(source), layout(target)
    layouts = [Layout.of_parts(SPEC, side) for side in boxes]
    dtypes = dict.fromkeys(SHAPES, torch.float32)
    sums, proofs = DigestSums(), {rank: CopyDigests(*layouts, rank, dtypes) for rank in range(4)}
    for rank, proof in proofs.items():
        sums = sums.plus(proof.of_source(held(boxes[0].get(rank, {}), values)))
        copies = held(boxes[1].get(rank, {}), values)
        spoil(rank, copies)
        for name, parts in copies.items():  # bucket by bucket
            proof.add_target({name: parts})
        sums = sums.plus(proof.of_target())
    said = {proof.difference(sums) for proof in proofs.values()}
    assert len(said) == 1
    return said.pop()


LAYOUTS = ["whole on 0", "whole on 1, 2", "flat in 3", "tp 2, twice"]


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_copies_that_are_equal_have_the_sources_digests_in_every_layout(source: str, target: str) -> None:
    assert difference(source, target, lambda rank, copies: None) is None


@pytest.mark.parametrize("source", LAYOUTS)
def test_a_copy_that_differs_is_named_with_its_rank(source: str) -> None:
    def one_bit(rank: int, copies: Values) -> None:
        if rank == 3:
            copies["norm"][0][1].view(torch.int32)[0] ^= 1 << 31

    def other_shard(rank: int, copies: Values) -> None:
        if rank == 0:
            copies["proj"][0][1].copy_(copies["proj"][0][1].roll(1, 1))

    def lost(rank: int, copies: Values) -> None:
        if rank == 2:
            del copies["embed"]

    said = [difference(source, "tp 2, twice", spoil) for spoil in (one_bit, other_shard, lost)]
    assert [(text or "").split(" as it")[0] for text in said] == [
        "norm does not lie on rank 3",
        "proj does not lie on rank 0, 1",
        "embed does not lie on rank 2, 3",
    ]
