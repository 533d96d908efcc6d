"""ZeRO-3 on every mesh: parts of the job, one process, models that arrive partitioned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


pytestmark = [pytest.mark.multiprocess, pytest.mark.deepspeed, pytest.mark.timeout(900)]


def test_zero_3_on_a_part_of_the_job_trains_saves_resumes_and_is_moved_to(run: Callable[..., Path]) -> None:
    """The actor trains and generates on the last two of four ranks: every run is that of replicas on all four."""
    folder = run("zero.py", 4, {}, "four", limit_s=600)
    found = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    expected = found.pop("replicas")
    assert len(expected["evals"]) == 3 and found.keys() == {"apart", "separate", "resumed", "moved"}
    for name, run_of in found.items():
        assert run_of["best"] == expected["best"], name
        for mine, other in zip(run_of["updates"], expected["updates"], strict=True):
            learned = {key: value for key, value in mine.items() if not key.startswith("realloc/")}
            assert learned == pytest.approx(other, rel=1e-4, abs=1e-4), name
        assert run_of["evals"] == pytest.approx(expected["evals"], rel=1e-4, abs=1e-4), name
        for parameter, sums in expected["weights"].items():
            assert run_of["weights"][parameter] == pytest.approx(sums, rel=1e-3, abs=1e-3), (name, parameter)
