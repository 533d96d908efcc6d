"""After a failure or an interrupt, a trainer of one process saves, evaluates and trains on with the models it has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_groups
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_realloc import GRPOTrainer
from trl_realloc.algorithms.rollout import Rollouts
from trl_realloc.engines.base import EngineError
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.training import zero
from trl_realloc.runtime.failures.alarm import JobFailed
from trl_realloc.runtime.placement.engine_builder import EngineBuilder


class Reward:
    """A reward that tells completions apart, whose call number `fails_at` fails."""

    __name__ = "words"

    def __init__(self, fails_at: int = 0) -> None:
        self.calls, self.fails_at = 0, fails_at

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("no answer of the judge")
        return [float(sum(map(ord, text)) % 7) for text in completions]


def grpo(folder: Path, reward: Any, callbacks: Any = None, **changes: Any) -> GRPOTrainer:
    sizes = {"gradient_accumulation_steps": 1, "num_generations": 2, "max_completion_length": 6, "max_steps": 3}
    given = {"reward_funcs": reward, "eval_dataset": tiny.prompts(4), "callbacks": callbacks}
    return tiny_groups.trainer(folder, given=given, **{**tiny.BARE, **sizes, **changes})


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")
@pytest.mark.usefixtures("forked_engines")
def test_a_training_whose_reward_function_failed_goes_on_in_a_new_engine(tmp_path: Path) -> None:
    reward = Reward(fails_at=2)
    made = grpo(tmp_path, reward, use_vllm=True, vllm_importance_sampling_correction=True)
    engines: Any = made.placement.generators
    with pytest.raises(ValueError, match="no answer of the judge") as failure:
        made.train()
    assert any("train() trains them on" in note for note in failure.value.__notes__)
    first = engines["actor.generate"]
    assert made.state.global_step == 1 and not is_alive(first.pid)
    trained = {name: value.clone() for name, value in made.model.named_parameters()}
    made.save_model(str(tmp_path / "saved"))
    assert engines["actor.generate"] is first, "saving starts no engine"
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(trained[name], value) for name, value in saved.named_parameters())
    begun = dict(tiny.policy().named_parameters())
    assert not all(torch.equal(begun[name], value) for name, value in trained.items())

    made.train()
    second = engines["actor.generate"]
    assert made.state.global_step == 3 and reward.calls == 5 and is_alive(second.pid)
    # vLLM has drawn by the policy as it is in the engine that trains
    differences = [row[name] for row in made.state.log_history for name in row if name.endswith("logp_difference/max")]
    assert len(differences) == 3 and max(differences) < 1e-4
    assert made.evaluate()["eval_rewards/words/mean"] >= 0
    made.close()
    assert not is_alive(second.pid)


class Interrupts(TrainerCallback):
    """As Ctrl-C after the first micro-batch of the second optimizer step, once."""

    is_done = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 1 and not self.is_done:
            self.is_done = True
            raise KeyboardInterrupt


def test_an_interrupted_optimizer_step_is_dropped(tmp_path: Path) -> None:
    made = grpo(tmp_path, Reward(), [Interrupts()], gradient_accumulation_steps=2, max_steps=2)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert len(made.run.adapter.loss.step_buffer) == 0 and not made.is_in_train, (
        "its token gradients would be trained on with another step's"
    )
    made.train()
    assert made.state.global_step == 2


class Fails(TrainerCallback):
    """Fails once, in the middle of the second generation's optimizer steps."""

    is_done = False

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 3 and not self.is_done:
            self.is_done = True
            raise ConnectionError("no disk")


def test_the_same_trainer_resumes_to_where_a_run_without_a_failure_ends(tmp_path: Path) -> None:
    changes = {"num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight = grpo(tmp_path / "straight", Reward(), **changes)
    straight.train()
    made = grpo(tmp_path / "failed", Reward(), [Fails()], **changes)
    with pytest.raises(ConnectionError):
        made.train()
    made.train(resume_from_checkpoint=True)
    expected = dict(straight.model.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in made.model.named_parameters())


def test_a_training_that_failed_midway_leaves_no_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny.trainer(tmp_path, max_steps=1, per_device_train_batch_size=4, response_length=4)
    made.run.placed.start()
    engine: Any = made.placement.trained("actor")  # type: ignore[arg-type]  # a role is its name
    with monkeypatch.context() as patched:
        patched.setattr(engine.optimizer, "step", lambda *given: 1 / 0)
        with pytest.raises(JobFailed):
            made.train()
    assert all(parameter.grad is None for parameter in made.policy_model.parameters())
    made.train()
    assert made.state.global_step == 1


def test_a_start_that_failed_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = grpo(tmp_path, Reward(), max_steps=1)
    build = EngineBuilder._generate_in_place

    def broken(builder: EngineBuilder) -> None:
        monkeypatch.setattr(EngineBuilder, "_generate_in_place", build)
        raise EngineError("no room on the device")

    monkeypatch.setattr(EngineBuilder, "_generate_in_place", broken)
    with pytest.raises(EngineError, match="no room"):
        made.train()
    assert not made.placement.started and not made.placement.engines
    made.train()
    assert made.state.global_step == 1


def test_a_run_that_failed_between_two_plans_has_lost_its_state_and_says_so(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path, max_steps=1, per_device_train_batch_size=4, response_length=4)
    made.run.placed.start()
    with pytest.raises(ZeroDivisionError), made.run.failing_together():
        made.run.change.rebuild(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    for use in (made.train, made.save_model):
        with pytest.raises(EngineError, match="its parameters are lost here; make a new trainer"):
            use()


def test_deepspeed_does_not_train_on_after_a_step_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds gradients to those of the step before, in memory of its own."""
    engine: Any = object.__new__(zero.ZeroEngine)
    head, cpu = SimpleNamespace(tree=lambda samples: None), torch.device("cpu")
    vars(engine).update(_is_within_step=False, _has_gradients=False, head=head, group=None, device=cpu)
    engine.engine = SimpleNamespace(train=lambda: None, optimizer=SimpleNamespace(param_groups=[]))
    engine._settings = SimpleNamespace(give=lambda rate: None)
    engine._linear, engine._gradients = (
        contextlib.nullcontext,
        SimpleNamespace(allocate=lambda: None, free=lambda: None),
    )
    monkeypatch.setattr(zero, "run_training", lambda *given, **named: 1 / 0)
    train: Callable[[], Any] = lambda: engine.train(Rollouts(), None, 1, 0.1)  # noqa: E731
    with pytest.raises(ZeroDivisionError):
        train()
    with pytest.raises(EngineError, match="was interrupted or failed in its middle"):
        train()
