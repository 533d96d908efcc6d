"""What a run has learned is kept for the next run of the same models on the same machine, and for no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_realloc import Cluster, PPOConfig, ReallocationPlugin
from trl_realloc.common.errors import PlanError
from trl_realloc.engines.training import deepspeed_compat
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import CACHED_TOKENS
from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.plan.presets import flatten
from trl_realloc.plan.spans import Span
from trl_realloc.plan.staleness import Staleness
from trl_realloc.plan.timeline import Timeline
from trl_realloc.planner.cost.estimate_factors import CalibrationFactors
from trl_realloc.planner.cost.profile import Observation, Profile, model_key
from trl_realloc.planner.search.ladder import STALENESS
from trl_realloc.planner.search.problem import estimate_plan
from trl_realloc.profiling import job as job_module
from trl_realloc.profiling import late_measuring, profile_cache
from trl_realloc.profiling.auto_plan import JobPlan, known_estimate
from trl_realloc.profiling.job import Job
from trl_realloc.profiling.job_models import JobModels
from trl_realloc.profiling.late_measuring import LateMeasuring
from trl_realloc.profiling.profile_cache import cache_path, keep_calibration, known_profile, starting_profile
from trl_realloc.profiling.replanning import Replanner, suits
from trl_realloc.profiling.run_observer import RunObserver
from trl_realloc.trainer.run.job_builder import ppo_job


CLUSTER = Cluster(1, 2)
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 100}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2}
POLICY, CRITIC = (ModelSpec.from_config(CONFIG, head, bytes_per_element=4) for head in ("lm", "score"))
SPECS = {c.name: (POLICY,) if c.role in (Role.ACTOR, Role.REFERENCE) else (CRITIC,) for c in ppo_graph().calls}
LENGTHS = list(range(1, 9))


def make(folder: Path, cluster: Cluster = CLUSTER, specs: Any = None, rank: int = 0, **values: Any) -> Job:
    args = PPOConfig(output_dir=str(folder), use_cpu=True, report_to="none", **{"bf16": False, **values})
    models = JobModels({}, specs or SPECS)
    sizes = {"prompt_tokens": 5.0, "context_length": 60, "pad_token_id": 0}
    return ppo_job(args, ReallocationPlugin(), cluster, rank, "transformers", models, **sizes)


def measured(job: Job) -> Profile:
    rows = []
    for size in (1e4, 1e6):
        rows += [Observation(work, "", 1e-4 + size / 1e9, 2, bytes=size) for work in ("send", "all_reduce")]
    for spec in (POLICY, CRITIC):
        for tokens in (100.0, 200.0):
            counts: dict[str, Any] = {"tokens": tokens, "squared": 9 * tokens, "answered": tokens / 2}
            counts |= {"layers": spec.layers, "elements": float(spec.elements)}
            rows.append(Observation("forward", model_key(spec), 1e-3 * tokens, 2, **counts))
            rows.append(Observation("train", model_key(spec), 4e-3 * tokens, 2, steps=1.0, **counts))
    for samples in (4, 8):
        counts = {"tokens": samples * 5.0, "steps": 60.0, "grown": samples * 60.0, "cached": samples * 1800.0}
        counts |= {"layers": POLICY.layers, "elements": float(POLICY.elements)}
        rows.append(Observation("generate", model_key(POLICY), 0.5 + 0.01 * samples, 2, **counts))
    hardware = profile_cache.hardware(job.options.device)
    return Profile(hardware, profile_cache.about(job), 2, None, False, tuple(rows))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "cache"))
    made = make(tmp_path)
    measured(made).save(cache_path(made))
    return made


def three_times_slower(job: Job, job_plan: JobPlan) -> tuple[Span, ...]:
    """An update that takes three times as long as was measured."""
    assert job_plan.profile is not None
    costs = replace(job.pricing(job_plan.profile), calibration=CalibrationFactors(dict.fromkeys(SPECS, 3.0)))
    costs = replace(costs, workload=costs.workload.of_lengths(LENGTHS))
    return estimate_plan(job_plan.plan, job.models.specs, costs).timeline.spans


def test_the_next_run_begins_with_what_the_last_one_has_learned(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    plan = flatten(CLUSTER, generation_engine="transformers")
    first = known_estimate(job, plan)
    assert first.priced is not None
    observer = RunObserver(job, first)
    for _ in range(6):
        observer.note(three_times_slower(job, first), LENGTHS)
    corrected, chosen = observer.end(LENGTHS), observer.when_chosen(LENGTHS)
    assert corrected is not None and chosen is not None
    assert "actor.train x 3" in capsys.readouterr().err
    slow = Timeline(three_times_slower(job, first)).by_call()
    for name, seconds in chosen.timeline.by_call().items():
        assert slow[name] == pytest.approx(3 * seconds, rel=0.1), "the run is compared with what was expected of it"
        assert slow[name] == pytest.approx(corrected.timeline.by_call()[name], rel=0.1)
    second = known_estimate(job, plan)
    assert second.priced is not None
    busy = second.priced.timeline.by_call()
    for name, seconds in first.priced.timeline.by_call().items():
        assert busy[name] == pytest.approx(3 * seconds, rel=0.1)


def test_the_first_decode_steps_on_a_gpu_correct_the_estimate_of_generation(job: Job) -> None:
    cache_path(job).unlink()
    plan = flatten(CLUSTER, generation_engine="vllm")
    device = Profile("NVIDIA H100", {}, 2, None, False, (), is_accelerator=True)
    old = CalibrationFactors({"actor.generate": 3.0, "actor.train": 2.0})
    made = JobPlan(plan, estimate_plan(plan, SPECS, job.pricing(device)), profile=replace(device, calibration=old))
    observer = RunObserver(job, made)
    before = observer.end(LENGTHS)
    slow, fast = {"actor.generate": [(8.0, 20.0, 12e-3)]}, {"actor.generate": [(8.0, 20.0, 1e-3)]}
    observer.note_decoding({})
    assert observer.job_plan == made
    observer.note_decoding(slow)
    observer.note_decoding(fast)  # the first ones count
    after, profile = observer.end(LENGTHS), observer.job_plan.profile
    assert before is not None and after is not None and profile is not None and profile.decode_host is not None
    assert profile.calibration.calls == {"actor.train": 2.0}, "the factor of the estimate without it"
    assert Profile.load(cache_path(job)).decode_host == profile.decode_host
    longest = max(LENGTHS)
    generated = {name: each.calls["actor.generate"].cost.seconds for name, each in (("old", before), ("new", after))}
    dispatch = job.pricing(device).rates.call
    of_default = (generated["old"] - dispatch) / 3
    step = profile.decode_host.step - job.pricing(device).rates.step
    assert generated["new"] == pytest.approx(of_default + dispatch + longest * step, rel=1e-6)
    assert observer.when_chosen(LENGTHS) == before


def test_what_was_measured_keeps_its_own_decode_steps(job: Job) -> None:
    made = known_estimate(job, flatten(CLUSTER, generation_engine="transformers"))
    observer = RunObserver(job, made)
    observer.note_decoding({"actor.generate": [(8.0, 20.0, 12e-3)]})
    assert observer.job_plan == made


def test_without_deepspeed_no_zero_stage_is_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make(tmp_path, Cluster(1, 2, memory_gb=8.0))
    allowed: list[object] = []
    monkeypatch.setattr("trl_realloc.profiling.job.choose", lambda space, *_, **__: allowed.append(space.zero_stages))
    for is_installed in (True, False):
        monkeypatch.setattr(deepspeed_compat, "is_installed", lambda found=is_installed: found)
        job.choose(measured(job), time_limit_s=0.1)
    assert allowed == [(0, 1, 2, 3), (0,)]


SLOW = CalibrationFactors({"actor.train": 2.0}, functions={"reward.forward": 100.0}, dispatch=50.0)


def test_seconds_of_reward_functions_and_of_handing_over_stay_in_their_run(job: Job) -> None:
    keep_calibration(replace(measured(job), calibration=SLOW), job)
    kept = known_profile(job)
    assert kept is not None
    assert kept.calibration == CalibrationFactors({"actor.train": 2.0})


def test_slow_reward_functions_do_not_make_measuring_dearer(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = make(tmp_path, specs={**SPECS, "reward.forward": ()})
    runs = SimpleNamespace(sizes=[(8, 4), (4, 2)], models=judged.models)
    monkeypatch.setattr(late_measuring, "elements_of_short_runs", lambda job: 0)
    monkeypatch.setattr(late_measuring, "short_runs", lambda job, most: runs)
    monkeypatch.setattr(late_measuring, "plans_of", lambda *_: [flatten(CLUSTER, generation_engine="transformers")])
    expected = []
    for calibration in (CalibrationFactors({"actor.train": 2.0}), SLOW):
        profile = replace(measured(job), calibration=calibration)
        observer: Any = SimpleNamespace(job_plan=SimpleNamespace(profile=profile, refused=None))
        expected.append(LateMeasuring(judged, observer).cost(1.0))
    assert expected[0] == expected[1]


def test_hosts_may_have_other_hardware_than_others(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = replace(measured(job), hardware="another CPU")
    received: Any = saved
    monkeypatch.setattr(profile_cache, "from_first_rank", lambda value, timeout_s: received)
    assert starting_profile(make(tmp_path, rank=1)) == saved
    received = PlanError("the profile was made on other hardware.")
    with pytest.raises(PlanError, match="other hardware"):
        starting_profile(make(tmp_path, rank=1))
    saved.save(cache_path(job))
    monkeypatch.setattr(profile_cache, "from_first_rank", lambda value, timeout_s: value)
    with pytest.raises(PlanError, match="another CPU"):
        starting_profile(job)


def test_a_run_that_went_as_estimated_says_nothing(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    made = known_estimate(job, flatten(CLUSTER, generation_engine="transformers"))
    observer = RunObserver(job, made)
    observer.note(three_times_slower(job, made), LENGTHS)
    observer.end(LENGTHS)
    assert observer.when_chosen(LENGTHS) is None
    assert capsys.readouterr().err == ""
    assert known_profile(job) == made.profile


def test_a_profile_that_another_job_has_measured_meanwhile_is_not_overwritten(job: Job) -> None:
    made = known_estimate(job, flatten(CLUSTER, generation_engine="transformers"))
    observer = RunObserver(job, made)
    newer = replace(measured(job), observations=measured(job).observations[:-1])
    newer.save(cache_path(job))
    for _ in range(6):
        observer.note(three_times_slower(job, made), LENGTHS)
    assert known_profile(job) == newer


def test_only_rank_0_which_has_the_times_corrects(job: Job, tmp_path: Path) -> None:
    made = known_estimate(job, flatten(CLUSTER, generation_engine="transformers"))
    observer = RunObserver(make(tmp_path, rank=1), made)
    for _ in range(6):
        observer.note(three_times_slower(job, made), LENGTHS)
    assert observer.job_plan is made


def test_nothing_is_carried_to_another_device_cluster_model_or_dtype(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = {name: (replace(spec, bytes_per_element=2),) for name, (spec,) in SPECS.items()}
    deeper = ModelSpec.from_config({**CONFIG, "num_hidden_layers": 3}, "lm", bytes_per_element=4)
    others = [
        make(tmp_path, Cluster(1, 4)),
        make(tmp_path, Cluster(2, 1)),
        make(tmp_path, specs=wider),
        make(tmp_path, specs={**SPECS, "actor.generate": (deeper,)}),
        make(tmp_path, bf16=True),
        make(tmp_path, gradient_checkpointing=False),
        replace(job, engine="vllm"),
    ]
    paths = [cache_path(each) for each in (job, *others)]
    assert job.options.device == torch.device("cpu")
    monkeypatch.setattr(profile_cache, "hardware", lambda device: "NVIDIA H100 80GB HBM3")
    paths.append(cache_path(job))
    assert len(set(paths)) == len(paths)
    assert known_profile(job) is None


def test_the_cap_on_cached_tokens_is_not_put_on_an_accelerator(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = measured(job)
    assert job.pricing(profile).default_cap == CACHED_TOKENS
    monkeypatch.setattr(job_module, "memory_bytes", lambda device: 80 << 30)
    pricing = job.pricing(replace(profile, is_accelerator=True))
    assert pricing.default_cap is None
    assert pricing.memory is not None and pricing.memory.usable < 80 << 30
    assert pricing.rates.error > job.pricing(profile).rates.error


def test_a_run_that_generates_ahead_learns_nothing_and_may_change_its_plan(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generation's spans last for several iterations and overlap."""
    monkeypatch.setattr("trl_realloc.profiling.replanning.from_first_rank", lambda value, _: value)
    graph = ppo_graph(proximal=True)
    corrects = {"max_staleness": 2, "vllm_importance_sampling_correction": True}
    stale = make(tmp_path, specs={**SPECS, "actor.forward": (POLICY,)}, **corrects)
    assert stale.max_staleness == 2 and stale.graph == graph
    stale, profile = replace(stale, engine="vllm"), measured(stale)
    decision = stale.choose(profile, time_limit_s=0.5)
    _, chosen = decision.option(STALENESS).plans.values()
    job_plan = JobPlan(chosen.plan, chosen, decision, profile)
    observer = RunObserver(stale, job_plan)
    for _ in range(8):
        spans = tuple(replace(span, end=span.start + 3 * span.seconds) for span in chosen.timeline.spans)
        observer.note(spans, LENGTHS)
    assert observer.job_plan.profile == profile
    expected = observer.end(LENGTHS)
    assert expected is not None and expected.staleness.versions == 2 and 0 <= expected.estimate.mean_age <= 2
    watcher = Replanner(stale, observer, threshold=0.0)
    watcher.note([1] * 8)
    found = watcher.better(updates_left=10_000, move_seconds=0.0)
    assert found is None or found.priced is not None
    assert not suits(chosen.plan, replace(chosen.plan, staleness=Staleness(1)), 16), "another bound is another engine"
