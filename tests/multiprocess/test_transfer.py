"""Parameters over real wires: every layout into every other, and what those see that wait for a lost process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limits import patience
from ranks import RankServers


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("processes", "cluster"),
    [
        (2, {"nodes": 1, "devices_per_node": 2}),
        (4, {"nodes": 2, "devices_per_node": 2}),
        (8, {"nodes": 2, "devices_per_node": 4}),
    ],
)
def test_every_receiver_ends_with_the_very_bits_and_no_byte_is_sent_twice(
    processes: int, cluster: dict[str, int], run: Callable[..., Path]
) -> None:
    folder = run("transfer.py", processes, {"cluster": cluster, "pairs": 40}, "pairs")
    rows: list[dict[str, Any]] = json.loads((folder / "pairs.json").read_text())
    assert len(rows) >= 30
    assert all(row["right"] for row in rows), [row["pair"] for row in rows if not row["right"]]
    for row in rows:
        assert row["sent"] == row["scheduled"], row


@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_a_receiver_that_is_lost_is_named_by_those_that_wait_for_it_within_the_time_limit(
    how: str, start: Callable[..., Any], servers: RankServers
) -> None:
    options = {"cluster": {"nodes": 1, "devices_per_node": 2}, "timeout_s": 5.0, how: 1}
    # of the two, the one that is lost by its death ends first
    grace_s = 60.0 if how == "dies" else 0.0
    options["only"] = ["zero3 0-1", "replicated 0-1"]
    job = start("transfer.py", 2, options, servers=servers, grace_s=grace_s)
    assert job.wait(120) != 0
    seconds, message = json.loads((job.folder / "error-0.json").read_text())
    assert seconds < patience(20)
    assert "->" in message and "rank 0" in message and "rank 1" in message


def test_an_update_that_an_engine_refuses_or_gets_otherwise_is_used_by_nobody_and_the_next_one_is_whole(
    run: Callable[..., Path],
) -> None:
    """Also where the engine has most parameters in 16 bits: they are cast before they are sent."""
    folder = run("refresh.py", 2, {}, "refresh")
    sizes = []
    for dtype in ("float32", "bfloat16"):
        giver, taker = (json.loads((folder / f"{dtype}-{rank}.json").read_text()) for rank in (0, 1))
        whole = giver["bytes"]
        sizes.append(whole)
        for rank in (giver, taker):
            first, again, refused, other, third = rank["told"]
            assert (first, again, third) == (whole, None, whole), "moved once for each version"
            assert "rank 1: model.layers.1" in refused and "the update to version 1 was rejected" in refused
            assert "model.norm.weight does not lie on rank 1 as it was sent: its digest is" in other
            assert all("could be used" not in told or rank is giver for told in (refused, other))
        assert "rank 1 holds version -1" in taker["told"][2]
        assert taker["right"]
    assert sizes[1] < 0.51 * sizes[0]
