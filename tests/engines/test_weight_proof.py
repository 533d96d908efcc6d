"""The comparison of digests of what was sent with those of what lies in an engine's workers."""

from __future__ import annotations

import pytest
import torch

from trl_realloc.engines.generation.weight_proof import difference
from trl_realloc.engines.weight_digest import digest, part_digest


TENSOR = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
SENT = {"a": int(digest(TENSOR)), "b": 5}


class Answer:
    """Of a worker that holds some rows of `a`, and all of `b`."""

    problem = None

    def __init__(self, *rows: tuple[int, int], of: torch.Tensor = TENSOR, b: int = 5, arrived: bool = False) -> None:
        boxes = [(rows_, (0, 6)) for rows_ in rows]
        parts = [(box, int(part_digest(of[slice(*box[0])], box, (8, 6)))) for box in boxes]
        self.digests = {"a": [*parts, ((), SENT["a"])] if arrived else parts, "b": [((0,), b)]}


@pytest.mark.parametrize(
    "answers",
    [
        [Answer((0, 8))],
        [Answer((0, 4)), Answer((4, 8))],
        [Answer((0, 4)), Answer((4, 8)), Answer((0, 4)), Answer((4, 8))],  # each part in two workers
        [Answer((0, 3), (3, 8))],
        [Answer((0, 8)), Answer(arrived=True)],  # this worker has no part of it
        [Answer(arrived=True), Answer(arrived=True)],  # the model computes something else from it
    ],
)
def test_parts_in_several_workers_are_one_tensor(answers: list[Answer]) -> None:
    assert difference(SENT, answers) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answers", "names"),
    [
        ([Answer((0, 4)), Answer((0, 4))], "a"),  # the wrong shard
        ([Answer((0, 4))], "a"),
        ([Answer((0, 8), of=TENSOR.roll(1, 0))], "a"),
        ([Answer((0, 8)), Answer((0, 8), of=TENSOR + 1)], "a"),
        ([Answer((0, 8)), Answer((0, 8), b=6)], "b"),
        ([Answer()], "a"),
    ],
)
def test_a_part_that_lacks_or_has_other_bits_or_another_place_is_named(answers: list[Answer], names: str) -> None:
    assert (difference(SENT, answers) or "").startswith(f"{names} does not lie in the engine as it was sent")  # type: ignore[arg-type]
