"""Runs that correct for what the policy has not drawn itself: their plans, metrics, evaluation and checkpoints."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import grpo_graph, ppo_graph
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.fitting import plan_of_run
from trl_realloc.plan.presets import flatten


ON: dict[str, Any] = {"vllm_importance_sampling_correction": True}
ONE = Cluster(1, 1)
MEASURED = {  # of the first mini-batch, whether there is a correction or not
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
    "sampling/token_mult_prob_error",
}
SAMPLING = {
    "sampling/importance_sampling_ratio/clipfrac",
    "sampling/effective_sample_size",
    "sampling/kl_k1",
    "sampling/kl_k3",
}


def flat(*, proximal: bool) -> dict[str, Any]:
    return flatten(ONE, generation_engine="transformers", graph=ppo_graph(proximal=proximal)).to_dict()


def test_rollouts_of_the_policy_itself_are_trained_on_as_without_a_correction(tmp_path: Path) -> None:
    plain, corrected = (tiny.trainer(tmp_path / str(len(on)), **on) for on in ({}, ON))
    for made in (plain, corrected):
        made.train()
    assert "actor.forward" not in plain.plan.order
    for row, expected in zip(tiny.updates(corrected), tiny.updates(plain), strict=True):
        assert row.keys() - expected.keys() == SAMPLING and row.keys() > MEASURED
        assert 1 <= expected["sampling/token_mult_prob_error"] < 1 + 1e-5
        assert row["sampling/effective_sample_size"] == pytest.approx(1, abs=1e-6)
        assert row["sampling/sampling_logp_difference/max"] < 1e-5
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-4)
    weights = tiny.weights(plain)
    for name, tensor in tiny.weights(corrected).items():
        assert (tensor - weights[name]).abs().max() < 1e-3, name


def test_a_run_without_a_correction_computes_nothing_for_it(tmp_path: Path) -> None:
    """Bit for bit, whether the setting is left out or false."""
    runs = []
    for name, on in (("out", {}), ("false", {"vllm_importance_sampling_correction": False, "max_staleness": 0})):
        made = tiny.trained(tmp_path / name, **on)
        assert made.plan.order == flatten(ONE).order and not made.placement.engines.get("actor.forward")
        runs.append((tiny.updates(made), tiny.weights(made)))
    assert runs[0][0] == runs[1][0] and not SAMPLING & runs[0][0][0].keys()
    assert all(torch.equal(runs[0][1][name], tensor) for name, tensor in runs[1][1].items())


def test_an_older_policys_rollouts_are_evaluated_saved_and_resumed(tmp_path: Path) -> None:
    changes = {**ON, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "num_mini_batches": 2}
    changes |= {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.1}

    def trainer() -> Any:
        made = tiny.trainer(tmp_path, given={"eval_dataset": tiny.prompts(8)}, **changes)
        run = made.executor.run

        def older(*args: Any, **kwargs: Any) -> Any:
            engine = made.placement.generators["actor.generate"]
            engine.whole_model = lambda: contextlib.nullcontext(tiny.policy(seed=9))  # another policy draws
            return run(*args, **kwargs)

        made.executor.run = older
        return made

    whole = trainer()
    whole.train()
    evaluated = whole.evaluate()
    assert evaluated["eval_objective/scores"] <= 0 and 0 < evaluated["eval_sampling/effective_sample_size"] < 1
    for row in tiny.updates(whole):
        assert row["sampling/kl_k3"] > 1e-3 and row["sampling/importance_sampling_ratio/clipfrac"] > 0
        assert row["sampling/importance_sampling_ratio/max"] == pytest.approx(1.1)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    assert tiny.updates(resumed) == tiny.updates(whole)
    kept, made = tiny.weights(whole), tiny.weights(resumed)
    assert all(torch.equal(kept[name], made[name]) for name in kept)


@pytest.mark.parametrize("has", [False, True])
@pytest.mark.parametrize("needs", [False, True])
def test_a_plan_serves_runs_with_and_without_a_correction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has: bool, needs: bool
) -> None:
    made = tiny.trainer(tmp_path, plan=flat(proximal=has), **(ON if needs else {}))
    assert ("actor.forward" in made.plan.order) == needs
    told = capsys.readouterr().err
    assert ("the plan has no actor.forward, which vllm_importance_sampling_correction needs" in told) == (
        needs and not has
    )
    assert ("the plan's actor.forward is left out" in told) == (has and not needs)


def test_a_plan_of_another_algorithm_is_refused_with_the_runs_calls(tmp_path: Path) -> None:
    plan = flatten(ONE, generation_engine="transformers")
    graph = grpo_graph()
    other = plan_of_run(plan, graph)
    with pytest.raises(PlanError, match="this trainer runs PPO, with the calls .*actor.forward, actor.train"):
        tiny.trainer(tmp_path, plan=other, **ON)


def test_staleness_without_a_correction_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.trainer(tmp_path, max_staleness=2, vllm_importance_sampling_correction=False)
    assert caplog.text.count("vllm_importance_sampling_correction is false at max_staleness 2") == 1


@pytest.mark.parametrize("plan", ["auto", "separate"])
def test_a_staleness_needs_more_than_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: str) -> None:
    """The preset `separate` is `flatten` there, so it is no remedy."""
    tiny.trainer(tmp_path, plan=plan, max_staleness=1, **ON)
    told = capsys.readouterr().err
    assert "max_staleness 1 has no effect on one process" in told
    assert "the preset separate generates ahead" not in told


def test_a_preset_that_one_process_cannot_have_is_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.trainer(tmp_path, plan="interleave")
    assert "plan: interleave needs two processes; this run has one, which runs every call (flatten)" in (
        capsys.readouterr().err
    )
