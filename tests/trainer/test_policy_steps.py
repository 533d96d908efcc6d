"""What callbacks and users see of an optimizer step and of a generation of GRPO and RLOO on one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_groups
import torch
from tiny_groups import settings, trainer
from transformers import TrainerCallback

from trl_realloc.algorithms.async_functions import is_async
from trl_realloc.engines.generation.transformers import TransformersEngine
from trl_realloc.trainer.checks.config_checks import ConfigError
from trl_realloc.trainer.policy.rewards import followed


Weights = dict[str, torch.Tensor]


def weights(trainer: Any) -> Weights:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


class At(TrainerCallback):
    """Does something before the optimizer step of one update, and notes the weights before and after each step."""

    def __init__(self, update: int, act: Callable[[Any], None] = lambda trainer: None) -> None:
        self.update, self.act = update, act
        self.trainer: Any = None
        self.before: list[Weights] = []
        self.after: list[Weights] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.before.append(weights(self.trainer))
        if state.global_step == self.update:
            self.act(self.trainer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.after.append(weights(self.trainer))


def trained(folder: Path, at: At, resume: str | None = None, **changes: Any) -> Any:
    at.trainer = trainer(folder, given={"callbacks": [at]}, max_steps=3, lr_scheduler_type="constant", **changes)
    at.trainer.train(resume_from_checkpoint=resume)
    at.trainer.close()
    return at.trainer


def test_callbacks_before_an_optimizer_step_see_the_weights_before_it(tmp_path: Path) -> None:
    at = At(0)
    made = trained(tmp_path, at)
    assert len(at.before) == len(at.after) == 3
    assert all(equal(after, before) for after, before in zip(at.after, at.before[1:], strict=False))
    assert not any(equal(before, after) for before, after in zip(at.before, at.after, strict=True))
    logs = [row for row in made.state.log_history if "grad_norm" in row]
    assert len(logs) == 3 and all(row["grad_norm"] > 0 for row in logs)
    assert all(row["step_time"] >= row["time/actor.train"] for row in logs)


def test_a_callback_may_set_the_learning_rate_of_the_step_that_follows(tmp_path: Path) -> None:
    def stand_still(trainer: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] = 0.0

    at = At(1, stand_still)
    trained(tmp_path, at)
    assert equal(at.before[1], at.after[1]) and not equal(at.before[0], at.after[0])


def test_a_checkpoint_that_is_saved_before_an_optimizer_step_is_resumed_with_this_step(tmp_path: Path) -> None:
    """As `enable_jit_checkpoint` saves them. The losses are equal in every digit, because TRL shuffles the samples as
    before."""
    straight = trained(tmp_path / "straight", At(-1), gradient_accumulation_steps=4)
    saving = At(1, lambda trainer: trainer._save_checkpoint(trainer.model, None))
    trained(tmp_path / "saved", saving, gradient_accumulation_steps=4)
    folder = str(tmp_path / "saved" / "checkpoint-1")
    resumed = trained(tmp_path / "saved", At(-1), resume=folder, gradient_accumulation_steps=4)
    assert resumed.state.global_step == 3
    for name, expected in weights(straight).items():
        torch.testing.assert_close(weights(resumed)[name], expected, msg=name)
    losses = [[row["loss"] for row in made.state.log_history if "loss" in row] for made in (straight, resumed)]
    assert losses[0][-2:] == losses[1][-2:]


def test_a_process_that_sees_several_gpus_makes_batches_for_the_one_that_it_uses(tmp_path: Path) -> None:
    args = settings(tmp_path)
    assert args.device.type == "cpu"
    args._n_gpu = 4  # what Trainer finds there
    made = trainer(tmp_path, given={"args": args})
    made.close()
    assert made._train_batch_size == 4
    assert next(iter(made.get_train_dataloader())) and len(next(iter(made.get_train_dataloader()))) == 8


def test_generation_in_the_model_that_trains_answers_all_prompts_of_a_generation_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    begin = TransformersEngine._batch

    def counted(self: Any, model: Any, batch: Any, sampling: Any) -> Any:
        sizes.append(len(batch))
        return begin(self, model, batch, sampling)

    monkeypatch.setattr(TransformersEngine, "_batch", counted)
    tiny_groups.trained(tmp_path, gradient_accumulation_steps=4, max_steps=1)
    assert sizes == [16]


@pytest.mark.parametrize("name", ["temperature", "max_completion_length"])
def test_how_tokens_are_drawn_cannot_change_within_a_run(tmp_path: Path, name: str) -> None:
    at = At(0, lambda trainer: setattr(trainer, name, 3))
    with pytest.raises(ConfigError, match=f"the trainer's {name} was .* and is now 3"):
        trained(tmp_path, at)
    with pytest.raises(AttributeError, match="temperature"):
        at.trainer.vllm_generation.temperature = 3


def test_a_reward_object_that_is_awaited_is_awaited_under_its_own_name_too() -> None:
    class Judge:
        async def __call__(self, **given: Any) -> list[float]:
            return [1.0]

    said: list[str] = []
    told = followed(Judge(), "update 1", said.append, lambda: said.append("ended"))
    assert is_async(told)
    assert asyncio.run(told()) == [1.0]
    assert "Judge" in said[0] and said[-1] == "ended"
