"""`plan: auto` on real processes: begun at once, measured once, chosen alike on all ranks, run, learned from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.timeline import Timeline
from trl_realloc.planner.cost.measured_rates import MeasuredRates
from trl_realloc.planner.cost.profile import Profile


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]


def test_a_machine_is_measured_once_and_its_plan_runs(
    run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRL_REALLOC_MEASURE", "first")
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


def test_a_run_begins_unmeasured_teaches_the_next_one_and_measures_between_updates_when_it_pays(
    run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three runs on one cache: under a plan by specification, under a named plan, and with measuring that costs
    nothing by estimate."""
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "cache"))
    options = {"max_steps": 8, "per_device_train_batch_size": 4, "save_strategy": "no", "learning_rate": 1e-4}
    at_once, named, measured = (
        json.loads((run("auto.py", 2, {**options, **more}, name) / "log.json").read_text())
        for name, more in (
            ("at_once", {"plan": "auto"}),
            ("named", {"plan": "separate"}),
            ("measures", {"plan": "auto", "measures": True}),
        )
    )
    assert [job["measured"] for job in (at_once, named, measured)] == [0, 0, 1]
    assert "by specification" in (tmp_path / "at_once" / "log.txt").read_text()
    taught = (tmp_path / "at_once" / "log.txt").read_text().partition("measured / estimated seconds of this run: ")[2]
    assert "actor.train x" in taught, "no specification of a CPU is within 5 % of it; generation's may be"
    expected = Timeline.load(tmp_path / "at_once" / "estimate.json").seconds_per_step
    assert expected == pytest.approx(median(at_once["took"][1:]), rel=0.25), "by its own updates"
    assert named["plan"]["name"] == "separate"
    assert "streams" not in named["plan"], "one engine generates"
    assert named["estimate"] > 0, "by the specification, and what the run before has taught"
    text = _text(tmp_path / "measures")
    assert "and corrected by the times of earlier runs" in text
    assert "measuring this machine for a better plan" in text
    assert "the plan is now auto" in text or "the run goes on under auto" in text
    (kept,) = (tmp_path / "cache").glob("profile-*.json")
    profile = Profile.load(kept)
    assert not profile.complete, "it might take no longer than the run had trained"
    assert {(row.tp, row.pp) for row in profile.observations} == {(1, 1)}
    for job in (named, measured):
        for one, other in zip(job["updates"], at_once["updates"], strict=True):
            learned = {key: value for key, value in one.items() if not key.startswith("realloc/")}
            assert learned == pytest.approx({key: other[key] for key in learned}, rel=1e-4, abs=1e-4)


def _text(folder: Path) -> str:
    """What a job has printed, without the line ends of tables."""
    return " ".join((folder / "log.txt").read_text(errors="replace").split())


def test_a_short_run_that_fails_between_updates_ends_the_measuring_and_not_the_run(
    run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "cache"))
    options = {"plan": "auto", "max_steps": 8, "per_device_train_batch_size": 4, "save_strategy": "no"}
    failed = json.loads(
        (run("auto.py", 2, {**options, "measures": True, "fails": True}, "fails") / "log.json").read_text()
    )
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "other"))
    plain = json.loads((run("auto.py", 2, options, "plain") / "log.json").read_text())
    text = _text(tmp_path / "fails")
    assert "A short run under flatten failed, so the measuring ends" in text
    assert "the engine of the short run has failed" in text
    assert (failed["measured"], plain["measured"]) == (1, 0)
    assert failed["plan"] == plain["plan"]
    assert len(failed["updates"]) == len(plain["updates"]) == 8
    for mine, other in zip(failed["updates"], plain["updates"], strict=True):
        assert mine["objective/kl"] == pytest.approx(other["objective/kl"], abs=1e-4)
    assert not any(Profile.load(kept).observations for kept in (tmp_path / "cache").glob("profile-*.json"))
