"""Calls for the loop of another trainer on two processes, whose ranks have different numbers of samples and turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_driven import GRAPH, PROMPTS, drive, start

from trl_realloc import Cluster
from trl_realloc.plan.presets import flatten


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

CASES: dict[str, tuple[str, bool, int, int]] = {  # plan, streams, samples of rank 0, rank with a second turn
    "uneven": ("flatten", False, 3, 0),
    "none, on the rank that generates": ("separate", False, 5, 0),
    "none, on the rank that trains": ("separate", False, 0, 1),
    "none, where both do everything": ("flatten", False, 5, 0),
    "streamed": ("flatten", True, 3, 0),
    "streamed to another rank": ("separate", True, 4, 1),
}


def test_each_rank_gets_the_outputs_of_its_own_samples_as_if_one_process_had_all(run: Callable[..., Path]) -> None:
    """A second turn is one rank's, and its tokens are those that one process would draw."""
    folder = run("host_calls_rank.py", 2, CASES, "two", limit_s=60)
    alone = flatten(Cluster(1, 1), generation_engine="transformers", graph=GRAPH)
    expected = drive(start(alone, 0), slice(None), second_turn=True)
    for name, (_, _, first, turns) in CASES.items():
        ranks: list[Any] = [torch.load(folder / f"{name} {rank}", weights_only=False) for rank in (0, 1)]
        assert [len(rank.responses) for rank in ranks] == [first, len(PROMPTS) - first], name
        assert ranks[0].responses + ranks[1].responses == expected.responses, name
        assert ranks[turns].again == expected.again and ranks[1 - turns].again == [], name
        for column in ("logprobs", "reference"):
            rows = [*getattr(ranks[0], column), *getattr(ranks[1], column)]
            for row, other in zip(rows, getattr(expected, column), strict=True):
                assert row == pytest.approx(other, abs=1e-5), (name, column)
        weights = ranks[0].weights
        for parameter, tensor in expected.weights.items():
            assert torch.allclose(weights[parameter], tensor, atol=1e-6), (name, parameter)
