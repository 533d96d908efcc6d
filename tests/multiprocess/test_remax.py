"""Another algorithm than PPO on several processes, with calls on different meshes (`tests/runtime`: on one)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from remax import GRAPH, GREEDY, learned, place, whole_run
from test_plans import whole

from trl_realloc import Cluster, ExecutionPlan
from trl_realloc.plan.presets import resolve_plan


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

PLAN: dict[str, Any] = {
    "cluster": {"nodes": 1, "devices_per_node": 4},
    "calls": {
        "actor.generate": {"mesh": "0-1", "engine": "transformers", "dp": 2},
        GREEDY: {"mesh": "2-3", "engine": "transformers", "dp": 2},
        "reward.forward": {"mesh": "2-3", "engine": "zero", "dp": 2},
        "reward.forward.greedy": whole("1"),
        "actor.train": {"mesh": "0-3", "engine": "zero", "dp": 4},
    },
}


def test_remax_on_four_processes_is_that_on_one_and_goes_on_after_a_failure(run: Callable[..., Path]) -> None:
    folder = run("remax_rank.py", 4, {"plan": PLAN}, "remax", limit_s=200)
    alone = resolve_plan("flatten", Cluster(1, 1), generation_engine="transformers", zero_stage=0)
    assignments = {name: alone[name.removesuffix(".greedy")] for name in GRAPH.order}
    executor = place(ExecutionPlan(alone.cluster, assignments, GRAPH), 0)
    expected = whole_run(executor)
    for name in ("whole", "driven"):
        columns, weights = torch.load(folder / name, weights_only=False)
        for column in ("responses", "greedy_responses"):
            assert torch.equal(columns[column].values, expected.ragged(column).values), (name, column)
        for column in ("scores", "baselines"):
            assert torch.equal(columns[column], expected.tensor(column)), (name, column)
        for parameter, tensor in learned(executor).items():
            assert torch.allclose(weights[parameter], tensor, atol=1e-6), (name, parameter)
    said = [(folder / f"said-{rank}.txt").read_text().splitlines() for rank in range(4)]
    assert len({line for line, _ in said}) == 1, "every rank is told the same"
    line, metrics = said[0]
    assert line.startswith("True ") and "no reward today" in line
    assert line.count("reward.forward failed") == 1 and "reward.forward.greedy failed" in line
    assert len({metrics for _, metrics in said}) == 1 and "objective/scores" in json.loads(metrics)
