"""What is still on its way when a plan changes does not reach the next plan's readers; and a rank waits for what
another takes long to make."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


def test_a_message_that_was_not_received_is_not_received_in_the_next_group(run: Callable[..., Path]) -> None:
    """As the outputs of a batch that was generated ahead, whose iteration the old plan never runs. Small messages and
    large ones; and messages without content arrive."""
    folder = run("late_messages.py", 2, {"batches": [[4], [3 << 20, 4]]}, "job")
    assert [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)] == [["new", "new"]] * 2
    assert json.loads((folder / "exchanged 0.json").read_text()) == ["", "abc", ""]


def test_a_rank_waits_for_another_ones_call_longer_than_a_collective_may_take(run: Callable[..., Path]) -> None:
    """A generation, or a judge's rewards, on ranks of their own, while the others have nothing to do."""
    folder = run("long_call.py", 2, {}, "job")
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0].pop("samples") == "samples"
    assert ranks == [{"largest": 1, "version": 1, "rewards": [2, 0, 2, 1]}] * 2
