"""What real processes measure of their machine, of the wires between them, and of a model's layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


pytestmark = [pytest.mark.multiprocess, pytest.mark.deepspeed, pytest.mark.timeout(400)]

ASKED = [(1, 1, False), (2, 1, False), (1, 2, False), (1, 1, True), (2, 1, True)]


def test_links_processors_layers_stages_and_activations_are_measured_each_by_itself(run: Callable[..., Path]) -> None:
    told = json.loads((run("machine.py", 4, {"asked": ASKED}, "four") / "told-0.json").read_text())

    near, far = ([row for row in told["links"] if row[2] == apart] for apart in (False, True))
    assert {row[0] for row in near} == {row[0] for row in far} == {"all_reduce", "send"}
    assert {row[1] for row in near} == {2}, "inside a node of two"
    assert {row[1] for row in far} == {4}, "between the nodes"
    assert all(row[3] > 0 for row in told["links"])

    assert [count for count, _ in told["slower"]] == [2], "how the two of a node slow each other down"
    assert all(slower >= 1 for _, slower in told["slower"])

    assert told["depths"] == [3], "half of a large model's layers stand for all"
    knows = dict(zip(ASKED, told["knows"], strict=True))
    assert knows[1, 1, False] and knows[2, 1, False] and knows[1, 2, False] and knows[1, 1, True]
    assert not knows[2, 1, True], "generation under a tensor degree is for the thorough"
    assert told["layer"] > 0

    assert told["stages"] == [["forward", 3], ["train", 1], ["train", 2], ["train", 3]]
    assert all(0.1 <= factor < 1e6 and factor != 1 for factor in told["zero"]), "of the formulas"

    ten, twenty = told["kept"]
    assert ten is not None and 1.5 * ten < twenty < 2.5 * ten
