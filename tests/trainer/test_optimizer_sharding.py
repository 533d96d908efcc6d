"""Which optimizers may be sharded, and that others are refused with the plan's word."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from group_optimizers import Adapting, Counting
from peft import IA3Config, LoraConfig, VBLoRAConfig
from torch import nn
from transformers.training_args import OptimizerNames

from trl_realloc.engines.models import adapter_configs
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten
from trl_realloc.planner.recipe.defaults import training_splits
from trl_realloc.planner.search.space import UNKNOWN_OPTIMIZER, TrainingSplits
from trl_realloc.profiling.job import Job
from trl_realloc.runtime.launch.hosts import Process
from trl_realloc.trainer import ppo_trainer
from trl_realloc.trainer.checks.config_checks import ConfigError
from trl_realloc.trainer.checks.plan_checks import check_adapters_split, check_sharding
from trl_realloc.trainer.run import run_setup as setup
from trl_realloc.trainer.run.optimizer_sharding import OptimizerSharding, splits_of, user_maker
from trl_realloc.trainer.run.plan_request import PlanRequest


CPU = torch.device("cpu")


class Normed(torch.optim.Optimizer):
    """Steps by a gradient over the norm of all gradients: no parameter by itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        parameters = [(group["lr"], p) for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for _, p in parameters if p.grad is not None]).norm()
        for rate, p in parameters:
            if p.grad is not None:
                p -= rate * p.grad / norm


class NormedAdamW(torch.optim.AdamW):
    """Divides all gradients by their norm, as a subclass of a known optimizer may."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        normed_gradients(self)
        super().step(closure)


def normed_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for at, gradient in enumerate(gradients):
        gradient *= (at + 1) / norm


def _with_groups(kind: Callable[[Any], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind(
        [{"params": [nn.Parameter(torch.ones(3, 2))]}, {"params": [nn.Parameter(torch.ones(3, 2))], "lr": 1e-3}]
    )


@pytest.mark.parametrize("kind", [Normed, Adapting, Counting, NormedAdamW])
def test_an_optimizer_that_is_not_known_trains_in_replicas_alone(kind: Any) -> None:
    splits = splits_of(user_maker(_with_groups(kind)), 2, CPU)
    assert splits == UNKNOWN_OPTIMIZER
    assert splits.allow("zero") and splits.allow("megatron")
    assert not any(splits.allow("zero", zero_stage=stage) for stage in (1, 2, 3))
    assert not any(splits.allow("megatron", **{split: 2}) for split in ("tp", "pp", "zero_stage"))


def test_a_known_optimizer_with_a_hook_of_the_users_is_not_known() -> None:
    made = _with_groups(torch.optim.AdamW)
    assert splits_of(user_maker(made), 2, CPU) == TrainingSplits()
    made.register_step_pre_hook(normed_gradients)
    assert splits_of(user_maker(made), 2, CPU) == UNKNOWN_OPTIMIZER


@pytest.mark.parametrize("named", [each.value for each in OptimizerNames])
def test_a_recipe_is_planned_as_a_run_with_its_optimizer(tmp_path: Path, named: str) -> None:
    assert training_splits(named) == OptimizerSharding(tiny.arguments(tmp_path, optim=named), None).splits


def _check_sharding(sharding: OptimizerSharding, plan: ExecutionPlan) -> None:
    check_sharding(sharding.name, sharding.splits, plan)


def _plan(**training: Any) -> ExecutionPlan:
    made = flatten(Cluster(1, 4), generation_engine="transformers").to_dict()
    made["calls"]["critic.train"] = {"mesh": "0-3", **training}
    return ExecutionPlan.from_dict(made)


@pytest.mark.parametrize(
    ("training", "refused"),
    [
        ({"engine": "zero", "dp": 4}, ""),
        ({"engine": "megatron", "dp": 4}, ""),
        ({"engine": "megatron", "dp": 4, "zero_stage": 1}, ""),
        ({"engine": "megatron", "dp": 2, "pp": 2}, ""),
        ({"engine": "zero", "dp": 4, "zero_stage": 1}, "critic.train under zero_stage: 1 would not train"),
        ({"engine": "zero", "dp": 4, "zero_stage": 3}, "critic.train under zero_stage: 3 would not train"),
        ({"engine": "megatron", "dp": 2, "tp": 2}, "critic.train under tp: 2 would not train"),
    ],
)
def test_adafactor_is_refused_where_parameters_are_cut(tmp_path: Path, training: dict[str, Any], refused: str) -> None:
    args = tiny.arguments(tmp_path, optim="adafactor")
    if not refused:
        _check_sharding(OptimizerSharding(args, None), _plan(**training))
        return
    with pytest.raises(ConfigError, match=f"optim='adafactor' does not step each element .*{refused}.*zero_stage: 0"):
        _check_sharding(OptimizerSharding(args, None), _plan(**training))


def test_adagrad_is_refused_under_deepspeed_which_makes_it_anew_without_its_groups(tmp_path: Path) -> None:
    sharding = OptimizerSharding(tiny.arguments(tmp_path, optim="adagrad"), None)
    for training in ({"engine": "zero", "dp": 4}, {"engine": "megatron", "dp": 2, "tp": 2, "zero_stage": 1}):
        _check_sharding(sharding, _plan(**training))
    assert sharding.splits == TrainingSplits(by_deepspeed=False)
    assert not sharding.splits.allow("zero", zero_stage=1) and sharding.splits.allow("megatron", tp=2, zero_stage=1)
    told = "DeepSpeed does not keep the groups of optim='adagrad', so critic.train under"
    with pytest.raises(ConfigError, match=told):
        _check_sharding(sharding, _plan(engine="zero", dp=4, zero_stage=2))


@pytest.mark.parametrize(
    ("config", "by_tp", "by_pp"),
    [
        (LoraConfig(), True, True),
        (LoraConfig(use_dora=True), False, True),
        (LoraConfig(trainable_token_indices=[1]), False, False),
        (IA3Config(), False, True),
        (VBLoRAConfig(), False, False),
        (None, True, True),
    ],
)
def test_an_adapter_that_tp_or_pp_cannot_split_is_refused_before_a_model_is_loaded(
    tmp_path: Path, config: Any, by_tp: bool, by_pp: bool
) -> None:
    adapters = adapter_configs("a name", config)
    told = {"tp": "actor.train has tp 2.*'default' cannot be", "pp": "actor.train has pp 2.*'default' has parameters"}
    for split, allowed in (("tp", by_tp), ("pp", by_pp)):
        check_adapters_split(adapters, _plan(engine="megatron", dp=2, **{split: 2}))  # the critic has none
        made = flatten(Cluster(1, 4), generation_engine="transformers").to_dict()
        made["calls"]["actor.train"] = {"mesh": "0-3", "engine": "megatron", "dp": 2, split: 2}
        plan = ExecutionPlan.from_dict(made)
        with nullcontext() if allowed else pytest.raises(ConfigError, match=told[split]):
            check_adapters_split(adapters, plan)
    splits = OptimizerSharding(tiny.arguments(tmp_path), None).splits_with(adapters)
    assert splits == TrainingSplits(tensor=by_tp, stages=by_pp)
    assert splits.allow("megatron", pp=2) is by_pp


@pytest.mark.parametrize("training", [{"dp": 2, "pp": 2}, {"dp": 2, "tp": 2}, {"dp": 4, "zero_stage": 1}])
def test_an_unknown_optimizer_is_refused_where_parameters_are_dealt(tmp_path: Path, training: dict[str, Any]) -> None:
    given = Normed([nn.Parameter(torch.ones(3, 2))])
    with pytest.raises(ConfigError, match="Normed is not among the optimizers that .*, so critic.train under"):
        _check_sharding(OptimizerSharding(tiny.arguments(tmp_path), given), _plan(engine="megatron", **training))


@pytest.mark.parametrize(
    ("named", "splits"), [("adamw_torch", TrainingSplits()), ("adafactor", TrainingSplits(elements=False))]
)
def test_the_planner_is_told_what_the_optimizer_allows(
    named: str, splits: TrainingSplits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def plan_job(job: Job, **_: Any) -> None:
        raise Asked(job.splits)

    request = PlanRequest(None, Cluster(1, 1), "transformers", [Process("a", "a", 0, 0, 0)], None)
    monkeypatch.setattr(ppo_trainer, "read_plan_request", lambda *_: request)
    monkeypatch.setattr(setup, "plan_job", plan_job)
    with pytest.raises(Asked) as asked:
        tiny.trainer(tmp_path, optim=named)
    assert asked.value.args == (splits,)
