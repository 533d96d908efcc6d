"""Real runs with a staleness, with and without streams: scoring samples ahead as they end gives the same numbers.

The learning rate is 0, so that all policies are equal, and what is drawn does not depend on when the engine takes new
parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launched_job import Job, slowness
from ranks import RankServers

from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import separate
from trl_realloc.plan.staleness import Staleness


pytestmark = [pytest.mark.multiprocess, pytest.mark.vllm, pytest.mark.timeout(1200)]

VERSIONS, UPDATES = 2, 5
CONFIG: dict[str, Any] = {
    "generation_engine": "vllm",
    "per_device_train_batch_size": 8,
    "response_length": 96,
    "max_steps": UPDATES,
    "max_staleness": VERSIONS,
    "vllm_importance_sampling_correction": True,
    "learning_rate": 0.0,
    "kl_coef": 0.1,
    "save_strategy": "no",
    "eval_strategy": "no",
}
OF_THE_CLOCK = ("staleness/", "time/", "realloc/", "tokens/s", "eps")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, servers: RankServers) -> dict[bool, dict[str, Any]]:
    """By whether the plan streams, what rank 0 has noted."""
    plan = separate(Cluster(1, 2)).to_dict()
    plan["staleness"] = Staleness(VERSIONS).to_dict()
    noted: dict[bool, dict[str, Any]] = {}
    for streams in (False, True):
        folder = tmp_path_factory.mktemp("stale")
        options = {"config": CONFIG, "plan": {**plan, "streams": streams}, "runs": [{"name": "run"}]}
        job = Job(folder, "stale.py", 2, options, None, servers=servers)
        try:
            assert job.wait(240 * slowness()) == 0, job.problem()
        finally:
            job.kill()
            job.log.close()
        noted[streams] = json.loads((Path(folder) / "run-0.json").read_text())
    return noted


def spans_of(update: dict[str, Any], call: str) -> list[tuple[float, float]]:
    return [(start, end) for name, _, start, end in update["spans"] if name == call]


def test_samples_statistics_and_losses_are_the_same(runs: dict[bool, dict[str, Any]]) -> None:
    for whole, streamed in zip(runs[False]["samples"], runs[True]["samples"], strict=True):
        assert whole["responses"] == streamed["responses"]
        for row, other in zip(whole["logprobs"], streamed["logprobs"], strict=True):
            assert row == pytest.approx(other, abs=1e-4)
    logs = [[line for line in runs[streams]["log"] if "objective/kl" in line] for streams in (False, True)]
    assert len(logs[0]) == len(logs[1]) == UPDATES
    for line, other in zip(*logs, strict=True):
        expected = {name: value for name, value in line.items() if not name.startswith(OF_THE_CLOCK)}
        assert {"loss/policy_avg", "loss/value_avg", "objective/scores"} <= expected.keys()
        for name, value in expected.items():
            assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_samples_are_scored_in_parts_and_no_token_is_too_old(runs: dict[bool, dict[str, Any]]) -> None:
    parts = {streams: [len(spans_of(u, "reference.forward")) for u in runs[streams]["samples"]] for streams in runs}
    assert set(parts[False]) == {1}
    assert max(parts[True]) > 1
    for update in runs[True]["samples"]:
        ages = [update["step"] - version for versions in update["policy_versions"] for version in versions]
        assert min(ages) >= 0 and max(ages) <= VERSIONS
