"""Completions that call tools draw the same tokens on one process and on two, in rounds and each by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

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
