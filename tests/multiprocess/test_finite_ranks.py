"""What is not finite on one rank is refused on all, under every engine (`trainer/test_finite.py`: one process)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from finite import SAMPLE
from test_plans import CALLS, plan, split


pytestmark = [pytest.mark.multiprocess, pytest.mark.deepspeed, pytest.mark.timeout(600)]

PLANS = {
    **{f"zero {stage}": plan(2, stage=stage) for stage in (0, 1, 2, 3)},
    "tensor": plan(2, changed={name: split("0-1", tp=2) for name in CALLS}),
    "pipeline": plan(2, changed={name: split("0-1", pp=2) for name in CALLS}),
    "sharded": plan(2, changed={name: split("0-1", dp=2, zero_stage=1) for name in CALLS if name.endswith("train")}),
}


def test_a_loss_that_overflows_on_one_rank_is_left_out_or_refused_on_all(run: Callable[..., Path]) -> None:
    """Of two optimizer steps of each role the first is left out on all ranks and the second is taken; without the
    setting, the first ends the update on all ranks, with the sample named and no weight moved."""
    folder = run("finite.py", 2, {"plans": PLANS}, "job", limit_s=500)
    for name in PLANS:
        for rank in (0, 1):
            row = json.loads((folder / f"{name}-{rank}.json").read_text())
            assert (row["skipped_updates/policy"], row["skipped_updates/value"]) == (1.0, 1.0), name
            assert row["finite"] and row["kept"], name
            assert rank or row["moved"] == ["critic", "policy"], name
            assert row["versions"] == [1, 1], name
            for call, said in row["said"].items():
                assert f"optimizer step 1 of {call} in update 2 was not taken" in said, name
                assert f"loss of sample {SAMPLE} of the batch is not finite (prompt 'w" in said, name
            assert len(row["said"]) == 2, name
