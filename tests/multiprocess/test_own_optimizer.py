"""An optimizer of the user's keeps no whole parameters of which each rank has a part. What it keeps in its groups is
in a checkpoint of any layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from own_optimizer import counting
from test_plans import CALLS, plan, split

from trl_realloc.plan.dataflow import Role


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


def test_the_parameters_in_an_optimizer_of_the_users_are_freed_when_the_engines_have_split_them(
    run: Callable[..., Path],
) -> None:
    options = {"plan": plan(2, changed={name: split("0-1", tp=2) for name in CALLS}), "learning_rate": 1e-2}
    folders = [run("own_optimizer.py", 2, {**options, "own": own}, f"own {own}") for own in (False, True)]
    for rank in (0, 1):
        without, own = (json.loads((folder / f"{rank}.json").read_text()) for folder in folders)
        assert own["whole"] == 28 and without["alive"] == own["alive"] == []


def test_what_an_optimizer_keeps_in_its_groups_is_saved_though_a_rank_has_nothing_of_a_group(
    run: Callable[..., Path], tmp_path: Path
) -> None:
    stages = plan(2, changed={name: split("0-1", pp=2) for name in CALLS})
    saving = {"save_strategy": "steps", "save_steps": 2, "num_mini_batches": 2}
    folder = run("own_optimizer.py", 2, {"plan": stages, "own": "counting", **saving}, "stages")
    policy, value = tiny.policy(), tiny.classifier()
    given = {"model": policy, "value_model": value, "optimizers": (counting(policy, value), None)}
    made = tiny.resumed(
        folder / "checkpoint-2", tmp_path / "alone", given=given, per_device_train_batch_size=16, num_mini_batches=2
    )
    for role in (Role.ACTOR, Role.CRITIC):
        engine: Any = made.placement.trained(role)
        assert [group["step"] for group in engine.optimizer.param_groups] == [8, 8]
    made.close()
