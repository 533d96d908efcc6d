"""An optimizer of the user's keeps no whole parameters of which each rank has a part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_plans import CALLS, plan, split


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


def test_parameters_in_a_users_optimizer_are_freed_when_the_engines_have_split_them(run: Callable[..., Path]) -> None:
    options = {"plan": plan(2, changed={name: split("0-1", tp=2) for name in CALLS}), "learning_rate": 1e-2}
    folders = [run("own_optimizer.py", 2, {**options, "own": own}, f"own {own}") for own in (False, True)]
    for rank in (0, 1):
        without, own = (json.loads((folder / f"{rank}.json").read_text()) for folder in folders)
        assert own["whole"] == 28 and without["alive"] == own["alive"] == []
