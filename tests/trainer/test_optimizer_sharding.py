"""Which optimizers may be sharded: known or seen on small matrices, and refused with the plan's word where not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from group_optimizers import Adapting, Counting
from peft import IA3Config, LoraConfig, VBLoRAConfig
from torch import nn
from transformers import Adafactor

from trl_realloc.engines.models import adapter_configs
from trl_realloc.engines.training.group_settings import copied, is_same
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten
from trl_realloc.planner.recipe.defaults import training_splits
from trl_realloc.planner.search.space import TrainingSplits
from trl_realloc.profiling.job import Job
from trl_realloc.runtime.launch.hosts import Process
from trl_realloc.trainer import ppo_trainer
from trl_realloc.trainer.checks.config_checks import ConfigError
from trl_realloc.trainer.checks.plan_checks import check_adapters_split, check_sharding
from trl_realloc.trainer.run import run_setup as setup
from trl_realloc.trainer.run.optimizer_probe import probed_splits
from trl_realloc.trainer.run.optimizer_sharding import (
    OptimizerSharding,
    can_be_sharded,
    splits_of,
    user_maker,
)
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


class Patient(torch.optim.Optimizer):
    """Sums over all parameters that change its steps only after many, as Prodigy's do at a small `d0`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "total": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        parameters = [(group["lr"], p) for group in self.param_groups for p in group["params"]]
        total = sum(float(p.grad.abs().sum()) for _, p in parameters if p.grad is not None)
        for group in self.param_groups:
            group["total"] += total
        for rate, p in parameters:
            if p.grad is not None:
                p -= rate * p.grad


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


KNOWN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adam, amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True, weight_decay=0.1),
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "Adamax": torch.optim.Adamax,
    "ASGD": lambda ps: torch.optim.ASGD(ps, weight_decay=0.1),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.0, momentum=0.9, nesterov=True),
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "Transformers' Adafactor": lambda ps: Adafactor(ps, lr=1e-3, relative_step=False),
    "Muon": torch.optim.Muon,
}
TESTED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], TrainingSplits]] = {
    "one norm of everything": (Normed, TrainingSplits(elements=False, parameters=False)),
    "a step size from everything": (Adapting, TrainingSplits(elements=False, parameters=False)),
    "sums of everything that have no effect yet": (Patient, TrainingSplits(elements=False, parameters=False)),
    "a count of steps in the group": (Counting, TrainingSplits(by_ranges=False)),
    "a subclass of a known one": (NormedAdamW, TrainingSplits(elements=False, parameters=False)),
}


def _with_groups(kind: Callable[[Any], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind(
        [{"params": [nn.Parameter(torch.ones(3, 2))]}, {"params": [nn.Parameter(torch.ones(3, 2))], "lr": 1e-3}]
    )


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_of_an_optimizer_is_what_a_test_of_it_finds(name: str) -> None:
    made = _with_groups(KNOWN[name])
    found = probed_splits(user_maker(made), 2, CPU)
    assert splits_of(user_maker(made), 2, CPU) == replace(found, by_deepspeed=name != "Adagrad")


@pytest.mark.parametrize("name", TESTED)
def test_an_optimizer_that_is_not_known_is_tested(name: str) -> None:
    kind, splits = TESTED[name]
    assert splits_of(user_maker(_with_groups(kind)), 2, CPU) == splits


def test_a_known_optimizer_with_a_hook_of_the_users_is_tested() -> None:
    made = _with_groups(torch.optim.AdamW)
    made.register_step_pre_hook(normed_gradients)
    assert splits_of(user_maker(made), 2, CPU) == TrainingSplits(elements=False, parameters=False)


@pytest.mark.parametrize("named", ["adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad", "adafactor"])
def test_a_recipe_is_planned_with_what_a_test_of_its_optimizer_finds(tmp_path: Path, named: str) -> None:
    """The names of Transformers that need no further package."""
    assert training_splits(named) == OptimizerSharding(tiny.arguments(tmp_path, optim=named), None).splits


def test_a_recipe_with_an_optimizer_that_counts_in_its_groups_is_planned_without_zero_stage_3() -> None:
    splits = training_splits("adamw_apex_fused")
    assert [splits.allow("zero", zero_stage=stage) for stage in range(4)] == [True, True, True, False]


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
def test_adafactor_is_refused_where_a_plan_cuts_parameters(
    tmp_path: Path, training: dict[str, Any], refused: str
) -> None:
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
    with pytest.raises(
        ConfigError, match="DeepSpeed does not keep the groups of optim='adagrad', so critic.train under"
    ):
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


def test_an_optimizer_that_counts_in_its_groups_is_not_stepped_range_by_range(tmp_path: Path) -> None:
    sharding = OptimizerSharding(tiny.arguments(tmp_path), Counting([nn.Parameter(torch.ones(3, 2))]))
    assert sharding.splits == TrainingSplits(by_ranges=False)
    assert [sharding.splits.allow("zero", zero_stage=stage) for stage in range(4)] == [True, True, True, False]
    for allowed in ({"engine": "zero", "zero_stage": 2}, {"engine": "megatron", "zero_stage": 1}):
        _check_sharding(sharding, _plan(dp=4, **allowed))
    with pytest.raises(
        ConfigError, match="Counting keeps numbers in its parameter groups.*critic.train under zero_stage: 3"
    ):
        _check_sharding(sharding, _plan(engine="zero", dp=4, zero_stage=3))
    assert not can_be_sharded(lambda module: Counting(module.parameters()), CPU), "a later plan may have ZeRO stage 3"


def test_testing_an_optimizer_leaves_its_groups_as_they_are() -> None:
    given = Adapting([nn.Parameter(torch.ones(3, 2))])
    before = copied(given.param_groups[0])
    probed_splits(user_maker(given), 1, CPU)
    assert all(is_same(value, before[key]) for key, value in given.param_groups[0].items() if key != "params")


@pytest.mark.parametrize("training", [{"dp": 2, "pp": 2}, {"dp": 4, "zero_stage": 1}])
def test_an_optimizer_with_a_norm_of_everything_is_refused_where_parameters_are_dealt_out(
    tmp_path: Path, training: dict[str, Any]
) -> None:
    given = Normed([nn.Parameter(torch.ones(3, 2))])
    with pytest.raises(ConfigError, match="Normed does not step each parameter by itself, so critic.train under"):
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
