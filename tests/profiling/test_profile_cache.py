"""The file of a profile, which other jobs read and write at the same time."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import test_run_observer
import tiny
from peft import LoraConfig
from transformers import LlamaForCausalLM

from trl_realloc import Cluster
from trl_realloc.engines.transformers_compat import attention_name
from trl_realloc.plan.dataflow import Role
from trl_realloc.planner.cost.profile import Profile
from trl_realloc.profiling import profile_cache
from trl_realloc.profiling.job import Job
from trl_realloc.profiling.profile_cache import cache_path, starting_profile, unmeasured_profile


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "cache"))
    return test_run_observer.make(tmp_path, Cluster(2, 1, 8.0))


def test_what_another_job_has_measured_meanwhile_stays(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = test_run_observer.measured(job)

    def links(*_: Any) -> tuple[()]:
        measured.save(cache_path(job))
        return ()

    monkeypatch.setattr(profile_cache, "links", links)
    monkeypatch.setattr(profile_cache, "network", lambda: "this one")
    assert not starting_profile(job).observations
    assert Profile.load(cache_path(job)).observations == measured.observations
    profile_cache.save_profile(
        replace(measured, complete=False, observations=measured.observations[:1]), cache_path(job), 0
    )
    assert Profile.load(cache_path(job)).complete
    more = replace(measured, thorough=True)
    profile_cache.save_profile(more, cache_path(job), 0)
    assert Profile.load(cache_path(job)).thorough


def test_a_file_that_cannot_be_read_is_left_alone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    test_run_observer.measured(job).save(cache_path(job))
    monkeypatch.setattr(profile_cache.os, "access", lambda *_: False)
    assert profile_cache.read_profile(cache_path(job), job) is None
    assert cache_path(job).is_file()


def test_a_damaged_file_in_a_folder_that_cannot_be_written_is_none(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    unmeasured_profile(job).save(cache_path(job))
    cache_path(job).write_text("{")

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert profile_cache.read_profile(cache_path(job), job) is None


def test_the_profile_of_adapters_is_found_in_every_process(job: Job) -> None:
    """The order of a set of names differs between processes; here by the order in which they are put into it."""
    pairs = combinations([f"module{number}" for number in range(99)], 2)
    two = next(list(pair) for pair in pairs if str(set(pair)) != str({pair[1], pair[0]}))
    adapters = [LoraConfig(target_modules=modules) for modules in (two, two[::-1], two[:1])]
    assert str(adapters[0].target_modules) != str(adapters[1].target_modules)
    one, same, other = (cache_path(replace(job, models=replace(job.models, peft_config=config))) for config in adapters)
    assert one == same != other


def test_other_attention_and_other_settings_of_engines_are_measured_apart(job: Job) -> None:
    config = tiny.config()
    known = replace(job, models=replace(job.models, configs={Role.ACTOR: [config]}))
    paths = {cache_path(known)}
    model = LlamaForCausalLM(config)  # which notes its attention in the config
    assert attention_name(config) == "sdpa"
    assert cache_path(known) in paths
    model.set_attn_implementation("eager")
    assert cache_path(known) in paths, "of one job it stays"
    paths.add(cache_path(replace(job, models=replace(job.models, configs={Role.ACTOR: [config]}))))
    eager = {**job.options.vllm, "engine_kwargs": {"enforce_eager": True}}
    paths.add(cache_path(replace(known, options=replace(job.options, vllm=eager))))
    limits = {**job.options.vllm, "start_timeout_s": 7.0}
    assert cache_path(replace(known, options=replace(job.options, vllm=limits))) in paths, (
        "a time limit changes no time"
    )
    assert len(paths) == 3
