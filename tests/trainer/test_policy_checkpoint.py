"""Checkpoints of a trainer without a critic, which is another than PPO's: a subclass of Trainer with its state."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_groups
import torch
from policy_alone import learned, place
from remax import prompts
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainerState

from trl_realloc import Cluster, GRPOTrainer
from trl_realloc.algorithms.nonfinite import NonFiniteError
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.presets import flatten
from trl_realloc.trainer.checkpoint import CheckpointError
from trl_realloc.trainer.checkpoint.identity import Identity, prompts_checksum
from trl_realloc.trainer.checkpoint.resuming import STATE, is_needed_by_all, newest_whole
from trl_realloc.trainer.checkpoint.state_files import StateWrite
from trl_realloc.trainer.checks.config_checks import ConfigError
from trl_realloc.trainer.grpo_config import GRPOConfig
from trl_realloc.trainer.run import checkpoints as run_checkpoints
from trl_realloc.trainer.run.checkpoints import Checkpoints
from trl_realloc.trainer.run.optimizers import LearningRates


BARE = grpo_graph(reference=False, reward_models=False)
ROWS = tiny.prompts(16)


def lengths(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def group_trainer(folder: Path, given: dict[str, Any] | None = None, **changes: Any) -> GRPOTrainer:
    """A trainer that saves a checkpoint after each optimizer step."""
    groups = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_generations": 2}
    saves = {**groups, "max_completion_length": 4, "save_strategy": "steps", "save_steps": 1}
    parts = {"reward_funcs": lengths, "train_dataset": ROWS, **(given or {})}
    return tiny_groups.trainer(folder, given=parts, **{**tiny.BARE, **saves, **changes})


class Counting(TrainerCallback):
    saved = 0

    def on_save(self, *_: Any, **__: Any) -> None:
        self.saved += 1


class PolicyTrainer(Trainer):
    """Trains the policy alone, under a plan."""

    def __init__(self, folder: Path, seed: int = 0, **changes: Any) -> None:
        plan = flatten(Cluster(1, 1), generation_engine="transformers", graph=BARE)
        self.executor = executor = place(plan, 0, seed)
        settings: dict[str, Any] = {"learning_rate": 0.01, "max_steps": 8, "per_device_train_batch_size": 8}
        args = GRPOConfig(str(folder), use_cpu=True, report_to=[], **{**settings, "save_strategy": "steps", **changes})
        self.rates = LearningRates.of(args, None, None, [Role.ACTOR])
        self.adapter = SimpleNamespace(
            trainer=self,
            calls_on_save=False,
            counters=("global_step",),
            about_checkpoint=dict,
            write_state=lambda *_: None,
            random_states_to_save=contextlib.nullcontext,
            forget_step=lambda: None,
            samples_under_way=lambda: executor.samples_under_way(self.state.global_step),
            go_on_with=executor.go_on_with,
        )
        placed: Any = SimpleNamespace(
            adapter=self.adapter,
            setup=SimpleNamespace(rates=self.rates, models_before_start={Role.ACTOR: tiny.policy()}),
            plan=plan,
            placement=executor.placement,
            executor=executor,
            alarm=executor.alarm,
            rank=0,
        )
        self.checkpoints = Checkpoints(placed)
        self.checkpoints.identity = Identity("AdamW", len(prompts()), len(ROWS), prompts_checksum(ROWS))
        self.counting = Counting()
        super().__init__(tiny.policy(), args, processing_class=tiny.tokenizer(), callbacks=[self.counting])
        self.create_scheduler(8, self.rates.scheduled)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.checkpoints.save()

    def step(self) -> None:
        self.executor.run(prompts(), self.state.global_step, {Role.ACTOR: self.rates.role(Role.ACTOR)})
        self.rates.scheduled.step()
        self.lr_scheduler.step()
        self.state.global_step += 1

    def resume(self, setting: str | bool) -> None:
        checkpoint = self.checkpoints.find(setting)
        assert checkpoint is not None
        self.state = TrainerState.load_from_json(str(checkpoint.folder / STATE))
        self.checkpoints.load(checkpoint)


def test_a_run_that_was_saved_and_resumed_is_a_straight_one(tmp_path: Path) -> None:
    straight = PolicyTrainer(tmp_path)
    for _ in range(2):
        straight.step()
    straight.checkpoints.save()
    assert straight.counting.saved == 0, "Trainer's loop calls on_save"
    folder = tmp_path / "checkpoint-2"
    saved = {name: p.detach() for name, p in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}
    assert all(torch.equal(saved[name], value) for name, value in learned(straight.executor).items())
    assert not (folder / "value_model").exists() and (folder / "plan.yaml").exists()
    straight.step()
    resumed = PolicyTrainer(tmp_path, seed=5)
    resumed.resume(True)
    assert resumed.state.global_step == 2 and resumed.rates.first == pytest.approx(0.01 * 6 / 8)
    resumed.step()
    expected, got = learned(straight.executor), learned(resumed.executor)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize(("strategy", "saved"), [("steps", ["checkpoint-1"]), ("no", [])])
def test_a_state_is_saved_once_and_only_in_a_run_that_saves(tmp_path: Path, strategy: str, saved: list[str]) -> None:
    trainer = PolicyTrainer(tmp_path, save_strategy=strategy)
    trainer.checkpoints.save_unsaved()
    assert list(tmp_path.glob("checkpoint-*")) == [], "nothing is trained"
    trainer.step()
    trainer.checkpoints.save_unsaved()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == saved
    for path in tmp_path.glob("checkpoint-*"):
        path.rename(tmp_path / "elsewhere")
    trainer.checkpoints.save_unsaved()
    assert list(tmp_path.glob("checkpoint-*")) == []


def test_a_checkpoint_is_written_in_the_background(tmp_path: Path) -> None:
    trainer = PolicyTrainer(tmp_path, async_save=True)
    trainer.adapter.calls_on_save = True
    trainer.step()
    trainer.checkpoints.save()
    trainer.checkpoints.finish()
    assert trainer.counting.saved == 1 and (tmp_path / "checkpoint-1" / STATE).exists()


def test_ranks_load_the_best_checkpoint_though_a_host_lacks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = PolicyTrainer(tmp_path)
    trainer.step()
    trainer.checkpoints.save()
    resumed = PolicyTrainer(tmp_path)
    resumed.args.load_best_model_at_end = True
    best = str(tmp_path / "checkpoint-0")
    with_another_host = lambda own, control: [own, best]  # noqa: E731
    monkeypatch.setattr(run_checkpoints, "all_gather_object", with_another_host)
    resumed.resume(True)
    assert resumed.state.best_model_checkpoint == best, "Trainer has forgotten it on this host"


@pytest.mark.parametrize(
    ("accumulated", "on_a_generation", "fails_at", "again"),
    [(1, 1, 2, 1), (2, 2, 2, 1), (2, 1, 2, 2), (2, 4, 2, 1), (2, 4, 3, 1), (1, 2, 9, 0)],
)
def test_a_run_that_goes_on_asks_again_for_the_generations_that_are_not_trained_on(
    tmp_path: Path, accumulated: int, on_a_generation: int, fails_at: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"gradient_accumulation_steps": accumulated, "steps_per_generation": on_a_generation}
    made = group_trainer(tmp_path, **steps, save_steps=4, max_steps=4)
    asked: list[int] = []
    monkeypatch.setattr(made.calls, "samples_under_way", lambda again: asked.append(again))
    train = made.calls.train

    def failing(*given: Any) -> Any:
        if made.state.global_step + 1 == fails_at:
            raise NonFiniteError("an advantage is not finite")
        return train(*given)

    monkeypatch.setattr(made.calls, "train", failing)
    with contextlib.suppress(NonFiniteError):
        made.train()
    made.close()
    assert asked == [again]


def test_every_host_gets_the_entropy_coefficient_that_trl_reads_on_every_rank(tmp_path: Path) -> None:
    """Rank 0 writes it, on the disk of its host."""
    made = group_trainer(tmp_path, max_steps=1, use_adaptive_entropy=True)
    made.train()
    made.close()
    (file,) = [path.name for path in (tmp_path / "checkpoint-1").glob("*entropy*")]
    assert is_needed_by_all(file)


class Ended(TrainerCallback):
    left: Sequence[str] = ()

    def on_train_end(self, args: Any, *_: Any, **__: Any) -> None:
        self.left = sorted(path.name for path in Path(args.output_dir).glob("checkpoint-*"))


@pytest.mark.parametrize("best", [1, 2])
def test_a_checkpoint_in_the_background_is_complete_before_trainer_ends_the_run(
    tmp_path: Path, best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer then keeps the best one alone."""
    monkeypatch.setattr(StateWrite, "done", False)  # one that takes long
    evaluates = {"metric_for_best_model": "score", "eval_strategy": "steps", "eval_steps": 1}
    given = {"eval_dataset": ROWS, "callbacks": [ended := Ended()]}
    made = group_trainer(tmp_path, given, async_save=True, max_steps=2, save_total_limit=1, **evaluates)
    monkeypatch.setattr(made, "_evaluate", lambda *_, **__: {"eval_score": -abs(made.state.global_step - best)})
    made.train()
    made.close()
    assert ended.left == [f"checkpoint-{best}"]
    assert newest_whole(tmp_path) == tmp_path / f"checkpoint-{best}"


def test_the_best_checkpoint_is_kept_until_a_better_one_is_complete(tmp_path: Path) -> None:
    trainer = PolicyTrainer(tmp_path, async_save=True, save_total_limit=1)
    for best in (1, 1, 1, 4):
        trainer.step()
        trainer.state.best_global_step = best
        trainer.checkpoints.save()
    assert {path.name for path in tmp_path.glob("checkpoint-?")} == {"checkpoint-1", "checkpoint-3"}
    trainer.checkpoints.finish()
    assert [path.name for path in tmp_path.glob("checkpoint-?")] == ["checkpoint-4"]


def test_a_checkpoint_of_ppo_is_not_one_of_a_run_without_critic(tmp_path: Path) -> None:
    tiny.trained(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    trainer = PolicyTrainer(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        trainer.checkpoints.find(True)
    folder = tmp_path / "checkpoint-1"
    assert str(refusal.value) == (
        f"cannot resume from {folder}: it is of a run that trains policy and critic, as PPOTrainer does; this run "
        "trains the policy alone, as GRPOTrainer and RLOOTrainer do. Resume it with the trainer that wrote it; or "
        f"begin a run with its policy, model='{folder}', in another output_dir."
    )


@pytest.mark.parametrize("by_name", [True, False])
def test_a_checkpoint_of_a_run_without_critic_is_not_one_of_ppo(tmp_path: Path, by_name: bool) -> None:
    trainer = PolicyTrainer(tmp_path)
    trainer.step()
    trainer.checkpoints.save()
    folder = tmp_path / "checkpoint-1"
    told = f"cannot resume from {folder}: it is of a run that trains the policy alone"
    with pytest.raises(CheckpointError, match=told):
        tiny.trainer(tmp_path, save_strategy="steps").run.checkpoints.find(str(folder) if by_name else True)


def test_other_prompts_are_refused_and_unknown_ones_are_not(tmp_path: Path) -> None:
    trainer = PolicyTrainer(tmp_path)
    trainer.step()
    trainer.checkpoints.save()
    other = PolicyTrainer(tmp_path)
    other.checkpoints.identity = Identity("AdamW", len(prompts()), len(ROWS), prompts_checksum(ROWS) + 1)
    with pytest.raises(CheckpointError, match="its data set has 16 prompts as this run's, but others"):
        other.checkpoints.find(True)
    other.checkpoints.identity = Identity("AdamW", len(prompts()), None, None)
    assert other.checkpoints.find(True) is not None


@pytest.mark.parametrize("in_background", [False, True])
def test_callbacks_are_told_of_a_checkpoint_when_it_is_complete(tmp_path: Path, in_background: bool) -> None:
    told: list[tuple[int, bool]] = []

    class Looks(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            told.append((state.global_step, (tmp_path / f"checkpoint-{state.global_step}").is_dir()))

    group_trainer(tmp_path, {"callbacks": [Looks()]}, max_steps=2, async_save=in_background).train()
    assert told == [(1, True), (2, True)]


def test_where_accelerate_trains_the_best_model_is_that_of_a_checkpoint_without_an_optimizer(tmp_path: Path) -> None:
    def made(**changes: Any) -> GRPOTrainer:
        settings = {"save_only_model": True, "load_best_model_at_end": True, "metric_for_best_model": "reward"}
        given = {"model": tiny.policy(**changes), "eval_dataset": tiny.prompts(2)}
        return group_trainer(tmp_path, given, **settings, eval_strategy="steps", eval_steps=1, max_steps=1)

    with pytest.raises(ConfigError, match="load_best_model_at_end.*save_only_model"):
        made()
    trainer = made(attention_dropout=0.1)
    trainer.train()
    assert trainer.run is None and trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
