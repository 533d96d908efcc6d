"""Resuming: a run that was stopped and resumed is the run that was not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig

from trl_realloc.runtime.parameters.parameter_sinks import STALE
from trl_realloc.trainer.checkpoint import CheckpointError


KINDS: dict[str, dict[str, Any]] = {
    "in the middle of a pass": {"rows": 64},
    "at the end of a pass": {"rows": 24},
    "lora": {"rows": 64, "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
}


@pytest.mark.oldest
@pytest.mark.parametrize("kind", KINDS)
def test_the_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, kind: str) -> None:
    options = dict(KINDS[kind])
    given = {"train_dataset": tiny.prompts(options.pop("rows")), **options}
    changes: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "num_mini_batches": 2}
    whole = tiny.trained(tmp_path, given=given, **changes)
    shutil.rmtree(tmp_path / "checkpoint-6")
    resumed = tiny.trainer(
        tmp_path, given={**given, "model": tiny.policy(), "value_model": tiny.classifier()}, **changes
    )
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.episode == 48
    assert tiny.updates(resumed) == tiny.updates(whole)
    kept, made = tiny.weights(whole), tiny.weights(resumed)
    assert all(torch.equal(kept[name], made[name]) for name in kept)


def test_no_engine_takes_what_it_generated_with_for_the_parameters_of_a_checkpoint(tmp_path: Path) -> None:
    """Those of another run may have the same number of optimizer steps."""
    tiny.trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    made = tiny.resumed(tmp_path / "checkpoint-2", tmp_path / "again", max_steps=3)
    (generator,) = made.placement.generators.values()
    generator.version = made.placement.engine("actor.train").version
    made.run.checkpoints.load_models(made.run.checkpoints.find(str(tmp_path / "checkpoint-2")))
    assert generator.version == STALE


def test_a_checkpoint_without_the_critic_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    tiny.trained(tmp_path, save_strategy="steps", save_steps=1)
    shutil.rmtree(tmp_path / "checkpoint-2" / "value_model")
    again = tiny.trainer(tmp_path)
    told = r"value_model/model.safetensors is missing.*checkpoint-1 is whole: resume from it"
    with pytest.raises(CheckpointError, match=told):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not again.placement.started


def test_resuming_where_there_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        tiny.trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_run_goes_on_without_the_best_checkpoint_if_nobody_has_it_any_more(tmp_path: Path) -> None:
    changes = {**tiny.every(1), "load_best_model_at_end": True, "metric_for_best_model": "eval_objective/scores"}
    changes |= {"missing_eos_penalty": None}
    given = {"eval_dataset": tiny.prompts(8), "reward_model": tiny.always_one}
    first = tiny.trained(tmp_path, given=given, **changes)
    assert first.state.best_model_checkpoint == str(tmp_path / "checkpoint-1"), "no later one is better"
    shutil.rmtree(tmp_path / "checkpoint-1")
    again = tiny.trainer(tmp_path, given=given, **{**changes, "max_steps": 3})
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3 and again.state.best_model_checkpoint is None
