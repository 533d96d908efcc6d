"""When a run logs, evaluates, saves and stops, and in which order it reads its data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from trl_realloc.algorithms.prompt_batches import SeededOrder, batches_of
from trl_realloc.trainer.checks.config_checks import ConfigError


def test_epoch_strategies_log_evaluate_and_save_after_every_pass(tmp_path: Path) -> None:
    """Two updates a pass; the run ends in the middle of the third, which counts."""
    given = {"train_dataset": tiny.prompts(16), "eval_dataset": tiny.prompts(2)}
    strategies = {f"{what}_strategy": "epoch" for what in ("save", "eval", "logging")}
    of_run = {"max_steps": 5, "num_ppo_epochs": 1, "save_only_model": True, "eval_on_start": True}
    made = tiny.trained(tmp_path, given=given, **strategies, **of_run)
    steps: dict[str, list[int]] = {"objective/scores": [], "eval_objective/scores": []}
    for row in made.state.log_history:
        for name in set(steps) & set(row):
            steps[name].append(row["step"])
    assert steps == {"objective/scores": [2, 4, 5], "eval_objective/scores": [0, 2, 4, 5]}
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4", "checkpoint-5"}


class StopsAfterAPass(TrainerCallback):
    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
        control.should_training_stop = True
        return control


def test_a_callback_that_stops_after_a_pass_gets_no_other_update(tmp_path: Path) -> None:
    given = {"train_dataset": tiny.prompts(16)}
    made = tiny.trainer(tmp_path, callbacks=[StopsAfterAPass()], given=given, max_steps=6, num_ppo_epochs=1)
    output = made.train()
    assert made.state.global_step == 2
    rows = tiny.updates(made)
    losses = [row["loss/policy_avg"] + 0.1 * row["loss/value_avg"] for row in rows]
    assert output.training_loss == pytest.approx(sum(losses) / 2) == output.metrics["train_loss"]
    assert all(row["val/ratio_var"] == 0.0 for row in rows), "one optimizer step has no variance"
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_reduce_lr_on_plateau_follows_the_evaluations_metric(tmp_path: Path) -> None:
    """The score never gets better at a learning rate of 0 for the policy; the critic has one of its own."""
    of_plateau = {"patience": 0, "factor": 0.5, "mode": "max", "threshold_mode": "abs"}
    rates = {"learning_rate": 0.0, "value_learning_rate": 1e-2, "lr_scheduler_kwargs": of_plateau}
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "objective/scores"}
    of_run = {"max_steps": 3, "num_ppo_epochs": 1, "lr_scheduler_type": "reduce_lr_on_plateau"}
    made = tiny.trained(tmp_path, given={"eval_dataset": tiny.prompts(2)}, **of_run, **rates, **evaluates)
    assert made.placement.engine("actor.train").optimizer.param_groups[0]["lr"] == 0.0
    # set before each update: the first evaluation is the best so far, the second and third bring the factor
    assert made.placement.engine("critic.train").optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)
    assert made.setup.rates.scheduled.param_groups[1]["lr"] == pytest.approx(2.5e-3)


def test_a_metric_that_no_evaluation_has_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metric_for_best_model.*eval_objective/scores"):
        tiny.arguments(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1)


def test_data_seed_0_is_a_seed(tmp_path: Path) -> None:
    assert tiny.trainer(tmp_path, seed=5, data_seed=0).get_train_dataloader().sampler.seed == 0
    assert tiny.trainer(tmp_path, seed=5).get_train_dataloader().sampler.seed == 5


def test_no_pass_of_a_seed_is_a_pass_of_another() -> None:
    orders = []
    for seed in (42, 43, 44):
        order = SeededOrder(32, seed)
        for order.epoch in range(3):
            orders.append(tuple(order))
            assert sorted(orders[-1]) == list(range(32)) and tuple(order) == orders[-1]
    assert len(set(orders)) == 9


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (1, 5), (3, 4), (4, 4)])
def test_batches_go_on_where_they_stopped(start: int, stop: int) -> None:
    def read(first: int, last: int, ahead: int = 1) -> list[tuple[list[int], bool, bool, list[list[int]]]]:
        loader: Any = DataLoader(range(9), batch_size=3, sampler=SeededOrder(9, 1), drop_last=True)
        batches: Any = batches_of(loader, first, last, ahead)
        return [(u.batch.tolist(), u.is_first, u.is_last, [f.tolist() for f in u.following]) for u in batches]

    whole, part = read(0, 9), read(start, stop)
    steps = range(start, stop)
    assert [batch for batch, *_ in part] == [batch for batch, *_ in whole[start:stop]]
    assert [begins for _, begins, _, _ in part] == [at == start or at % 3 == 0 for at in steps]
    assert [ends for _, _, ends, _ in part] == [at % 3 == 2 or at == stop - 1 for at in steps]
    for ahead in (0, 1, 4):
        for at, (*_, following) in zip(steps, read(start, stop, ahead), strict=True):
            assert following == [batch for batch, *_ in whole[at + 1 : min(stop, at + 1 + ahead)]]
