"""The experts with which a mixture is trained are those that its engines recorded, whichever way the samples came."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.training.router_replay import REPLAYED_FAMILIES


pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed"),
]


def plan(generates: dict[str, Any], trains: str, *more: str, actor: Any = None, **how: Any) -> dict[str, Any]:
    there = {"engine": "zero", "mesh": trains, "dp": 2 if "-" in trains else 1}
    calls = {name: {**there, **(actor or {})} for name in ("actor.forward", "actor.train")}
    calls |= {"actor.generate": {"engine": "vllm", **generates}, **dict.fromkeys(more, there)}
    return {"cluster": {"nodes": 1, "devices_per_node": 2}, "calls": calls, **how}


STAGE_3, TENSORS = {"zero_stage": 3}, {"engine": "megatron", "tp": 2, "dp": 1}
APART = plan({"mesh": "0"}, "1", staleness=1)
MOVES: dict[str, Any] = {"streams": {"migration": {"threshold": 0.9}}}
BOTH: dict[str, Any] = {"mesh": "0-1", "dp": 2}
STREAMED = plan(BOTH, "0-1", "reward.forward", **MOVES)
SHARDED = plan(BOTH, "0-1", "reward.forward", actor=STAGE_3, **MOVES)
SPLIT = plan({"mesh": "0-1", "tp": 2}, "0-1", actor=TENSORS)
OTHERS = ("reference.forward", "critic.forward", "reward.forward", "critic.train")
OF_PPO = plan(BOTH, "0-1", *OTHERS, **MOVES)
VLLM = {"use_vllm": True}
LONG: dict[str, Any] = {**VLLM, "max_completion_length": 64, "max_steps": 4}
AHEAD: dict[str, Any] = {**LONG, "family": "mixtral", "plan": APART, "max_staleness": 1}
PPO: dict[str, Any] = {"ppo": True, "generation_engine": "vllm", "vllm_importance_sampling_correction": True}
# a family each for five of the ways, Qwen3's for the others
WAYS: dict[str, dict[str, Any]] = {
    "PPO": {**PPO, "plan": "flatten"},
    "PPO ahead": {**PPO, "plan": "separate", "max_staleness": 1, "response_length": 64, "max_steps": 3},
    "PPO streams": {**PPO, "plan": OF_PPO, "response_length": 64},
    "turns": {**VLLM, "family": "qwen2_moe", "plan": "flatten", "tools": True, "tool_workers": 4, "max_steps": 2},
    "rounds": {**VLLM, "family": "olmoe", "plan": "separate", "tools": True, "max_steps": 2},
    "streams": {**LONG, "family": "granitemoe", "plan": STREAMED, "reward_model": True, "max_steps": 2},
    "sharded streams": {**LONG, "family": "glm4_moe", "plan": SHARDED, "reward_model": True, "max_steps": 2},
    "tensor groups": {**VLLM, "plan": SPLIT, "max_steps": 2},
    "ahead": {**AHEAD, "save_strategy": "steps", "save_steps": 2},
    "resumed": {**AHEAD, "resumes": "ahead/checkpoint-2"},
    "RLOO": {**VLLM, "kind": "RLOO", "num_iterations": 2, "eval_strategy": "steps", "eval_steps": 1},
    "recompute": {**VLLM, "router_replay": "recompute", "plan": plan(BOTH, "0-1", actor=STAGE_3), "num_iterations": 2},
}


def test_the_policy_computes_with_the_experts_that_the_engines_recorded(run: Callable[..., Path]) -> None:
    """Of all tokens of a sample but its last, and in evaluations too; with those of its first forward under
    `recompute`. The router would choose others for some."""
    folder = run("routes.py", 2, WAYS, "routes", limit_s=150)
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in WAYS}
    for name, counts in found.items():
        assert counts["whole"] == counts["completions"] > 0, (name, counts)
        assert counts["different"] == counts["unknown"] == 0 < counts["trained"], (name, counts)
        assert counts["flipped"] > 0, (name, counts)
        assert not counts["still"], (name, counts)
        assert "streams" not in name or counts["continued"] > 0, "samples moved between the engines"
    assert {way.get("family", "qwen3_moe") for way in WAYS.values()} == REPLAYED_FAMILIES
