"""A run with a staleness, with a vLLM engine: no token is too old, none is lost, and a resumed run goes on with those
that were under way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launched_job import Job, slowness
from ranks import RankServers


pytestmark = [pytest.mark.multiprocess, pytest.mark.vllm, pytest.mark.timeout(1200)]

VERSIONS, UPDATES, SAVED = 2, 8, 4
CONFIG: dict[str, Any] = {"generation_engine": "vllm", "per_device_train_batch_size": 4, "response_length": 96}
CONFIG |= {"max_steps": UPDATES, "max_staleness": VERSIONS, "vllm_importance_sampling_correction": True}
CONFIG |= {"save_strategy": "no", "eval_strategy": "no"}
RUNS: list[dict[str, Any]] = [
    {"name": "whole", "evaluates": [2], "saves": [SAVED]},
    {"name": "resumed", "resume": f"run/checkpoint-{SAVED}"},
    {"name": "changed", "resume": f"run/checkpoint-{SAVED}", "sets": {"kl_coef": 0.0, "cliprange": 0.0}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, servers: RankServers) -> Path:
    folder = tmp_path_factory.mktemp("stale")
    job = Job(folder, "stale.py", 2, {"config": CONFIG, "plan": "separate", "runs": RUNS}, None, servers=servers)
    try:
        assert job.wait(240 * slowness()) == 0, job.problem()
    finally:
        job.kill()
        job.log.close()
    return folder


def notes(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{name}-0.json").read_text())
    return content


@pytest.mark.parametrize(("name", "first"), [("whole", 0), ("resumed", SAVED)])
def test_no_token_is_older_than_the_bound(folder: Path, name: str, first: int) -> None:
    run = notes(folder, name)
    assert [update["step"] for update in run["samples"]] == [*range(first, UPDATES)]
    ages = []
    for update in run["samples"]:
        for response, versions in zip(update["responses"], update["policy_versions"], strict=True):
            assert len(response) == len(versions)
            assert versions == sorted(versions)
            ages += [update["step"] - version for version in versions]
    assert min(ages) >= 0 and 0 < max(ages) <= VERSIONS
    logged = [line for line in run["log"] if "staleness/mean" in line]
    assert all(0 <= line["staleness/mean"] <= line["staleness/oldest"] <= VERSIONS for line in logged)
    assert logged[-1]["staleness/in_flight_s"] > 0


def test_generation_goes_on_while_the_other_rank_trains(folder: Path) -> None:
    updates = notes(folder, "whole")["samples"]
    generated = [(start, end) for update in updates for call, _, start, end in update["spans"] if "generate" in call]
    trained = [(start, end) for update in updates for call, _, start, end in update["spans"] if "train" in call]
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in generated for b in trained)
    assert both > 0


def test_the_proximal_policy_is_the_behaviour_policy_for_tokens_of_its_own_version(folder: Path) -> None:
    """In float32 the trainer's log-probabilities of a token are the engine's, if the same parameters drew it and all
    tokens before it; older parameters give others."""
    same, other = [], []
    for update in notes(folder, "whole")["samples"]:
        columns = ("policy_versions", "logprobs", "proximal_logprobs")
        for versions, behaviour, proximal in zip(*(update[name] for name in columns), strict=True):
            apart = (torch.tensor(behaviour) - torch.tensor(proximal)).abs()
            is_current = torch.tensor(versions) == update["step"]
            if is_current.all():
                same.append(float(apart.max()))
            elif not is_current.any():
                other.append(float(apart.max()))
    assert same and other
    assert max(same) < 1e-4 < max(other)


def test_a_resumed_run_goes_on_with_the_samples_that_were_under_way(folder: Path) -> None:
    saved = torch.load(folder / "run" / f"checkpoint-{SAVED}" / "samples_under_way.pt", weights_only=True)
    resumed = {update["step"]: update for update in notes(folder, "resumed")["samples"]}
    kept = 0
    for step, columns in saved["samples"].items():
        responses = columns["token_ids"].split(columns["lengths"].tolist())
        for index, tokens in zip(columns["index"].tolist(), responses, strict=True):
            again = resumed[step]["responses"][index]
            assert again[: len(tokens)] == tokens.tolist()
            kept += len(tokens)
    assert kept > 0
    whole = {update["step"]: update for update in notes(folder, "whole")["samples"]}
    for step, update in resumed.items():
        assert update["prompts"] == whole[step]["prompts"]


def test_an_evaluation_between_two_updates_is_of_the_trained_policy(folder: Path) -> None:
    lines = [line for line in notes(folder, "whole")["log"] if "eval_objective/kl" in line]
    assert [line["step"] for line in lines] == [2]


def test_settings_that_a_callback_changes_on_one_process_hold_on_all(folder: Path) -> None:
    def logged(run: str, name: str) -> list[float]:
        return [line[name] for line in notes(folder, run)["log"] if name in line and line["step"] > SAVED]

    assert logged("changed", "objective/non_score_reward") == [0.0] * (UPDATES - SAVED)
    assert all(logged("resumed", "objective/non_score_reward"))
    assert min(logged("changed", "policy/clipfrac_avg")) > 2 * max(logged("resumed", "policy/clipfrac_avg"))
