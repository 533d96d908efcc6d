"""Two roles that train in one fused pipeline learn what they would learn one after the other."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import RankServers
from safetensors.torch import load_file
from test_failure import GRACE_S
from test_plans import CALLS, plan, split
from test_training import STEPS, close, log


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(500)]

TWO: dict[str, dict[str, Any]] = {
    "pp2 + pp2": {"pp": [2, 2]},
    "unequal micro-batches": {"pp": [2, 2], "tokens": [25, 60]},
    "messages without tags": {"pp": [2, 2], "untagged": True, "deterministic": True},
    "any order": {"pp": [2, 2], "tokens": [20, 20], "random": True},
    "tied embeddings": {"pp": [2, 2], "policy": {"config": {"tie_word_embeddings": True}}},
    "a first stage that is frozen": {
        "pp": [2, 2],
        "policy": {"frozen": ["model.embed_tokens", "model.layers.0", "model.layers.1"]},
        "value": {"lora": {"layers_to_transform": [3]}},
    },
    "a mixture with its auxiliary loss": {
        "pp": [2, 2],
        "policy": {
            "family": "qwen3_moe",
            "auxiliary": 0.5,
            "config": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        },
    },
    "a step of one of them refused": {"pp": [2, 2], "refused": True},
    "models of different sizes, recomputed activations": {
        "pp": [2, 2],
        "checkpointing": True,
        "value": {"config": {"num_hidden_layers": 3, "hidden_size": 16}},
    },
}
FOUR: dict[str, dict[str, Any]] = {
    "pp4 + pp2": {"pp": [4, 2]},
    "pp2 + pp4": {"pp": [2, 4], "shard": True, "untagged": True},
    "pp4 + pp4": {"pp": [4, 4], "tokens": [20, 30], "untagged": True, "optimizer": "adagrad"},
    "two pipelines of each": {"pp": [2, 2], "shard": True},
    "tp2 x pp2": {"tp": 2, "pp": [2, 2], "policy": {"config": {"tie_word_embeddings": True}}},
    "a copy without samples": {"pp": [4, 2], "value": {"idle": True}},
    "a line without samples": {"pp": [2, 2], "policy": {"idle": True}, "value": {"idle": True}},
    "any order": {"pp": [4, 2], "tokens": [20, 20], "random": True},
    "any order without tags": {"pp": [2, 4], "tokens": [20, 20], "random": True, "untagged": True},
}
IN_16_BITS: dict[str, dict[str, Any]] = {
    f"in {kind}": {"pp": [2, 2], "kind": kind} for kind in ("bfloat16", "autocast")
}


@pytest.mark.parametrize(("processes", "cases"), [(2, {**TWO, **IN_16_BITS}), (4, FOUR)])
def test_fused_roles_train_as_whole_models_do(processes: int, cases: dict[str, Any], run: Callable[..., Path]) -> None:
    folder = run("fused.py", processes, {"cases": cases}, "ranks", limit_s=200)
    for name in cases:
        gaps = json.loads((folder / f"{name}.json").read_text())
        for what, gap in gaps.items():
            if name not in IN_16_BITS:
                assert gap < 2e-5, (name, what, gap)
            elif not what.startswith("rounding"):  # how 16 bits round depends on the CPU's kernels
                assert gap < max(5e-2, 2 * gaps[f"rounding {what}"]), (name, what, gaps)


FUSED = {"fused": ["actor.train", "critic.train"]}
PLANS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "apart": plan(2, changed={name: split("0-1", pp=2) for name in CALLS}),
        "fused": plan(2, changed={name: split("0-1", pp=2) for name in CALLS}) | FUSED,
        "fused, the actor reversed": plan(
            2, changed={name: split("0-1", pp=2, micro_batch_tokens=40) for name in CALLS}
        )
        | {"fused": ["critic.train", "actor.train"]},
    },
    4: {
        "copies of the critic's pipeline, which scores elsewhere": plan(
            4,
            changed={
                "critic.forward": split("2-3", tp=2),
                "actor.train": split("0-3", dp=2, pp=2, zero_stage=1),
                "critic.train": split("0-3", dp=2, pp=2, micro_batch_tokens=30),
            },
        )
        | FUSED,
        "tensor groups": plan(4, changed={name: split("0-3", tp=2, pp=2) for name in CALLS}) | FUSED,
    },
}


def test_a_plan_that_fuses_trains_as_the_same_plan_does_without(run: Callable[..., Path]) -> None:
    """Two updates of an iteration; the critic also scores in its reversed pipeline, and is moved to other layouts."""
    results = {}
    for devices, plans in PLANS.items():
        folder = run("replay.py", devices, {"samples": 12, "mini_batches": 2, "plans": plans}, f"on-{devices}")
        for name in plans:
            weights = {
                n: t
                for role in ("policy", "critic")
                for n, t in load_file(folder / f"{name}.{role}.safetensors").items()
            }
            results[name] = json.loads((folder / f"{name}.json").read_text()), weights
    metrics, parameters = results.pop("apart")
    for name, (found, weights) in results.items():
        assert found == pytest.approx(metrics, rel=2e-5, abs=2e-6), name
        assert weights.keys() == parameters.keys()
        for key, tensor in parameters.items():
            assert (weights[key] - tensor).abs().max() < 2e-5, (name, key)


def test_a_fused_run_goes_on_without_fusing_and_back(run: Callable[..., Path]) -> None:
    """Parts of the training state lie on other devices under the other plan."""
    fused, apart = PLANS[2]["fused"], PLANS[2]["apart"]
    first = run("train.py", 2, {**STEPS, "plan": fused, "save_steps": 1}, "fused")
    options = {**STEPS, "plan": apart, "save_steps": 2, "resume": str(first / "checkpoint-1")}
    second = run("train.py", 2, options, "apart")
    options = {**STEPS, "plan": fused, "save_steps": 4, "resume": str(second / "checkpoint-2")}
    third = run("train.py", 2, options, "fused again")
    close(log(second), log(first))
    close(log(third), log(first))


# two devices train in two stages each; the third generates and scores
ASIDE = plan(
    3,
    changed={name: split("0-1", pp=2) for name in ("critic.forward", "actor.train", "critic.train")},
    actor="2",
    reference="2",
    reward="2",
)


def test_scoring_in_the_reversed_pipeline_can_stream_before_fused_training(run: Callable[..., Path]) -> None:
    runs = {"whole": ASIDE, "fused": ASIDE | FUSED, "streamed": ASIDE | FUSED | {"streams": True}}
    logs = {name: log(run("train.py", 3, {**STEPS, "plan": each}, name)) for name, each in runs.items()}
    close(logs["fused"], logs["whole"])
    close(logs["streamed"], logs["whole"])


@pytest.mark.vllm
def test_fused_training_beside_a_staleness_trains_every_batch(run: Callable[..., Path]) -> None:
    engine = {"actor.generate": {"mesh": "2", "engine": "vllm", "dp": 1}}
    ahead = {**ASIDE, "calls": ASIDE["calls"] | engine, "staleness": 1} | FUSED
    options = {**STEPS, "plan": ahead, "generation_engine": "vllm", "max_staleness": 1}
    rows = log(run("train.py", 3, {**options, "vllm_importance_sampling_correction": True}, "ahead"))
    updates = [row for row in rows if "staleness/oldest" in row]
    assert len(updates) == len([row for row in rows if "objective/scores" in row]) > 1
    assert max(row["staleness/oldest"] for row in updates) <= 1


def test_a_reward_that_fails_before_fused_training_leaves_the_roles_as_they_were(
    start: Callable[..., Any], servers: RankServers
) -> None:
    # the first rank of a pipeline calls the reward functions
    job = start("train.py", 2, {"fails_on_rank": 0, "plan": PLANS[2]["fused"]}, servers=servers, grace_s=GRACE_S)
    assert job.wait(90) != 0
    sentence = f"reward.forward failed on rank 0 (host {socket.gethostname()}): reward function '<lambda>' returned nan"
    assert job.text().count(f"JobFailed: {sentence}") == 2, job.text()[-3000:]
    for rank in (0, 1):
        assert json.loads((job.folder / f"failed-{rank}.json").read_text()) == {"unchanged": True}
