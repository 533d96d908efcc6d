"""Training by the token gradients of a loss, without the samples that have none, on two ranks of every engine.

The parameters and gradient norms are those of one process that trains by the loss itself on all samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


pytestmark = [pytest.mark.multiprocess, pytest.mark.deepspeed, pytest.mark.timeout(500)]

CASES: dict[str, dict[str, Any]] = {
    "zero 2, clipped": {"zero": 2, "loss": "clipped"},
    "zero 2, entropy bonus in slices": {"zero": 2, "loss": "bonus", "slices": True},
    "zero 3, sequence in slices": {"zero": 3, "loss": "sequence", "slices": True},
    "zero 3, entropy bonus in slices": {"zero": 3, "loss": "bonus", "slices": True},
    "tp 2, entropy bonus": {"tp": 2, "loss": "bonus"},
    "tp 2, entropy bonus in slices": {"tp": 2, "loss": "bonus", "slices": True},
    "tp 2, sequence": {"tp": 2, "loss": "sequence"},
    "pp 2, entropy bonus": {"pp": 2, "loss": "bonus"},
    "pp 2, sequence in slices": {"pp": 2, "loss": "sequence", "slices": True},
    "dp 2, clipped": {"loss": "clipped"},
}


def test_every_engine_steps_by_slopes_as_one_process_does_by_the_loss(run: Callable[..., Path]) -> None:
    folder = run("token_grads_rank.py", 2, {"cases": CASES}, "ranks", limit_s=300)
    for name, case in CASES.items():
        found = json.loads((folder / f"{name}.json").read_text())
        assert found["parameters"] < 1e-9 and found["norms"] < 1e-9, (name, found)
        # a sample without an advantage still has token gradients of its entropies; a clipped one has no token gradient
        # either
        counts, is_bonus = found["counts"], case["loss"] == "bonus"
        assert counts == [11] * 4 if is_bonus else (counts[0] > 4 and counts[3] == 1), (name, found)
