"""When a run looks for another plan: rank 0 decides, and all ranks meet in the same broadcast."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from trl_realloc import Cluster
from trl_realloc.common.errors import PlanError
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import PRESETS
from trl_realloc.plan.staleness import Staleness
from trl_realloc.plan.streams import Migration, Streams
from trl_realloc.planner.cost.estimate_factors import CalibrationFactors
from trl_realloc.profiling import replanning
from trl_realloc.profiling.auto_plan import JobPlan
from trl_realloc.profiling.replanning import Replanner, suits


@pytest.mark.parametrize("estimate", [1.0, 5.0])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_takes_part_in_the_decision(rank: int, estimate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs of two ranks may differ, and with them their estimates: a rank that decided by its own would leave the
    others waiting."""
    broadcasts: list[Any] = []

    def from_first_rank(value: Any, timeout_s: float) -> Any:
        broadcasts.append(value)
        return 5.0, None

    better = SimpleNamespace(best=SimpleNamespace(seconds=4.7))  # by less than estimates are good for
    monkeypatch.setattr(replanning, "from_first_rank", from_first_rank)
    monkeypatch.setattr(replanning, "estimate_at_lengths", lambda *_: SimpleNamespace(seconds=estimate))
    monkeypatch.setattr(replanning, "rates_of", lambda profile: SimpleNamespace(error=0.08))
    workload = SimpleNamespace(of_lengths=lambda lengths: None)
    models = SimpleNamespace(specs={})
    options = SimpleNamespace(collective_timeout_s=1.0)
    job = SimpleNamespace(
        rank=rank, engine="vllm", models=models, workload=workload, options=options, choose=lambda *_, **__: better
    )
    planned = SimpleNamespace(plan=object(), priced=SimpleNamespace(seconds=1.0), profile=object(), decision=object())
    observer = SimpleNamespace(job_plan=planned)
    watcher = Replanner(job, observer, threshold=0.1)  # type: ignore[arg-type]
    watcher.note([3, 4])
    assert watcher.better(updates_left=10, move_seconds=0.0) is None
    assert len(broadcasts) == 1
    assert observer.job_plan is planned


def planned(name: str, seconds: float) -> Any:
    return SimpleNamespace(name=name, seconds=seconds, plan=PRESETS[name](Cluster(1, 2), generation_engine="vllm"))


def watching(monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...]) -> Replanner:
    """The run's plan takes 10 s, `flatten` 7 s and `interleave` 5 s."""

    def check(plan: ExecutionPlan) -> None:
        if any(name in plan.name for name in refused):
            raise PlanError(f"{plan.name} does not suit the optimizer.")

    other = SimpleNamespace(plan=planned("flatten", 7.0))
    decision = SimpleNamespace(best=planned("interleave", 5.0), alternatives=(other,))
    monkeypatch.setattr(replanning, "estimate_at_lengths", lambda *_: SimpleNamespace(seconds=10.0))
    monkeypatch.setattr(replanning, "rates_of", lambda profile: SimpleNamespace(error=0.08))
    workload = SimpleNamespace(of_lengths=lambda lengths: None, episodes=16)
    options = SimpleNamespace(collective_timeout_s=1.0)
    job: Any = SimpleNamespace(
        rank=0, workload=workload, options=options, check=check, choose=lambda *_, **__: decision
    )
    running = PRESETS["separate"](Cluster(1, 2), generation_engine="vllm")
    current: Any = SimpleNamespace(
        priced=SimpleNamespace(seconds=1.0), profile="measured", decision=decision, plan=running
    )
    made = Replanner(job, SimpleNamespace(job_plan=current), threshold=0.1)  # type: ignore[arg-type]
    made.note([3, 4])
    return made


def test_a_run_never_moves_to_a_plan_that_was_refused_for_it_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for refused, name in (((), "auto (interleave)"), (("interleave",), "auto (flatten)")):
        found = watching(monkeypatch, refused).better(updates_left=10, move_seconds=1.0)
        assert found is not None and found.plan.name == name
        assert found.profile == "measured"
    assert watching(monkeypatch, ("interleave", "flatten")).better(updates_left=10, move_seconds=1.0) is None
    slow = watching(monkeypatch, ("interleave",))
    assert slow.better(updates_left=10, move_seconds=31.0) is None  # 50 s would be saved, and 30 s are


def test_a_run_keeps_a_plan_that_has_no_estimate_at_its_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimate(*_: Any) -> Any:
        raise PlanError("no room for a sample of this length.")

    made = watching(monkeypatch, ())
    monkeypatch.setattr(replanning, "estimate_at_lengths", estimate)
    assert made.better(updates_left=10, move_seconds=1.0) is None


def test_after_measuring_a_plan_is_searched_for_when_the_estimate_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = watching(monkeypatch, ())
    measured: Any = SimpleNamespace(
        priced=SimpleNamespace(seconds=10.0), profile="new", decision=object(), plan=made.observer.job_plan.plan
    )
    made.follow(measured)
    made.observer.job_plan = measured
    assert made.better(updates_left=10, move_seconds=1.0) is None
    assert isinstance(watching(monkeypatch, ()).better(updates_left=10, move_seconds=1.0), JobPlan)


@dataclass(frozen=True)
class Known:
    """Of a profile what is compared."""

    table: str
    calibration: CalibrationFactors = field(default_factory=CalibrationFactors)


def test_the_plan_is_estimated_again_only_for_other_lengths_or_another_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    made = watching(monkeypatch, ())
    current: Any = made.observer.job_plan
    estimated: list[Any] = []
    made.follow(SimpleNamespace(priced=SimpleNamespace(seconds=10.0)))  # type: ignore[arg-type]

    def estimate(*_: Any) -> Any:
        estimated.append(current.profile)
        return SimpleNamespace(seconds=10.0)

    monkeypatch.setattr(replanning, "estimate_at_lengths", estimate)
    counts = []
    for lengths, profile in (
        ([300, 400], "measured"),
        ([303, 404], "measured"),
        ([600, 800], "measured"),
        ([600, 800], "another"),
    ):
        for _ in range(replanning.LENGTHS_WINDOW):
            made.note(lengths)
        current.profile = Known(profile)
        made.better(updates_left=10, move_seconds=1.0)
        counts.append(len(estimated))
    assert counts == [1, 1, 2, 3]


def test_corrections_that_change_a_little_with_each_update_are_no_other_profile() -> None:
    plan = planned("flatten", 5.0).plan
    profile: Any = Known("measured", CalibrationFactors({"actor.train": 2.0}, dispatch=0.1))
    near: Any = Known("measured", CalibrationFactors({"actor.train": 2.01}, dispatch=0.1004))
    far: Any = Known("measured", CalibrationFactors({"actor.train": 2.1}, dispatch=0.1))
    other: Any = Known("another", near.calibration)
    assert replanning.is_near(profile, near, plan, 0.01)
    assert not replanning.is_near(profile, far, plan, 0.01)
    assert not replanning.is_near(profile, other, plan, 0.01)


def test_a_plan_that_keeps_the_engines_need_not_pay_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """`interleave` saves 50 s in ten updates, and starting the engines takes longer."""
    made = watching(monkeypatch, ("flatten",))
    assert made.better(updates_left=10, move_seconds=60.0) is None
    made = watching(monkeypatch, ("flatten",))
    made.observer.job_plan.plan = replace(planned("interleave", 5.0).plan, name="the run's", barrier=True)
    found = made.better(updates_left=10, move_seconds=60.0)
    assert found is not None and found.plan.name == "auto (interleave)"


def test_all_searches_of_a_run_together_take_a_fiftieth_of_its_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update takes 10 s, and every estimate is another one."""
    made = watching(monkeypatch, ("interleave", "flatten"))
    clock, limits, shares = [0.0], [], []

    def choose(*_: Any, time_limit_s: float) -> Any:
        limits.append(time_limit_s)
        shares.append((time_limit_s + 0.5) / (0.02 * seconds * left - clock[0]))
        clock[0] += time_limit_s + 0.5  # what a search takes beyond its limit
        return made.observer.job_plan.decision

    made.job.choose = choose  # type: ignore[method-assign]
    monkeypatch.setattr(replanning, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    seconds = 10.0
    for left in range(100, 0, -1):
        seconds = 15.0 - seconds + 10.0
        monkeypatch.setattr(replanning, "estimate_at_lengths", lambda *_, now=seconds: SimpleNamespace(seconds=now))
        for _ in range(replanning.LENGTHS_WINDOW):
            made.note([100 * (1 + left % 2)])
        made.better(updates_left=left, move_seconds=1.0)
    assert limits[0] == 5.0, "no single search takes longer"
    assert len(limits) > 3 and sum(limits) + 0.5 * len(limits) <= 0.02 * 100 * 15.0
    assert max(shares[1:]) <= 0.5 + 1e-9, "with what the search before took beyond its limit"


def test_engines_suit_a_plan_that_overlaps_otherwise_and_has_room_in_them() -> None:
    plan = PRESETS["flatten"](Cluster(1, 4), generation_engine="vllm")
    assert suits(plan, replace(plan, streams=Streams(), barrier=True), 16)
    assert suits(plan, replace(plan, streams=Streams(migration=Migration(0.2))), 16)
    assert not suits(plan, replace(plan, streams=Streams(migration=Migration(0.5))), 16), "8 samples for places of 4"
    assert not suits(plan, PRESETS["interleave"](Cluster(1, 4), generation_engine="vllm"), 16)
    ahead = replace(PRESETS["separate"](Cluster(1, 4), generation_engine="vllm"), staleness=Staleness(1))
    assert suits(ahead, ahead, 16)
