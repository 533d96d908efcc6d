"""`plan: auto` on real processes: measured once, chosen alike on all ranks, run, and compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.timeline import Timeline
from trl_realloc.planner.measured_rates import MeasuredRates
from trl_realloc.planner.profile import Profile


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]


def test_a_machine_is_measured_once_and_its_plan_runs(
    run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "cache"))
    options = {"plan": "auto", "max_steps": 3, "per_device_train_batch_size": 4, "save_strategy": "no"}
    folders = [run("auto.py", 2, options, name) for name in ("first", "second")]
    first, second = (json.loads((folder / "log.json").read_text()) for folder in folders)
    assert (first["measured"], second["measured"]) == (1, 0), "the second run reads what the first has measured"
    assert first["estimate"] > 0
    plan = ExecutionPlan.from_dict(first["plan"])
    assert plan.cluster.size == 2
    (kept,) = (tmp_path / "cache").glob("profile-*.json")
    profile = Profile.load(kept)
    assert {"forward", "train", "generate", "send", "all_reduce", "iteration"} <= {o.work for o in profile.observations}
    assert {(o.tp, o.pp) for o in profile.observations} >= {(1, 1), (2, 1), (1, 2)}
    rates = MeasuredRates(profile)
    assert 1e7 < rates.inside.bandwidth < 1e12
    assert set(Timeline.load(folders[0] / "estimate.json").calls) >= set(plan.order)
    assert [row["objective/kl"] for row in first["updates"]] == pytest.approx(
        [row["objective/kl"] for row in second["updates"]], abs=1e-4
    )


def test_a_plan_that_the_user_named_is_estimated_where_the_machine_is_known(
    run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "cache"))
    options = {"max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no"}
    run("auto.py", 2, {**options, "plan": "auto"}, "auto")
    named = json.loads((run("auto.py", 2, {**options, "plan": "separate"}, "named") / "log.json").read_text())
    assert named["plan"]["name"] == "separate"
    assert named["measured"] == 0
    assert named["estimate"] > 0
