"""The parts of a message as few ranges of buffers and tensors."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.engines.training_state import flat_cells
from trl_realloc.realloc.flat_runs import copy_all, flat_range, runs_of, views_of
from trl_realloc.realloc.layout import Box, volume
from trl_realloc.realloc.schedule import ParameterBox


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = draw(SHAPES)
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    return shape, tuple(box)


@given(boxes(), st.integers(0, 5))
def test_a_box_is_one_range_where_its_elements_follow_each_other(drawn: tuple[tuple[int, ...], Box], low: int) -> None:
    shape, box = drawn
    outer = tuple((low, low + size) for size in shape)
    moved = tuple((start + low, stop + low) for start, stop in box)
    numbers = torch.arange(prod(shape)).view(shape)[tuple(slice(*of) for of in box)].reshape(-1)
    is_range = bool((numbers.diff() == 1).all())
    expected = (int(numbers[0]), len(numbers)) if is_range else None
    assert flat_range(outer, moved) == expected


def placed_of(pieces: list[ParameterBox], itemsize: int) -> list[tuple[ParameterBox, int, int]]:
    placed, at = [], 0
    for piece in pieces:
        placed.append((piece, at, at + volume(piece.box) * itemsize))
        at = placed[-1][2]
    return placed


@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_a_zero_3_rank_sends_a_run_a_parameter(shapes: list[tuple[int, ...]], ranks: int, data: st.DataObject) -> None:
    """Into full parameters, as an engine gets them: whatever the boxes, the same bytes arrive."""
    rank = data.draw(st.integers(0, ranks - 1))
    pieces, expected = [], {f"{at}": torch.zeros(shape) for at, shape in enumerate(shapes)}
    held = {name: [(tuple((0, size) for size in tensor.shape), tensor.clone())] for name, tensor in expected.items()}
    counted = 0
    for at, shape in enumerate(shapes):
        part = -(-prod(shape) // ranks)
        length = max(0, min(part, prod(shape) - rank * part))
        counted += bool(length)
        for box, _ in flat_cells(shape, rank * part, torch.zeros(length)):
            pieces.append(ParameterBox(f"{at}", box))
    placed = placed_of(pieces, 4)
    buffer = torch.rand(max((end for *_, end in placed), default=0) // 4).view(torch.uint8)
    dtypes = dict.fromkeys(held, torch.float32)
    runs = runs_of(placed, held, dict.fromkeys(held, 4))
    assert runs is not None and len(runs) == counted
    views = views_of(runs, buffer, held, dtypes)
    assert views is not None
    if counted:
        copy_all(views[1], views[0])
    for piece, start, end in placed:
        target = expected[piece.parameter][tuple(slice(*of) for of in piece.box)]
        target.copy_(buffer[start:end].view(torch.float32).view(target.shape))
    assert all(torch.equal(held[name][0][1], tensor) for name, tensor in expected.items())


def test_parts_of_several_tensors_or_of_columns_or_of_other_tensors_than_before_are_no_runs() -> None:
    columns = ParameterBox("w", ((0, 4), (1, 3)))
    whole = {"w": [(((0, 4), (0, 6)), torch.zeros(4, 6))]}
    assert runs_of(placed_of([columns], 4), whole, {"w": 4}) is None
    rows = placed_of([ParameterBox("w", ((0, 2), (0, 6))), ParameterBox("w", ((2, 3), (0, 6)))], 4)
    halves = {"w": [(((0, 2), (0, 6)), torch.zeros(2, 6)), (((2, 4), (0, 6)), torch.zeros(2, 6))]}
    assert runs_of(rows, halves, {"w": 4}) is None
    assert runs_of(rows, {"w": [(((0, 4), (0, 6)), torch.zeros(6, 4).t())]}, {"w": 4}) is None
    other = {"w": [(((2, 4), (0, 6)), torch.zeros(2, 6))]}
    assert runs_of(rows, other, {"w": 4}) is None, "it holds another part, and sends on what it has received"
    runs = runs_of(rows, whole, {"w": 4})
    assert runs is not None and [(run.first, run.count, run.start) for run in runs] == [(0, 18, 0)]
    buffer, dtypes = torch.zeros(18 * 4, dtype=torch.uint8), {"w": torch.float32}
    assert views_of(runs, buffer, whole, dtypes) is not None
    assert views_of(runs, buffer, halves, dtypes) is None
