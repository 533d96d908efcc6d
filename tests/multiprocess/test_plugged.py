"""Planned generation under TRL's own training on two processes, whose ranks take different numbers of tool turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import RankServers
from test_failure import GRACE_S
from test_zero import LAUNCHED

from trl_realloc.engines.generation.vllm_support import is_vllm_available


pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed"),
]


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def check_trained(found: list[dict[str, Any]], caller: int) -> None:
    """Two steps, in each of which the caller took a second turn, on samples of the policy that is trained."""
    for rank, of_rank in enumerate(found):
        assert of_rank["turns"] == ([4, 1] if rank == caller else [4]) * 2
    steps = [row for row in found[0]["logs"] if "reward" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["tools/call_frequency"] == 1 / 8


def test_a_rank_without_an_engine_takes_more_turns_than_the_one_that_serves_it(run: Callable[..., Path]) -> None:
    options = {"plan": {"mesh": 1, "engine": "vllm", "dp": 1}, "caller": 0, "use_cpu": True}
    found = results(run("plugged.py", 2, options, "ddp"))
    assert [of_rank["engine"] for of_rank in found] == [False, True]
    check_trained(found, caller=0)


@pytest.mark.deepspeed
def test_under_zero_3_every_engine_gets_the_gathered_weights(run: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text(LAUNCHED.replace("mixed_precision: bf16", "mixed_precision: 'no'"))
    options = {"plan": None, "caller": 1, "use_cpu": False}
    found = results(run("plugged.py", 2, options, "zero3", config=tmp_path / "zero3.yaml"))
    assert [of_rank["engine"] for of_rank in found] == [True, True]
    check_trained(found, caller=1)


def test_a_dead_engine_ends_the_job_on_all_ranks_with_its_cause(
    start: Callable[..., Any], servers: RankServers
) -> None:
    options = {"plan": None, "caller": 0, "use_cpu": True, "killed": 1}
    job = start("plugged.py", 2, options, servers=servers, grace_s=GRACE_S)
    assert job.wait(400) != 0
    for of_rank in results(job.folder):
        assert "engine 1 (rank 1)" in of_rank["failure"] and "SIGKILL" in of_rank["failure"]
    assert job.gone_within(20)
