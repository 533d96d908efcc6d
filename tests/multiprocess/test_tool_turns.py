"""Completions that call tools draw the same tokens on one process and on two, in rounds and each by itself. Ahead of
their training, a resumed run goes on with the turns that were under way."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from trl_realloc.algorithms.rollout import Ragged
from trl_realloc.engines.generation.vllm_support import is_vllm_available


pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed"),
]
AT_ONCE: dict[str, Any] = {"tool_workers": 8, "max_steps": 2, "num_generations": 4}
CASES: dict[str, Any] = {
    "an engine for each rank": {"plan": "flatten", **AT_ONCE},
    "one engine": {"plan": "separate", **AT_ONCE},
}


def test_tokens_depend_on_the_completion_and_the_turn_alone(run: Callable[..., Path]) -> None:
    of_ranks: dict[str, Any] = {}
    for processes, cases in (
        (1, {"one process": {"plan": "flatten", **AT_ONCE, "gradient_accumulation_steps": 4}}),
        (2, CASES),
    ):
        folder = run("tool_turns.py", processes, cases, f"on_{processes}", limit_s=120)
        of_ranks |= {name: json.loads((folder / f"{name}.json").read_text()) for name in cases}
    rounds = {name: result["rounds"] for name, result in of_ranks.items()}
    assert rounds["one process"] is rounds["an engine for each rank"] is None
    assert rounds["one engine"].startswith("the plan does not give every rank a vLLM engine")

    def by_sample(result: Any) -> list[Any]:
        """Token ids, mask and messages of each sample of each generation, in the order of all ranks."""
        columns = zip(*result["drawn"], strict=True)  # generations, ranks, columns
        return [[*zip(*map(chain.from_iterable, zip(*ranks, strict=True)), strict=True)] for ranks in columns]

    expected = by_sample(of_ranks["one process"])
    assert len(expected) == 2 and max(len(sample[2]) for sample in expected[0]) > 3, "some take several turns"
    for name in CASES:
        assert by_sample(of_ranks[name]) == expected, name
        assert of_ranks[name]["losses"] == pytest.approx(of_ranks["one process"]["losses"], rel=1e-4, abs=1e-5)


# a policy that is not trained, so that a resumed run draws what a whole one draws, and both what the trainer computes
AHEAD: dict[str, Any] = {"plan": "separate", **AT_ONCE, "max_staleness": 1, "vllm_importance_sampling_correction": True}
AHEAD |= {"learning_rate": 0.0, "max_steps": 4, "save_steps": 2, "save_strategy": "steps"}
AHEAD_CASES: dict[str, Any] = {
    "whole": {**AHEAD, "eval_strategy": "steps", "eval_steps": 2},
    "resumed": {**AHEAD, "resume": "whole/checkpoint-2"},
    "a rollout function": {**AHEAD, "rollout": True, "max_steps": 3},
}


def test_turns_are_generated_ahead_and_a_resumed_run_goes_on_with_them(run: Callable[..., Path]) -> None:
    folder = run("tool_turns.py", 2, AHEAD_CASES, "ahead", limit_s=150)
    made = {name: json.loads((folder / f"{name}.json").read_text()) for name in AHEAD_CASES}
    logs = {name: [row for row in result["log"] if "loss" in row] for name, result in made.items()}
    for name, log in logs.items():
        assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in log), name
        assert [row["staleness/oldest"] for row in log] == [0] + [1] * (len(log) - 1), name
    resumed, whole = made["resumed"], made["whole"]
    assert resumed["drawn"] == [rank[-2:] for rank in whole["drawn"]]
    assert max(len(messages) for rank in whole["drawn"] for drawn in rank for messages in drawn[2]) > 3

    saved = torch.load(folder / "whole" / "checkpoint-2" / "samples_under_way.pt", weights_only=True)
    texts = [Ragged(of["results"], of["result_lengths"]).rows() for of in saved["samples"].values()]
    kept = sum(len(json.loads(bytes(row.tolist()))) for rows in texts for row in rows if len(row))
    samples = sum(len(rank[-1][0]) for rank in whole["drawn"])
    calls = sum(row["tools/call_frequency"] * samples for row in logs["resumed"][-2:])
    assert kept > 0 and resumed["called"] == round(calls) - kept, "no call that had returned was made again"
    assert len(made["a rollout function"]["drawn"][0]) == 3
