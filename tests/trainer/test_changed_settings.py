"""Settings that a callback changes during a run: those of the arithmetic hold from the next update on, as in TRL, and a
change that the engines would not follow is refused."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_groups
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from trl_realloc import GRPOTrainer
from trl_realloc.trainer.checks.config_checks import ConfigError


ARITHMETIC: Mapping[str, Any] = {"kl_coef": 3.0, "kl_estimator": "k3", "whiten_rewards": True}
ARITHMETIC |= {"missing_eos_penalty": 2.0, "gamma": 0.5, "lam": 0.3, "cliprange": 1e-4, "cliprange_value": 1e-4}
ARITHMETIC |= {"vf_coef": 2.0, "num_ppo_epochs": 3}


class Sets(TrainerCallback):
    """Before an update, sets what is given for it."""

    def __init__(self, by_step: Mapping[int, Mapping[str, Any]]) -> None:
        self.by_step = by_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, value in self.by_step.get(state.global_step, {}).items():
            setattr(args, name, value)


def trained(folder: Path, by_step: Mapping[int, Mapping[str, Any]] | None = None, **changes: Any) -> Any:
    # a critic that differs from its first values, and a policy from its reference, from the first epoch on
    made = tiny.trained(folder, callbacks=[Sets(by_step or {})], **{"num_mini_batches": 2, **changes})
    return made


@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_setting_of_the_arithmetic_holds_from_the_update_before_which_it_is_set(tmp_path: Path, name: str) -> None:
    changed = {name: ARITHMETIC[name]}
    given, plain = trained(tmp_path / "given", **changed), trained(tmp_path / "plain")
    now = trained(tmp_path / "now", {0: changed})
    later = trained(tmp_path / "later", {1: changed})
    assert tiny.updates(now) == tiny.updates(given)
    assert all(torch.equal(tiny.weights(given)[key], tensor) for key, tensor in tiny.weights(now).items())
    (first, second), expected = tiny.updates(later), tiny.updates(plain)
    assert first == expected[0] and second != expected[1]


def test_a_weight_of_the_correction_is_bounded_anew(tmp_path: Path) -> None:
    on = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate"}
    made = trained(tmp_path, {1: {"vllm_importance_sampling_clip_max": 0.5}}, **on)
    first, second = (row["sampling/importance_sampling_ratio/max"] for row in tiny.updates(made))
    assert first == pytest.approx(1, abs=1e-4) and second == 0.5


def test_a_schedule_goes_on_in_a_run_that_resumes(tmp_path: Path) -> None:
    schedule = {step: {"kl_coef": 0.1 * step, "cliprange": 0.1 + step} for step in range(4)}
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trained(tmp_path, schedule, **changes)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = tiny.trainer(tmp_path, callbacks=[Sets(schedule)], num_mini_batches=2, **changes)
    resumed.train(resume_from_checkpoint=True)
    assert tiny.updates(resumed) == tiny.updates(whole)


def test_an_evaluation_uses_the_settings_of_the_arguments(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path, given={"eval_dataset": tiny.prompts(8), "ref_model": tiny.policy(seed=9)})
    before = made.evaluate()
    made.args.kl_coef *= 2
    after = made.evaluate()
    assert after["eval_objective/non_score_reward"] == pytest.approx(2 * before["eval_objective/non_score_reward"])


def test_the_mean_loss_weighs_each_value_loss_as_its_update_did(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path, callbacks=[Sets({1: {"vf_coef": 2.0}})])
    output = made.train()
    first, second = tiny.updates(made)
    losses = [row["loss/policy_avg"] + c * row["loss/value_avg"] for row, c in ((first, 0.1), (second, 2.0))]
    assert output.training_loss == pytest.approx(sum(losses) / 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_length", 6),
        ("temperature", 0.5),
        ("num_mini_batches", 4),
        ("local_mini_batch_size", 2),
        ("local_rollout_forward_batch_size", 1),
        ("max_grad_norm", 0.1),
        ("vllm_importance_sampling_correction", True),
        ("max_staleness", 1),
    ],
)
def test_a_setting_of_ppo_that_the_engines_would_not_follow_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    made = tiny.trainer(tmp_path, callbacks=[Sets({1: {name: value}})])
    before = getattr(made.args, name)
    told = f"^{name} was {before} when the trainer was made and is now {value}, .*; make a new trainer"
    with pytest.raises(ConfigError, match=told):
        made.train()
    assert made.state.global_step == 1


@pytest.mark.parametrize(("name", "value"), [("gamma", 2.0), ("kl_coef", float("nan")), ("kl_estimator", "k2")])
def test_a_changed_setting_must_be_in_its_range(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        trained(tmp_path, {1: {name: value}})


def test_the_token_that_ends_a_response_is_not_changed(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path)
    assert made.stop_token_id == tiny.EOS
    with pytest.raises(AttributeError, match="stop_token_id cannot be changed"):
        made.stop_token_id = None


# --- GRPO ------------------------------------------------------------------------------------------------------------


class Changes(TrainerCallback):
    """After the first update, changes something of the trainer."""

    def __init__(self, change: Any) -> None:
        self.change, self.trainer = change, None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.change(self.trainer)


def group_trainer(folder: Path, change: Any, *, peft_config: Any = None, **settings: Any) -> GRPOTrainer:
    sizes = {"gradient_accumulation_steps": 1, "num_generations": 2, "max_completion_length": 4}
    changes = Changes(change)
    given = {"reward_funcs": tiny.short, "callbacks": [changes], "peft_config": peft_config}
    changes.trainer = tiny_groups.trainer(folder, given=given, **{**tiny.BARE, **sizes, **settings})
    return changes.trainer


REFUSED: Mapping[str, tuple[str, Any]] = {
    "max_grad_norm": ("max_grad_norm was 1.0 .* now 0.1", lambda made: setattr(made.args, "max_grad_norm", 0.1)),
    "how TRL generates": (
        "generation_config.top_k was .* now 3",
        lambda made: setattr(made.generation_config, "top_k", 3),
    ),
    "temperature": ("the trainer's temperature was 1.0 .* now 0.5", lambda made: setattr(made, "temperature", 0.5)),
    "the optimizer": (
        "the optimizer's weight_decay was 0 .* now 0.1",
        lambda made: made.optimizer.param_groups[0].update(weight_decay=0.1),
    ),
    "a penalty": ("the trainer's beta was 0.0 .* now 0.1", lambda made: setattr(made, "beta", 0.1)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_setting_of_grpo_that_the_engines_would_not_follow_is_refused(tmp_path: Path, kind: str) -> None:
    message, change = REFUSED[kind]
    lora = LoraConfig(r=4, target_modules=["q_proj"]) if kind == "a penalty" else None
    made = group_trainer(tmp_path, change, peft_config=lora)
    with pytest.raises(ConfigError, match=f"{message}, .*; make a new trainer"):
        made.train()


def test_the_weight_of_grpos_penalty_holds_from_the_next_update_on(tmp_path: Path) -> None:
    def weights(name: str, later: float) -> dict[str, torch.Tensor]:
        made = group_trainer(tmp_path / name, lambda made: setattr(made, "beta", later), beta=0.5, max_steps=3)
        made.train()
        return {key: tensor.clone() for key, tensor in made.model.named_parameters()}

    plain, changed = weights("plain", 0.5), weights("changed", 5.0)
    assert any(not torch.equal(plain[key], tensor) for key, tensor in changed.items())
