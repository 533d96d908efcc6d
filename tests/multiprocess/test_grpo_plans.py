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
from drawn import case_of
from safetensors.torch import load_file
from test_plans import PLANS as PLANS_OF_PPO
from test_zero import LAUNCHED

from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.planner.cost.profile import Profile


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


def drawn(seed: int) -> dict[str, Any]:
    """A random plan of PPO for a mixture as one of GRPO, without streams."""
    calls = of_ppo(case_of(seed)["plan"], "actor.train")["calls"]
    return {**plan(), "calls": {**calls, "actor.generate": plan()["calls"]["actor.generate"]}}


# vLLM on one process, and everything else on the other
APART: dict[str, Any] = {
    "cluster": {"nodes": 1, "devices_per_node": 2},
    "calls": {
        "actor.generate": {"mesh": "0", "engine": "vllm"},
        **{name: {"mesh": "1", "engine": "zero"} for name in ("actor.forward", "reference.forward", "actor.train")},
    },
}
# two optimizer steps on a generation, a term of the entropies, a reference, and responses without any token in the loss
GRPO: dict[str, Any] = {"steps_per_generation": 4, "max_steps": 4, "beta": 0.04, "entropy_coef": 0.1}
GRPO |= {"mask_truncated_completions": True, "num_generations": 8}
RLOO: dict[str, Any] = {"kind": "RLOO", "num_iterations": 2, "max_steps": 4}
MIXTURE: dict[str, Any] = {**GRPO, "beta": 0.0, "mixture": "qwen3_moe", "router_aux_loss_coef": 0.5}
# else the second step on a generation has other experts: grad_norm differs by 0.15
MIXTURE["router_replay"] = "recompute"
PLANS: dict[str, Any] = {"flatten": "flatten", "separate": "separate", "tensor parallel": plan(engine="megatron", tp=2)}


def of_ppo(ppo: dict[str, Any], trained_as: str) -> dict[str, Any]:
    """A plan of PPO as one of GRPO: the policy scores as PPO's critic does, and trains as one of its calls does."""
    calls = {name: ppo["calls"][name] for name in ("actor.generate", "reference.forward")}
    calls |= {"actor.forward": ppo["calls"]["critic.forward"], "actor.train": ppo["calls"][trained_as]}
    return {**ppo, "calls": calls}


def check_equal(folder: Path, expected: Path, tolerance: float = 1e-5) -> None:
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
    # TRL takes the auxiliary loss of a mixture over the samples of one process, a plan over those of all
    # trained under ZeRO-3, in two stages and under tp 2, each with its forward in another layout
    layouts = ("flatten", "separate", *map(drawn, (1_000_001, 1_000_016, 1_000_037)))
    mixtures = {f"mixture {number}": layout for number, layout in enumerate(layouts)}
    runs |= {name: {"by": "trl_realloc", "plan": layout, **MIXTURE} for name, layout in mixtures.items()}
    folder = run("grpo_plans.py", 2, runs, "grpo", limit_s=150)
    for name in mixtures:
        check_equal(folder / name, folder / "mixture 0")
    for name in [*PLANS, "resumed"]:
        check_equal(folder / name, folder / "trl")
    check_equal(folder / "RLOO", folder / "RLOO by trl")


@pytest.mark.deepspeed
@pytest.mark.parametrize(("processes", "trained_as"), [(2, "critic.train"), (4, "actor.train")])
def test_every_plan_that_ppo_is_tested_with_logs_and_learns_what_trl_does(
    run: Callable[..., Path], processes: int, trained_as: str
) -> None:
    runs: dict[str, Any] = {"trl": {"by": "trl", "ddp_backend": "gloo", **GRPO}}
    plans = {name: of_ppo(ppo, trained_as) for name, ppo in PLANS_OF_PPO[processes].items()}
    runs |= {name: {"by": "trl_realloc", "plan": plan, **GRPO} for name, plan in plans.items()}
    folder = run("grpo_plans.py", processes, runs, "of_ppo", limit_s=200)
    for name in plans:
        check_equal(folder / name, folder / "trl")


@pytest.mark.deepspeed
def test_a_change_of_plan_between_two_generations_changes_nothing_that_is_learned(run: Callable[..., Path]) -> None:
    """Also where two updates train on a generation; and a checkpoint of the second plan is resumed from."""
    settings = {"by": "trl_realloc", **GRPO, "max_steps": 6, "save_strategy": "steps", "save_steps": 4}
    # with the usual epsilon, AdamW makes whole steps of gradients that are rounding alone
    settings |= {"optim": "adamw_torch", "adam_epsilon": 1e-2, "learning_rate": 1e-2, "lr_scheduler_type": "linear"}
    runs: dict[str, Any] = {
        "stayed": {**settings, "plan": "flatten"},
        "moved": {**settings, "plan": "flatten", "moves_to": "separate"},
        "back": {**settings, "plan": "separate", "moves_to": plan(engine="zero", dp=2, zero_stage=2), "after": 2},
        "split": {**settings, "plan": plan(engine="megatron", tp=2), "moves_to": plan(engine="megatron", pp=2)},
        "resumed": {**settings, "plan": "flatten", "resumes": "moved/checkpoint-4"},
        "RLOO": {"plan": "flatten", "by": "trl_realloc", **RLOO},
        "RLOO moved": {"plan": "flatten", "by": "trl_realloc", **RLOO, "moves_to": "separate"},
    }
    folder = run("grpo_plans.py", 2, runs, "moved", limit_s=200)
    for name in ("moved", "back", "split", "resumed"):
        check_equal(folder / name, folder / "stayed")
    check_equal(folder / "RLOO moved", folder / "RLOO")
    plans = {name: json.loads((folder / name / "plan.json").read_text())["plan"] for name in runs}
    assert plans["moved"]["calls"] == plans["RLOO moved"]["calls"] != plans["stayed"]["calls"], "it has moved"
    assert plans["split"]["calls"]["actor.train"]["pp"] == 2
    text = (folder / "log.txt").read_text()
    assert text.count("update 2: the plan is now") == 3 and text.count("update 4: the plan is now") == 1


def test_a_run_begins_unmeasured_measures_between_two_generations_and_its_times_teach_the_planner(
    run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates train on a generation. The responses are generated, and are the same under every plan."""
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "cache"))
    settings = {"by": "trl_realloc", "generates": True, "steps_per_generation": 4, "num_generations": 8}
    settings |= {"max_steps": 14, "learning_rate": 0.01}
    runs: dict[str, Any] = {
        "stayed": {**settings, "plan": "flatten"},
        "at once": {**settings, "plan": "auto"},
        "measured": {**settings, "plan": "auto", "measures": True},
    }
    folder = run("grpo_plans.py", 2, runs, "auto", limit_s=200)
    for name in ("at once", "measured"):
        check_equal(folder / name, folder / "stayed")
    counts = [json.loads((folder / name / "plan.json").read_text())["measured"] for name in runs]
    assert counts == [0, 0, 1]
    text = " ".join((folder / "log.txt").read_text(errors="replace").split())
    assert "by specification" in text
    assert "measured / estimated seconds of this run: " in text
    assert "and corrected by the times of earlier runs" in text
    assert "generation 5: measuring this machine for a better plan" in text
    assert "in the 2 generations left a better plan might save" in text
    assert "update 10: the plan is now" in text or "update 10: the run goes on under" in text
    taught = text.partition("measured / estimated seconds of this run: ")[2].partition(". Estimates")[0]
    assert "actor.train x" in taught, "no specification of a CPU is within 5 % of it"
    (kept,) = (tmp_path / "cache").glob("profile-*.json")
    assert Profile.load(kept).observations, "it was measured"


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_with_deepspeed_it_logs_and_learns_what_trl_does(run: Callable[..., Path], tmp_path: Path, stage: int) -> None:
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
def test_generations_are_drawn_while_one_is_trained_and_resumed_runs_go_on_with_them(run: Callable[..., Path]) -> None:
    """Also where two updates train on a generation, and an evaluation uses the engines."""
    settings = {
        "by": "trl_realloc",
        "use_vllm": True,
        "generates": True,
        "max_staleness": 1,
        "max_completion_length": 64,
        "pauses_s": 0.3,  # or a generation ahead may begin when the update has ended, on a busy machine
    }
    runs: dict[str, Any] = {
        "stale": {**settings, "plan": "separate", "max_steps": 4, "save_strategy": "steps", "save_steps": 2},
        "resumed": {**settings, "plan": "separate", "max_steps": 4, "resumes": "stale/checkpoint-2"},
        "halves": {**settings, "plan": {**APART, "staleness": 1}, "max_steps": 6, "steps_per_generation": 4},
    }
    runs["RLOO"] = {**runs["stale"], "kind": "RLOO", "vllm_importance_sampling_correction": True}
    runs["halves"] |= {"evaluates": True, "eval_strategy": "steps", "eval_steps": 3}
    folder = run("grpo_plans.py", 2, runs, "ahead", limit_s=200)
    for name, updates in (("stale", 4), ("resumed", 4), ("RLOO", 4), ("halves", 6)):
        rows = [row for row in json.loads((folder / name / "log.json").read_text()) if "loss" in row]
        assert len(rows) == updates, name
        ages = [(row["staleness/mean"], row["staleness/oldest"]) for row in rows if "staleness/mean" in row]
        assert len(ages) == (updates // 2 if name == "halves" else updates), name
        assert all(0 < mean <= oldest == 1 for mean, oldest in ages[1:]), (name, ages)
        assert all(math.isfinite(row["loss"]) for row in rows)
        if name == "RLOO":
            ratios = [row["sampling/importance_sampling_ratio/max"] for row in rows]
            assert abs(ratios[0] - 1) < 1e-3 < max(abs(ratio - 1) for ratio in ratios), ratios
    assert (folder / "stale" / "checkpoint-2" / "samples_under_way.pt").exists()


@pytest.mark.vllm
@pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")
def test_a_change_of_plan_keeps_what_has_been_generated_ahead(run: Callable[..., Path]) -> None:
    """From vLLM on one process to vLLM on the other one; and to a plan that generates nothing ahead, and back."""
    other = {
        **APART,
        "calls": {name: {**call, "mesh": str(1 - int(call["mesh"]))} for name, call in APART["calls"].items()},
    }
    settings = {"by": "trl_realloc", "use_vllm": True, "generates": True, "max_staleness": 1, "max_steps": 5}
    settings |= {"max_completion_length": 64, "plan": {**APART, "staleness": 1}, "after": 2}
    runs: dict[str, Any] = {
        "other": {**settings, "moves_to": {**other, "staleness": 1}},
        "without": {**settings, "moves_to": other},
        "with": {**settings, "plan": APART, "moves_to": {**other, "staleness": 1}},
    }
    folder = run("grpo_plans.py", 2, runs, "kept", limit_s=200)
    ages = {}
    for name in runs:
        *rows, _ = json.loads((folder / name / "log.json").read_text())
        assert len(rows) == 5 and all(math.isfinite(row["loss"]) for row in rows), name
        assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows if not row.get("staleness/mean"))
        ages[name] = [row.get("staleness/mean", -1.0) for row in rows]
    assert ages["other"][0] == 0 and all(0 < age <= 1 for age in ages["other"][1:]), ages
    assert all(0 < age <= 1 for age in ages["without"][1:2]) and ages["without"][2:] == [-1.0] * 3, ages
    assert ages["with"][:3] == [-1.0, -1.0, 0.0] and all(0 < age <= 1 for age in ages["with"][3:]), ages
    assert (folder / "log.txt").read_text().count("update 2: the plan is now") == 3


@pytest.mark.vllm
@pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")
def test_the_next_epochs_prompts_are_generated_ahead_and_a_run_resumed_at_an_epochs_end_goes_on_with_them(
    run: Callable[..., Path],
) -> None:
    """An epoch has two generations, fewer than the staleness."""
    settings = {"by": "trl_realloc", "use_vllm": True, "generates": True, "max_completion_length": 64, "rows": 8}
    settings |= {"max_steps": 7, "plan": "separate"}
    runs: dict[str, Any] = {
        "ahead": {**settings, "max_staleness": 3, "save_strategy": "steps", "save_steps": 2},
        "resumed": {**settings, "max_staleness": 3, "resumes": "ahead/checkpoint-4"},
        "in turn": settings,
        "trl": {"by": "trl", "ddp_backend": "gloo", "rows": 8, "max_steps": 7},
    }
    folder = run("grpo_plans.py", 2, runs, "epochs", limit_s=200)
    asked = {name: json.loads((folder / name / "prompts.json").read_text()) for name in runs}
    assert len(asked["trl"]) == 7 and asked["trl"][0] != asked["trl"][2], "each epoch has an order of its own"
    assert asked["ahead"] == asked["in turn"] == asked["trl"]
    assert asked["resumed"] == asked["trl"][4:]
    # the first four generations are begun at the same time, two of them of the second epoch
    for name, drawn_before in (("ahead", slice(1, 4)), ("resumed", slice(1, 5))):
        ages = [row["staleness/mean"] for row in json.loads((folder / name / "log.json").read_text()) if "loss" in row]
        assert len(ages) == 7 and ages[0] == 0, ages
        assert all(age > 0 for age in ages[drawn_before]), (name, ages)
    assert "generated again" not in (folder / "log.txt").read_text()
