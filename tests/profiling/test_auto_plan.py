"""The plan that the planner proposes is one that the run can have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_run_observer
import tiny

from trl_realloc import Cluster, PPOConfig, ReallocationPlugin
from trl_realloc.common.errors import PlanError
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import PRESETS
from trl_realloc.planner.cost.profile import Profile
from trl_realloc.profiling import auto_plan
from trl_realloc.profiling.auto_plan import JobPlan, measured_plan, plan_job
from trl_realloc.profiling.job import Job
from trl_realloc.profiling.job_models import JobModels
from trl_realloc.profiling.late_measuring import LateMeasuring
from trl_realloc.profiling.profile_cache import cache_path
from trl_realloc.profiling.run_observer import RunObserver
from trl_realloc.runtime.launch.hosts import Process
from trl_realloc.trainer import ppo_trainer
from trl_realloc.trainer.run import run_setup as setup
from trl_realloc.trainer.run.job_builder import ppo_job
from trl_realloc.trainer.run.plan_request import PlanRequest


def priced(name: str, seconds: float) -> Any:
    return SimpleNamespace(name=name, seconds=seconds, plan=PRESETS[name](Cluster(1, 2), generation_engine="vllm"))


def decided() -> JobPlan:
    others = [
        SimpleNamespace(plan=None),
        *(SimpleNamespace(plan=priced(name, s)) for name, s in (("separate", 3.0), ("flatten", 2.0))),
    ]
    decision: Any = SimpleNamespace(best=priced("interleave", 1.0), alternatives=others)
    return JobPlan.of(decision, None)  # type: ignore[arg-type]


def refusing(*names: str) -> Any:
    def check(plan: ExecutionPlan) -> None:
        if any(name in plan.name for name in names):
            raise PlanError(f"{plan.name} does not suit the optimizer.")

    return check


def test_where_the_run_cannot_have_the_fastest_plan_it_gets_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert decided().allowed(refusing()).plan.name == "auto (interleave)"
    found = decided().allowed(refusing("interleave"))
    assert (found.plan.name, found.priced.seconds) == ("auto (flatten)", 2.0)  # type: ignore[union-attr]
    assert "auto (interleave) does not suit the optimizer" in capsys.readouterr().err
    with pytest.raises(PlanError, match="interleave"):
        decided().allowed(refusing("interleave", "flatten", "separate"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("refused", ["by memory", "by the run", "unmeasured"])
def test_a_run_that_was_measured_continues_under_its_plan_where_it_can_have_no_other(
    refused: str, rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measuring begins after the engines of the run are closed: an error would end a run that trained well."""

    def choose(*_: Any, **__: Any) -> Any:
        raise PlanError("no plan fits.")

    def from_first_rank(value: Any, timeout_s: float) -> Any:
        if refused == "by memory":
            return PlanError("no plan fits.")
        return decided().decision

    profile = SimpleNamespace(observations=() if refused == "unmeasured" else (1,))
    monkeypatch.setattr(auto_plan, "measure_between_updates", lambda *_: profile)
    monkeypatch.setattr(auto_plan, "print_decision", lambda *_, **__: None)
    monkeypatch.setattr(auto_plan, "from_first_rank", from_first_rank)
    check = refusing("interleave", "flatten", "separate")
    options = SimpleNamespace(collective_timeout_s=1.0)
    job: Any = SimpleNamespace(rank=rank, options=options, choose=choose, check=check)
    current = decided()
    assert measured_plan(job, 1.0, current) is current
    assert ("continues under auto (interleave)" in capsys.readouterr().err) == (refused != "unmeasured")
    job.check = refusing("interleave")
    if refused == "by the run":
        assert measured_plan(job, 1.0, current).plan.name == "auto (flatten)"


@pytest.mark.parametrize("reason", ["memory", "check"])
def test_a_profile_that_refuses_every_plan_does_not_refuse_the_next_start(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "cache"))
    job = test_run_observer.make(tmp_path, Cluster(1, 2, 8.0))
    measured = test_run_observer.measured(job)
    measured.save(cache_path(job))
    choose_by_formula = Job.choose

    def choose(self: Job, profile: Profile, *args: Any, **options: Any) -> Any:
        if profile.observations and reason == "memory":
            raise PlanError("the models fit on no plan.")
        return choose_by_formula(self, replace(profile, observations=()), *args, **options)

    checked: list[str] = []

    def check(plan: ExecutionPlan) -> None:
        checked.append(plan.name)
        if reason == "check" and len(checked) == 1:
            raise ValueError("the models fit on no plan.")

    monkeypatch.setattr(Job, "choose", choose)
    monkeypatch.setattr(auto_plan, "print_decision", lambda *_, **__: None)
    monkeypatch.setattr(JobPlan, "allowed", lambda self, check: check(self.plan) or self)
    found = plan_job(replace(job, check=check), time_limit_s=0.1)
    assert found.refused == measured and found.profile is not None and not found.profile.observations
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "the models fit on no plan. The run begins under auto" in warning and str(cache_path(job)) in warning
    observer = RunObserver(job, found)
    assert LateMeasuring(job, observer).is_over, "it was measured completely"
    observer.end([4])
    assert Profile.load(cache_path(job)).observations, "the measurements stay"
    with pytest.raises(PlanError, match="fit"):
        plan_job(replace(job, cluster=Cluster(1, 2, 1e-6)), time_limit_s=0.1)


def test_under_fp16_no_plan_has_the_engine_that_cannot_scale_losses(tmp_path: Path) -> None:
    for settings, engines in (({"fp16": True}, ("zero",)), ({}, ("zero", "megatron"))):
        args = PPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **{"bf16": False, **settings})
        sizes = {"prompt_tokens": 5.0, "context_length": 60, "pad_token_id": 0}
        job = ppo_job(args, ReallocationPlugin(), Cluster(1, 4), 0, "vllm", JobModels({}, {}), **sizes)
        assert job.engines == engines


def _flat(tp: int) -> ExecutionPlan:
    plan = PRESETS["flatten"](Cluster(1, 2), generation_engine="vllm").to_dict()
    plan["calls"]["actor.generate"] |= {"dp": 2 // tp, "tp": tp}
    return ExecutionPlan.from_dict(plan)


@pytest.mark.parametrize(("gpus", "tp"), [(1, 1), (2, 2)])
def test_where_processes_see_one_gpu_each_no_engine_over_two_is_chosen(
    gpus: int, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chosen(Exception):
        pass

    def announce(_: Any, plan: ExecutionPlan, rank: int) -> None:
        raise Chosen(plan)

    split, whole = (SimpleNamespace(name=f"tp {tp}", seconds=1.0 / tp, plan=_flat(tp)) for tp in (2, 1))
    decision: Any = SimpleNamespace(best=split, alternatives=[SimpleNamespace(plan=whole)])
    processes = [Process("a", "a", local, local % gpus, gpus) for local in range(2)]
    request = PlanRequest(None, Cluster(1, 2), "vllm", processes, None)
    monkeypatch.setattr(ppo_trainer, "read_plan_request", lambda *_: request)
    monkeypatch.setattr(Job, "choose", lambda *_, **__: decision)
    monkeypatch.setattr(auto_plan, "print_decision", lambda *_, **__: None)
    monkeypatch.setattr(setup, "announce", announce)
    with pytest.raises(Chosen) as chosen:
        tiny.trainer(tmp_path)
    assert chosen.value.args[0]["actor.generate"].strategy.tp == tp
