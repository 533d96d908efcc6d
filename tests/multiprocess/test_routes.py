"""The experts with which a mixture is trained are those that its engines recorded, whichever way the samples came."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trl_realloc.engines.generation.vllm_support import is_vllm_available


pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed"),
]


def plan(generates: dict[str, Any], trains: str, *more: str, **how: Any) -> dict[str, Any]:
    calls = {
        name: {"mesh": trains, "dp": 2 if "-" in trains else 1} for name in ("actor.forward", "actor.train", *more)
    }
    calls = {
        "actor.generate": {"engine": "vllm", **generates},
        **{n: {"engine": "zero", **c} for n, c in calls.items()},
    }
    return {"cluster": {"nodes": 1, "devices_per_node": 2}, "calls": calls, **how}


APART = plan({"mesh": "0"}, "1", staleness=1)
SPLIT = plan({"mesh": "0-1", "tp": 2}, "0-1")
for call in ("actor.forward", "actor.train"):
    SPLIT["calls"][call] = {"mesh": "0-1", "engine": "megatron", "tp": 2}
MOVES = plan({"mesh": "0-1", "dp": 2}, "0-1", "reward.forward", streams={"migration": {"threshold": 0.9}})
VLLM = {"use_vllm": True}
LONG: dict[str, Any] = {**VLLM, "max_completion_length": 64, "max_steps": 4}
PPO: dict[str, Any] = {"ppo": True, "generation_engine": "vllm", "vllm_importance_sampling_correction": True}
WAYS: dict[str, dict[str, Any]] = {
    "PPO": {**PPO, "plan": "flatten"},
    "turns": {**VLLM, "plan": "flatten", "tools": True, "tool_workers": 4, "max_steps": 2},
    "rounds": {**VLLM, "plan": "separate", "tools": True, "max_steps": 2},
    "streams": {**LONG, "plan": MOVES, "reward_model": True, "max_steps": 2},
    "tensor groups": {**VLLM, "plan": SPLIT, "max_steps": 2},
    "ahead": {**LONG, "plan": APART, "max_staleness": 1, "save_strategy": "steps", "save_steps": 2},
    "resumed": {**LONG, "plan": APART, "max_staleness": 1, "resumes": "ahead/checkpoint-2"},
}


def test_the_policy_computes_with_the_experts_that_the_engines_recorded(run: Callable[..., Path]) -> None:
    """Of all tokens of a sample but its last. The router would choose others for some."""
    folder = run("routes.py", 2, WAYS, "routes", limit_s=120)
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in WAYS}
    for name, counts in found.items():
        assert counts["whole"] == counts["completions"] > 0, (name, counts)
        assert counts["different"] == counts["unknown"] == 0 < counts["trained"], (name, counts)
        assert counts["flipped"] > 0, (name, counts)
    assert found["streams"]["continued"] > 0, "samples moved between the engines"
