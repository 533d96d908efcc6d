"""A real training with every training engine and vLLM, a save, and a resume under the same plan and under another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_plans import plan, split
from test_training import STEPS, assert_equal, check_saved, close, log


pytestmark = [
    pytest.mark.oldest,
    pytest.mark.multiprocess,
    pytest.mark.vllm,
    pytest.mark.deepspeed,
    pytest.mark.timeout(1800),
]

VLLM = {"mesh": "0-1", "engine": "vllm", "dp": 2}


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Rows less what depends on time and on the plan."""
    return [{key: value for key, value in row.items() if not key.startswith("realloc/")} for row in rows]


def test_zero_3_and_tensor_groups_train_with_vllm_and_resume_so_and_as_replicas(run: Callable[..., Path]) -> None:
    zero = {"mesh": "0-1", "engine": "zero", "dp": 2, "zero_stage": 3}
    halves, stages = split("0-1", tp=2), split("0-1", pp=2)
    sharded = {"actor.generate": VLLM, "actor.train": zero, "critic.forward": halves, "critic.train": halves}
    options: dict[str, Any] = {**STEPS, "generation_engine": "vllm", "plan": plan(2, changed=sharded)}
    first = run("train.py", 2, options, "first")
    check_saved(first)
    resume = {"output_dir": str(first), "resume": str(first / "checkpoint-2")}
    again = run("train.py", 2, {**options, **resume}, "again")
    assert without_times(log(again)) == without_times(log(first))
    assert_equal(again, first)
    elsewhere = {"actor.generate": VLLM, "critic.forward": stages, "critic.train": stages}
    other = run("train.py", 2, {**options, **resume, "plan": plan(2, changed=elsewhere)}, "other")
    close(without_times(log(other)), without_times(log(first)))
