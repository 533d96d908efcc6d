"""`benchmarks/scale.py` counts by the runtime's own code and replaces some of its functions by their names."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_the_messages_and_groups_of_a_small_job_are_counted() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "scale.py"
    spec = importlib.util.spec_from_file_location("scale", path)
    assert spec is not None and spec.loader is not None
    scale = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scale)
    row = scale.row_of(8)
    assert row["devices"] == 8 and row["groups_per_rank"] == row["groups_per_rank_max"] == 7
    assert 0 < row["bytes_max_but_leaders"] < row["bytes_per_rank_max"]
    assert row["messages_max_but_leaders"] <= row["messages_per_rank_max"]
