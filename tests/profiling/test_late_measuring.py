"""When a run that began unmeasured measures its machine: once it can pay, and never for longer than it has trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trl_realloc.plan.cluster import Cluster
from trl_realloc.planner.search.learning import MIN_UPDATES, WARM_UP
from trl_realloc.profiling import late_measuring
from trl_realloc.profiling.late_measuring import GAIN, LateMeasuring
from trl_realloc.trainer.run.plan_change import PlanChange


COST_S, UPDATE_S, START_S = 50.0, 2.0, 1.0


def measuring(
    monkeypatch: pytest.MonkeyPatch,
    rank: int = 0,
    cost_s: float = COST_S,
    refused: Any = None,
    devices: int = 2,
    **profile: Any,
) -> LateMeasuring:
    known = SimpleNamespace(**{"observations": (), "complete": True, **profile})
    job = SimpleNamespace(rank=rank, cluster=Cluster(1, devices), options=SimpleNamespace(collective_timeout_s=1.0))
    observer = SimpleNamespace(job_plan=SimpleNamespace(profile=known, refused=refused))
    monkeypatch.setattr(LateMeasuring, "cost", lambda *_: cost_s)
    monkeypatch.setattr(late_measuring, "from_first_rank", lambda value, timeout_s: value)
    return LateMeasuring(job, observer)  # type: ignore[arg-type]


def budgets(made: LateMeasuring, updates: int) -> list[float | None]:
    """What it may take after each update, until it is over."""
    found: list[float | None] = []
    for done in range(1, updates + 1):
        if not made.is_over:
            made.note(UPDATE_S)
            found.append(made.budget(updates - done, start_s=START_S))
    return found


@pytest.mark.parametrize("updates", [2, 10, 100, 1000, 10_000])
def test_no_run_measures_for_longer_than_it_has_trained_or_than_a_better_plan_could_save(
    updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = budgets(measuring(monkeypatch), updates)
    for done, budget_s in enumerate(found, start=1):
        if budget_s is not None:
            assert budget_s + START_S <= done * UPDATE_S, "the engines are started again after it"
            assert budget_s + START_S <= GAIN * (updates - done) * UPDATE_S
    assert (found[-1] is not None) == (GAIN * (updates - COST_S / UPDATE_S) * UPDATE_S >= COST_S)


def test_a_long_run_measures_when_it_has_trained_as_long_as_measuring_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = measuring(monkeypatch)
    assert budgets(made, 10_000) == [None] * 24 + [COST_S - START_S]
    assert made.is_over


def test_a_short_run_is_told_once_that_measuring_cannot_pay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = measuring(monkeypatch)
    assert budgets(made, 20) == [None] * (WARM_UP + MIN_UPDATES + 1)
    assert made.is_over
    (line,) = capsys.readouterr().err.splitlines()
    assert "measuring takes about 50 s, and in the 15 updates left a better plan might save 3 s" in line


def test_a_run_of_one_device_does_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measuring(monkeypatch, devices=1).is_over


def test_too_large_models_are_not_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = measuring(monkeypatch, cost_s=float("inf"))
    assert set(budgets(made, 10_000)) == {None}
    assert made.is_over
    assert capsys.readouterr().err == ""


def test_a_measured_machine_is_not_measured_again_unless_that_was_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measuring(monkeypatch, observations=(1,)).is_over
    assert not measuring(monkeypatch, observations=(1,), complete=False).is_over


def test_a_run_by_specification_does_not_measure_again_what_refused_all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    for complete in (True, False):
        refused = SimpleNamespace(observations=(1,), complete=complete)
        assert measuring(monkeypatch, refused=refused).is_over is complete


def test_the_other_ranks_do_what_rank_0_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    made = measuring(monkeypatch, rank=1)
    monkeypatch.setattr(
        late_measuring, "from_first_rank", lambda value, timeout_s: late_measuring.MeasuringDecision(7.0, True)
    )
    for _ in range(WARM_UP + MIN_UPDATES + 1):
        made.note(1e-3)
    assert made.budget(1, 1.0) == 7.0
    assert made.is_over


@pytest.mark.parametrize(("can_rebuild", "expected"), [(True, ["saved", "measured"]), (False, [])])
def test_a_run_has_saved_its_state_before_it_measures(can_rebuild: bool, expected: list[str]) -> None:
    done: list[str] = []

    class Change(PlanChange):
        def __init__(self) -> None:
            self.placed: Any = SimpleNamespace(
                setup=SimpleNamespace(job=None), placement=SimpleNamespace(generators={})
            )
            self.checkpoints: Any = SimpleNamespace(save_unsaved=lambda: done.append("saved"))
            self.observer: Any = SimpleNamespace(note=lambda *_: None, note_decoding=lambda _: None, job_plan=None)
            self.replanner: Any = SimpleNamespace(note=lambda lengths: None)
            self.measuring: Any = SimpleNamespace(is_over=False, note=lambda seconds: None, budget=lambda *_: 1.0)
            self.start_seconds = 0.0

        def _can_rebuild(self) -> bool:
            return can_rebuild

        def rebuild(self, next_plan: object) -> None:
            done.append("measured")

    Change().note([], [], 1.0, 5)
    assert done == expected
