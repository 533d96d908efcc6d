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
        assert report["handed"], "a host that has lost a file gets it from another"
    assert "optimizer.pt" in first["written"] and "value_model/optimizer.pt" in second["written"]
