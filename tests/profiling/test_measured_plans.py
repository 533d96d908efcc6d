"""Which plans are measured: those that the planner may choose, and that a device's memory holds."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from trl_realloc import Cluster, PPOConfig, ReallocationPlugin
from trl_realloc.plan.dataflow import Role
from trl_realloc.planner.search.space import TrainingSplits
from trl_realloc.profiling import profile_cache
from trl_realloc.profiling.job import Job
from trl_realloc.profiling.job_models import JobModels, specs_of
from trl_realloc.profiling.late_measuring import OVERHEAD_S, LateMeasuring
from trl_realloc.profiling.profile_cache import elements_of_short_runs, plans_of, short_runs, unmeasured_profile
from trl_realloc.trainer.run.job_builder import ppo_job


def make(folder: Path, memory_gb: float | None, **config: Any) -> Job:
    args = PPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "vocab_size": 1000, "num_labels": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    configs = {role: [LlamaConfig(**{**sizes, **config})] for role in Role}
    models = JobModels(configs, specs_of(configs))
    counts = {"prompt_tokens": 4, "context_length": 16, "pad_token_id": 0}
    return ppo_job(args, ReallocationPlugin(), Cluster(1, 2, memory_gb), 0, "transformers", models, **counts)


def names(job: Job) -> list[str]:
    return [plan.name for plan in plans_of(job, short_runs(job, elements_of_short_runs(job)))]


@pytest.mark.deepspeed
def test_zero_stages_are_measured_where_the_planner_considers_them(tmp_path: Path) -> None:
    assert names(make(tmp_path, None)) == ["flatten", "tp 2 pp 1", "tp 1 pp 2"]
    assert names(make(tmp_path, 8.0)) == ["flatten", "tp 2 pp 1", "tp 1 pp 2", "ZeRO-1", "ZeRO-2", "ZeRO-3"]


def test_without_deepspeed_no_stage_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_realloc.engines.training.deepspeed_compat.is_installed", lambda: False)
    assert names(make(tmp_path, 8.0)) == ["flatten", "tp 2 pp 1", "tp 1 pp 2"]


def test_short_runs_have_as_many_layers_as_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(tmp_path, None).models.specs["actor.train"][0]
    monkeypatch.setattr(profile_cache, "MAX_ELEMENTS", whole.elements)
    monkeypatch.setattr(profile_cache, "MIN_ELEMENTS", whole.elements // 32)
    assert elements_of_short_runs(make(tmp_path, 1.0)) == whole.elements
    tight = make(tmp_path, 8e-9 * whole.bytes)  # actor and critic take 4 times their weights each, and two are frozen
    runs = short_runs(tight, elements_of_short_runs(tight))
    assert 2 <= runs.models.specs["actor.train"][0].layers < 8
    assert "flatten" in [plan.name for plan in plans_of(tight, runs)]


def test_nothing_is_measured_where_the_memory_holds_no_short_run(tmp_path: Path) -> None:
    assert names(make(tmp_path, 1e-4)) == []


def test_a_split_under_which_the_job_does_not_fit_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shallow models fit under each split; the job's own, of which short runs measure a part, under ZeRO-3 at most."""
    monkeypatch.setattr(profile_cache, "MAX_ELEMENTS", 300_000)
    job = make(tmp_path, None, num_hidden_layers=200)
    state = 16e-9 * job.models.specs["actor.train"][0].elements  # GB
    assert "tp 2 pp 1" in names(make(tmp_path, 2 * state, num_hidden_layers=200))
    fitting = names(make(tmp_path, 0.2 * state, num_hidden_layers=200))
    assert fitting[0] == "flatten"
    assert "ZeRO-1" not in fitting


def test_measuring_is_expected_to_take_as_long_as_its_short_runs_and_the_starts_of_engines(tmp_path: Path) -> None:
    def cost(memory_gb: float | None, start_s: float) -> float:
        job = make(tmp_path, memory_gb)
        job_plan = SimpleNamespace(profile=unmeasured_profile(job), refused=None)
        observer: Any = SimpleNamespace(job_plan=job_plan)
        return LateMeasuring(job, observer).cost(start_s)

    assert cost(None, 0.0) > OVERHEAD_S
    assert cost(None, 30.0) == pytest.approx(cost(None, 0.0) + 2 * 30.0), "the short runs' engines and the run's own"
    assert cost(1e-4, 0.0) == math.inf, "no device holds the models of the short runs"


def test_training_is_not_measured_in_splits_that_the_optimizer_does_not_allow(tmp_path: Path) -> None:
    job = replace(make(tmp_path, 8.0), splits=TrainingSplits(elements=False))
    plans = {plan.name: plan for plan in plans_of(job, short_runs(job, elements_of_short_runs(job)))}
    assert set(plans) == {"flatten", "tp 2 pp 1", "tp 1 pp 2"}, "no ZeRO stage"
    assert plans["tp 2 pp 1"]["actor.train"].strategy.tp == 1
    assert plans["tp 2 pp 1"]["reference.forward"].strategy.tp == 2
    assert plans["tp 1 pp 2"]["actor.train"].strategy.pp == 2
