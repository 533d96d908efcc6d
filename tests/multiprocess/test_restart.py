"""A run that is stopped goes on by itself, and nothing of it is lost; on hosts with a disk each too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(500)]


def test_a_killed_run_goes_on_by_itself_and_hosts_with_a_disk_each_have_all_they_need(run: Callable[..., Path]) -> None:
    folder = run("restart.py", 2, {}, "job", limit_s=400, restarts=1)
    first, second = (json.loads((folder / f"report-{rank}.json").read_text()) for rank in (0, 1))
    for report in (first, second):
        assert report["attempt"] == "1", "the launcher has started the job again"
        assert report["same"], "the weights are those of the run that was never stopped"
        assert report["same on its own disk"]
        assert report["left"] == ["checkpoint-3"], "each disk has the newest and no older one"
        assert "checkpoint-4 could not be saved: rank 1 on host" in report["unwritten"]
        assert "checkpoint-3 is as it was" in report["unwritten"]
        assert report["kept"] == ["checkpoint-3"]
        assert len(report["had"]) == 1, "under the plan of the checkpoint no host needs another's parts"
        assert report["same in the other's place"] and len(report["has"]) == 2, "under another plan it gets them"
    assert "training_state/__0_0.distcp" in first["written"] and "model.safetensors" in first["written"]
    assert "training_state/__1_0.distcp" in second["written"] and "value_model/model.safetensors" in second["written"]
