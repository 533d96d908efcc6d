"""`benchmarks/papers.py` with a settings file of one's own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import yaml


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_settings_may_leave_out_what_a_paper_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = BENCHMARKS / "papers.py"
    spec = importlib.util.spec_from_file_location("papers", path)
    assert spec is not None and spec.loader is not None
    papers = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "papers", papers)  # where its dataclass looks for its module
    spec.loader.exec_module(papers)
    settings = yaml.safe_load((BENCHMARKS / "papers" / "real_v1.yaml").read_text())
    for key in ("heuristic_shares", "reallocation_share", "optimizer_bytes"):
        del settings[key]
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(settings))
    columns = "actor_b,critic_b,gpus,prompt,gen,batch,heuristic_s,real_s"
    (tmp_path / settings["table"]).write_text(f"{columns}\n7,7,8,128,896,128,60,40\n")
    ((own, row),) = papers.rows_of(tmp_path / "own.yaml")
    rows = list(papers.compare(own, row, 0.1))
    assert {line["plan"]: line["published"] for line in rows} == {"heuristic": 60, "searched": 40, "gain": 1.5}
    assert all(line["estimated"] > 0 for line in rows)
    assert papers.summary(rows)["gain, published"] == 1.5
