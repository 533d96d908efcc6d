"""The state in which a plan puts TRL's trainer."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from torch import nn

from trl_realloc.trainer.policy.taken_over import TakenOver


def test_every_attribute_that_a_plan_overwrites_is_described_and_set_under_its_name() -> None:
    given: dict[str, Any] = {"beta": 0.1, "async_loop": None, "vllm_importance_sampling_correction": True}
    given |= {"model": nn.Linear(1, 1), "model_wrapped": nn.Linear(1, 1), "ref_model": None}
    given |= {"turns": {"rollout_func": len}, "backward": print, "_wrap_model": nn.Identity, "_compute_loss": print}
    state, trainer = TakenOver(**given), SimpleNamespace(accelerator=SimpleNamespace())
    state.put_on(trainer)  # type: ignore[arg-type]
    on_accelerator = {"backward", "clip_grad_norm_"}
    assert set(vars(trainer.accelerator)) == on_accelerator
    names = {field.name for field in fields(TakenOver)}
    assert set(vars(trainer)) == {*names, "accelerator", "rollout_func"} - {*on_accelerator, "turns"}
    assert trainer.beta == 0.1 and trainer.use_vllm and not trainer.is_fsdp_enabled and trainer.rollout_func is len
    assert trainer.accelerator.clip_grad_norm_([], 1.0) is None
    assert all(f"\n        {name}: " in str(TakenOver.__doc__) for name in names)
