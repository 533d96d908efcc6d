"""The ranks of a reallocation learn each other's parts by messages that do not grow with their number."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from mailboxes import Mailboxes

from trl_realloc.realloc.layout import flat_boxes, whole
from trl_realloc.runtime.parameters.layout_agreement import HeldParts, agree_on_parts


SHAPES = {"embed": (96, 32), "norm": (32,), "bias": (3,), "scale": ()}
DTYPES = dict.fromkeys(SHAPES, torch.float32)


def agreed(held: list[HeldParts | None]) -> tuple[list[Any], Mailboxes]:
    """What each rank learns, and the messages."""
    boxes, ranks, results = Mailboxes(), range(len(held)), [None] * len(held)

    def run(rank: int) -> None:
        results[rank] = agree_on_parts(boxes.of(rank), list(ranks), rank, held[rank], 7)  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results, boxes


def partition(number: int, count: int) -> HeldParts:
    """A rank's parts under ZeRO-3."""
    boxes = {}
    for name, shape in SHAPES.items():
        elements = int(torch.Size(shape).numel())
        size = -(-elements // count)
        boxes[name] = list(flat_boxes(shape, min(number * size, elements), min((number + 1) * size, elements)))
    boxes = {name: parts for name, parts in boxes.items() if parts}
    return HeldParts(boxes, {name: DTYPES[name] for name in boxes}, (number, count), SHAPES)


@given(some.data())
def test_every_rank_learns_what_every_rank_holds(data: Any) -> None:
    count = data.draw(some.integers(1, 9))
    held: list[HeldParts | None] = []
    for rank in range(count):
        kind = data.draw(some.sampled_from(["nothing", "no boxes", "whole", "rows", "flat", "flat, but not"]))
        rows = {"embed": [((8 * rank, 8 * rank + 8), (0, 32))]}
        boxes = {"no boxes": {}, "whole": {n: [whole(s)] for n, s in SHAPES.items()}, "rows": rows}.get(kind, rows)
        part = HeldParts(boxes, {name: DTYPES[name] for name in boxes})
        if kind == "flat":
            part = partition(rank, count)
        elif kind == "flat, but not":
            part = HeldParts(boxes, part.dtypes, (rank, count), SHAPES)
        held.append(None if kind == "nothing" else part)
    results, _ = agreed(held)
    expected = {rank: {n: list(b) for n, b in part.boxes.items()} for rank, part in enumerate(held) if part is not None}
    for parts, dtypes in results:
        assert parts == expected
        assert dtypes == {name: DTYPES[name] for part in expected.values() for name in part}
    assert len({tuple(dtypes) for _, dtypes in results}) == 1, "all ranks have the parameters in one order"


@pytest.mark.parametrize("layout", ["ZeRO-3", "replicas of two stages"])
def test_a_rank_sends_three_messages_and_some_bytes_more_for_each_rank_more(layout: str) -> None:
    most = {}
    for count in (8, 64):
        stages = [{name: [whole(SHAPES[name])] for name in names} for names in (("embed",), ("norm", "bias", "scale"))]
        held: list[HeldParts | None] = [partition(rank, count) for rank in range(count)]
        if layout != "ZeRO-3":
            held = [HeldParts(stages[rank % 2], {n: DTYPES[n] for n in stages[rank % 2]}) for rank in range(count)]
        _, boxes = agreed(held)
        assert max(boxes.sent.values()) <= 3
        most[count] = max(boxes.bytes.values())
    assert most[64] - most[8] <= 3 * 56 * 10
