"""GRPO and RLOO on two processes: under every plan what TRL's trainers log and learn under DDP, from the same rollouts
(`tests/parity`: on one)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_zero import LAUNCHED

from trl_realloc.engines.generation.vllm_support import is_vllm_available


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


def plan(zero_stage: int = 0, **everywhere: Any) -> dict[str, Any]:
    """Everything but the generation in one layout."""
    scoring = {"mesh": "0-1", **everywhere, "zero_stage": zero_stage if zero_stage == 3 else 0}
    calls = {
        "actor.generate": {"mesh": "0-1", "engine": "transformers", "dp": 2},
        "actor.forward": scoring,
        "reference.forward": scoring,
        "actor.train": {**scoring, "zero_stage": zero_stage},
    }
    return {"cluster": {"nodes": 1, "devices_per_node": 2}, "calls": calls}


# vLLM on one process, and everything else on the other
APART: dict[str, Any] = {
    "cluster": {"nodes": 1, "devices_per_node": 2},
    "calls": {
        "actor.generate": {"mesh": "0", "engine": "vllm"},
        **{name: {"mesh": "1", "engine": "zero"} for name in ("actor.forward", "reference.forward", "actor.train")},
    },
}
# two optimizer steps on a generation, a term of the entropies, a reference, and responses without any token in the loss
GRPO: dict[str, Any] = {
    "steps_per_generation": 4,
    "max_steps": 4,
    "beta": 0.04,
    "entropy_coef": 0.1,
    "mask_truncated_completions": True,
    "num_generations": 8,
}
RLOO: dict[str, Any] = {"kind": "RLOO", "num_iterations": 2, "max_steps": 4}
PLANS: dict[str, Any] = {
    "flatten": "flatten",
    "separate": "separate",
    "tensor parallel": plan(engine="megatron", tp=2),
    "in two stages": plan(engine="megatron", pp=2),
    "zero 2": plan(engine="zero", dp=2, zero_stage=2),
    "zero 3": plan(engine="zero", dp=2, zero_stage=3),
}


def check_equal(folder: Path, expected: Path, tolerance: float = 1e-4) -> None:
    """The same logs, key by key, to a relative difference, and the same parameters."""
    rows, others = (json.loads((run / "log.json").read_text()) for run in (folder, expected))
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        if folder.name == "resumed" and "train_loss" in row:  # Trainer's mean is that of the steps since then
            other["train_loss"] = row["train_loss"]
        assert row == pytest.approx(other, rel=tolerance, abs=1e-5, nan_ok=True), folder.name
    tensors, wanted = (load_file(run / "model" / "model.safetensors") for run in (folder, expected))
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        assert torch.allclose(tensor, wanted[name], rtol=1e-5, atol=2e-6), (folder.name, name)


@pytest.mark.deepspeed
def test_every_plan_logs_and_learns_what_trl_does_under_ddp(run: Callable[..., Path]) -> None:
    runs: dict[str, Any] = {"trl": {"by": "trl", "ddp_backend": "gloo", **GRPO}}
    runs |= {name: {"by": "trl_realloc", "plan": plan, **GRPO} for name, plan in PLANS.items()}
    runs["separate"] |= {"save_strategy": "steps", "save_steps": 2}
    runs["resumed"] = {**runs["tensor parallel"], "resumes": "separate/checkpoint-2"}
    runs["RLOO by trl"] = {"by": "trl", "ddp_backend": "gloo", **RLOO}
    runs["RLOO"] = {"by": "trl_realloc", "plan": "separate", **RLOO}
    folder = run("grpo_plans.py", 2, runs, "grpo", limit_s=150)
    for name in [*PLANS, "resumed"]:
        check_equal(folder / name, folder / "trl")
    check_equal(folder / "RLOO", folder / "RLOO by trl")


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_launched_with_deepspeed_it_logs_and_learns_what_trl_does(
    run: Callable[..., Path], tmp_path: Path, stage: int
) -> None:
    """Both by one config of Accelerate; the preset has the ZeRO stage from there."""
    config = tmp_path / "zero.yaml"
    in_float32 = LAUNCHED.replace("mixed_precision: bf16", "mixed_precision: 'no'")
    config.write_text(in_float32.replace("zero_stage: 3", f"zero_stage: {stage}"))
    runs: dict[str, Any] = {
        "trl": {"by": "trl", "use_cpu": False, "ddp_backend": "gloo", **GRPO},
        "planned": {"by": "trl_realloc", "use_cpu": False, "plan": "flatten", **GRPO},
    }
    folder = run("grpo_plans.py", 2, runs, "launched", config=config, limit_s=150)
    for name in runs:
        assert json.loads((folder / name / "engine.json").read_text()) == {"zero_stage": stage}, name
    check_equal(folder / "planned", folder / "trl", tolerance=1e-5)


@pytest.mark.vllm
@pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")
def test_vllm_on_the_other_process_draws_from_the_policy_as_it_is_after_every_update(run: Callable[..., Path]) -> None:
    settings: dict[str, Any] = {"by": "trl_realloc", "use_vllm": True, "generates": True, "max_steps": 3, "beta": 0.04}
    settings["reward_model"] = True
    calls = {**APART["calls"], "reward.forward": {"mesh": "1", "engine": "zero"}}
    streamed = {**APART, "calls": calls, "streams": True}
    runs = {"vllm": {**settings, "plan": "separate"}, "streamed": {**settings, "plan": streamed}}
    folder = run("grpo_plans.py", 2, runs, "vllm", limit_s=150)
    *rows, _ = json.loads((folder / "vllm" / "log.json").read_text())
    assert len(rows) == 3 and rows[-1]["kl"] > 1e-3, "the policy has changed"
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
    check_equal(folder / "streamed", folder / "vllm")


@pytest.mark.vllm
@pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")
def test_the_next_generations_are_drawn_while_one_is_trained_and_a_resumed_run_goes_on_with_them(
    run: Callable[..., Path],
) -> None:
    """Also where two updates train on a generation, and an evaluation uses the engines."""
    settings = {
        "by": "trl_realloc",
        "use_vllm": True,
        "generates": True,
        "max_staleness": 1,
        "max_completion_length": 64,
    }
    runs: dict[str, Any] = {
        "stale": {**settings, "plan": "separate", "max_steps": 4, "save_strategy": "steps", "save_steps": 2},
        "resumed": {**settings, "plan": "separate", "max_steps": 4, "resumes": "stale/checkpoint-2"},
        "halves": {**settings, "plan": {**APART, "staleness": 1}, "max_steps": 6, "steps_per_generation": 4},
    }
    runs["halves"] |= {"evaluates": True, "eval_strategy": "steps", "eval_steps": 3}
    folder = run("grpo_plans.py", 2, runs, "ahead", limit_s=200)
    for name, updates in (("stale", 4), ("resumed", 4), ("halves", 6)):
        rows = [row for row in json.loads((folder / name / "log.json").read_text()) if "loss" in row]
        assert len(rows) == updates, name
        ages = [(row["staleness/mean"], row["staleness/oldest"]) for row in rows if "staleness/mean" in row]
        assert len(ages) == (updates // 2 if name == "halves" else updates), name
        assert all(0 < mean <= oldest == 1 for mean, oldest in ages[1:]), (name, ages)
        assert all(math.isfinite(row["loss"]) for row in rows)
    assert (folder / "stale" / "checkpoint-2" / "samples_under_way.pt").exists()
