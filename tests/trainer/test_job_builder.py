"""What planning and measuring are handed is what the run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from accelerate import Accelerator

from trl_realloc import Cluster, PPOConfig, ReallocationPlugin
from trl_realloc.plan.presets import PRESETS
from trl_realloc.profiling.job import Job
from trl_realloc.profiling.job_models import JobModels
from trl_realloc.trainer.run.job_builder import compute_dtype, launched_deepspeed_config, ppo_job


def config(folder: Path, **values: Any) -> PPOConfig:
    return PPOConfig(output_dir=str(folder), use_cpu=True, report_to="none", **{"bf16": False, **values})


def job(args: PPOConfig, plugin: ReallocationPlugin | None = None) -> Job:
    sizes = {"prompt_tokens": 5.0, "context_length": 60, "pad_token_id": 0}
    return ppo_job(args, plugin or ReallocationPlugin(), Cluster(1, 4), 0, "vllm", JobModels({}, {}), **sizes)


@pytest.mark.parametrize(
    ("launched", "values", "dtype"),
    [
        ("no", {}, None),
        ("bf16", {}, torch.bfloat16),
        ("fp16", {}, torch.float16),
        ("no", {"bf16": True}, torch.bfloat16),
        ("fp16", {"bf16": True}, torch.bfloat16),
    ],
)
def test_a_job_is_planned_and_measured_in_the_dtype_that_accelerate_runs_it_in(
    launched: str, values: dict[str, Any], dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    args = config(tmp_path, **values)
    tiny.forget_accelerate()
    try:
        runs_in = Accelerator(mixed_precision=args.mixed_precision).mixed_precision
    finally:
        tiny.forget_accelerate()
    assert {"bf16": torch.bfloat16, "fp16": torch.float16}.get(runs_in) == dtype
    assert job(args).options.compute_dtype == dtype


@pytest.mark.deepspeed
def test_a_deepspeed_config_says_what_is_computed_in_before_all_else(tmp_path: Path) -> None:
    args = config(tmp_path)
    args.deepspeed_plugin = type("Plugin", (), {"deepspeed_config": {"bf16": {"enabled": True}}})()
    assert compute_dtype(args) is torch.bfloat16
    assert launched_deepspeed_config(args) == {"bf16": {"enabled": True}} == job(args).options.deepspeed


def test_short_runs_have_the_timeouts_and_buckets_of_the_run(tmp_path: Path) -> None:
    options = job(config(tmp_path), ReallocationPlugin(bucket_mb=3, transfer_timeout=7.0)).options
    assert (options.bucket_bytes, options.transfer_timeout_s) == (3 << 20, 7.0)


def test_a_vllm_engine_has_room_for_its_share_of_the_samples_under_any_plan(tmp_path: Path) -> None:
    options = job(config(tmp_path, per_device_train_batch_size=3)).options
    plan = PRESETS["flatten"](Cluster(1, 4), generation_engine="vllm")
    assert options.for_plan(plan, 12).vllm["max_num_seqs"] == 3
    assert options.for_plan(plan, 13).vllm["max_num_seqs"] == 4
