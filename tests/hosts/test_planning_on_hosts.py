"""`plan: auto` over two hosts: the network between them is seen as it is at each start."""

from __future__ import annotations

import pytest
from two_starts import SLOW, TwoStarts


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]


def test_measurements_made_over_one_network_are_not_used_on_another(two_starts: TwoStarts) -> None:
    before, after = two_starts.first[0]["planned"], two_starts.second[0]["planned"]
    assert (before["measurements"], after["measurements"]) == (1, 0), "models are measured once"
    assert 0.4 * SLOW < after["bandwidth"] < 1.5 * SLOW
    assert before["bandwidth"] > 2 * after["bandwidth"]
    assert after["network"] == "alpha at 10.77.0.1, beta at 10.77.0.2"
