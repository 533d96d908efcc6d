"""When a run looks for another plan: rank 0 decides, and all ranks meet in the same broadcast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trl_realloc.profiling import replanning
from trl_realloc.profiling.replanning import Replanner


@pytest.mark.parametrize("estimate", [1.0, 5.0])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_takes_part_in_the_decision_whatever_its_own_estimate(
    rank: int, estimate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs of two ranks may differ, and with them their estimates: a rank that decided by its own would leave the
    others waiting."""
    broadcasts: list[Any] = []

    def from_first_rank(value: Any, timeout_s: float) -> Any:
        broadcasts.append(value)
        return 5.0, None

    better = SimpleNamespace(best=SimpleNamespace(seconds=4.7))  # by less than estimates are good for
    monkeypatch.setattr(replanning, "from_first_rank", from_first_rank)
    monkeypatch.setattr(replanning, "estimate_at_lengths", lambda *_: SimpleNamespace(seconds=estimate))
    monkeypatch.setattr(replanning, "rates_of", lambda profile: SimpleNamespace(error=0.08))
    workload = SimpleNamespace(of_lengths=lambda lengths: None)
    models = SimpleNamespace(specs={})
    options = SimpleNamespace(collective_timeout_s=1.0)
    job = SimpleNamespace(
        rank=rank, engine="vllm", models=models, workload=workload, options=options, choose=lambda *_, **__: better
    )
    planned = SimpleNamespace(priced=SimpleNamespace(seconds=1.0), profile=object(), decision=object())
    observer = SimpleNamespace(job_plan=planned)
    watcher = Replanner(job, observer, threshold=0.1)  # type: ignore[arg-type]
    watcher.note([3, 4])
    assert watcher.better(updates_left=10, move_seconds=0.0) is None
    assert len(broadcasts) == 1
    assert observer.job_plan is planned
