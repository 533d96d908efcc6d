"""A plan that goes stale in mid-run: the trainer moves to another, and what is learned stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from test_plans import ZERO3, plan, split

from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.execution_plan import ExecutionPlan


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(1800)]

# A small rate: a larger one makes of two sums' rounding, after some updates, another token.
OPTIONS = {"max_steps": 9, "per_device_train_batch_size": 4, "response_length": 24, "stop_token": None}
OPTIONS |= {"learning_rate": 1e-4}


def test_longer_responses_move_the_run_to_another_plan_and_change_nothing_else(run: Callable[..., Path]) -> None:
    folders = [run("replan.py", 2, {**OPTIONS, "plan": plan}, plan) for plan in ("auto", "flatten")]
    moved, stayed = (json.loads((folder / "log.json").read_text()) for folder in folders)
    short, long = moved["plans"][2], moved["plans"][-1]
    assert short["actor.train"] != short["critic.train"], "side by side while responses are short"
    assert long["actor.train"] == "0-1", "on both devices once they are long"
    for one, other in zip(moved["updates"], stayed["updates"], strict=True):
        learned = {key: value for key, value in one.items() if not key.startswith("realloc/")}
        assert learned == pytest.approx(other, rel=1e-4, abs=1e-4)
    first, second = (load_file(folder / "final" / "model.safetensors") for folder in folders)
    for name, tensor in first.items():
        assert float((tensor - second[name]).abs().max()) < 1e-5, name


SHARDS = {"mesh": "0-1", "dp": 2, **ZERO3}
WAYS = {
    "tensor group and ZeRO-3 to pipeline and replicas": (
        {"actor.train": split("0-1", tp=2), "reward.forward": split("0-1", tp=2)}
        | {"critic.train": SHARDS, "critic.forward": SHARDS, "reference.forward": SHARDS},
        {"actor.train": split("0-1", pp=2), "critic.forward": split("0-1", tp=2), "reward.forward": SHARDS},
    ),
    "replicas to ZeRO-2, ZeRO-3 and another device": (
        {"reference.forward": {"mesh": "0", "engine": "zero", "dp": 1, "offload": True}},
        {"actor.train": {"mesh": "0-1", "engine": "zero", "dp": 2, "zero_stage": 2}}
        | {"critic.train": SHARDS, "critic.forward": {"mesh": "1", "engine": "zero", "dp": 1, "drop": True}}
        | {"reference.forward": split("0-1", tp=2)},
    ),
}


@pytest.mark.deepspeed
@pytest.mark.parametrize("way", WAYS)
def test_whatever_the_layouts_a_moved_run_goes_on_as_it_was(run: Callable[..., Path], way: str, tmp_path: Path) -> None:
    """Weights, both optimizers, the frozen roles: the run is that of one that stayed on replicas. Its checkpoint, whose
    parts two ranks have written, is read by one."""
    options = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-4}
    before, after = (plan(2, changed=changed) for changed in WAYS[way])
    saves = {"save_strategy": "steps", "save_steps": 4}
    moved = run("moved.py", 2, {**options, **saves, "plan": before, "to": after}, "moved")
    stayed = run("moved.py", 2, {**options, "plan": plan(2)}, "stayed")
    one, other = (json.loads((folder / "log.json").read_text()) for folder in (moved, stayed))
    assert ExecutionPlan.from_dict(one["plan"]) == ExecutionPlan.from_dict(after), "it has moved"
    for mine, theirs in zip(one["updates"], other["updates"], strict=True):
        learned = {key: value for key, value in mine.items() if not key.startswith("realloc/")}
        assert learned == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    total = 0
    for part in ("", "value_model/"):
        first, second = (load_file(folder / "final" / f"{part}model.safetensors") for folder in (moved, stayed))
        assert first.keys() == second.keys()
        assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5
        total += 4 * sum(tensor.nbytes for tensor in first.values())  # two moments, and a frozen role of this size
    alone = tiny.resumed(moved / "checkpoint-4", tmp_path, per_device_train_batch_size=8)
    read = tiny.weights(alone)
    for role, part in (("policy", ""), ("critic", "value_model/")):
        for name, tensor in load_file(moved / "final" / f"{part}model.safetensors").items():
            assert torch.equal(tensor, read[f"{role}.{name}"])
    state, steps = alone.placement.trained(Role.ACTOR).training_state(), set()  # type: ignore[union-attr]
    for name, tensors in state.tensors.items():
        assert set(tensors) == {"master", "exp_avg", "exp_avg_sq"}
        steps.add(float(state.scalars[name]["step"]))
    assert len(steps) == 1
    counts = [json.loads((moved / f"kept-{rank}.json").read_text()) for rank in (0, 1)]
    assert sum(kept for kept, _ in counts) == total, "on the way everything is kept once"
    assert all(kept <= live for kept, live in counts), "and each rank keeps of its own parts only"
