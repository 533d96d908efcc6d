"""A plan that goes stale in mid-run: the trainer moves to another, and what is learned stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]

# A small rate: a larger one makes of two sums' rounding, after some updates, another token.
OPTIONS = {
    "max_steps": 9,
    "per_device_train_batch_size": 4,
    "response_length": 24,
    "stop_token": None,
    "learning_rate": 1e-4,
}


def test_longer_responses_move_the_run_to_another_plan_and_change_nothing_else(run: Callable[..., Path]) -> None:
    moved, stayed = (
        json.loads((run("replan.py", 2, {**OPTIONS, "plan": plan}, plan) / "log.json").read_text())
        for plan in ("auto", "flatten")
    )
    short, long = moved["plans"][2], moved["plans"][-1]
    assert short["actor.train"] != short["critic.train"], "side by side while responses are short"
    assert long["actor.train"] == "0-1", "on both devices once they are long"
    for one, other in zip(moved["updates"], stayed["updates"], strict=True):
        learned = {key: value for key, value in one.items() if not key.startswith("realloc/")}
        assert learned == pytest.approx(other, rel=1e-4, abs=1e-4)


def test_the_weights_after_a_move_are_those_of_a_run_that_stayed(run: Callable[..., Path]) -> None:
    moved, stayed = (run("replan.py", 2, {**OPTIONS, "plan": plan}, plan) for plan in ("auto", "flatten"))
    first, second = (load_file(folder / "final" / "model.safetensors") for folder in (moved, stayed))
    for name, tensor in first.items():
        assert float((tensor - second[name]).abs().max()) < 1e-5, name
