"""The user's optimizer and its rates: every class, each group as its scheduler has it, and what is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from group_optimizers import Adapting
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from transformers.optimization import Adafactor, get_linear_schedule_with_warmup

from trl_realloc import PPOTrainer
from trl_realloc.engines.training.optimizer_state import GroupSettings
from trl_realloc.plan.dataflow import Role
from trl_realloc.trainer.checks.config_checks import ConfigError
from trl_realloc.trainer.checks.optimizer_checks import check_optimizer
from trl_realloc.trainer.run.optimizers import LearningRates, make_optimizer, part_of, without_whole


OPTIM = torch.optim
KINDS = [
    *(OPTIM.Adadelta, OPTIM.Adafactor, OPTIM.Adagrad, OPTIM.Adam, OPTIM.AdamW, OPTIM.Adamax, OPTIM.ASGD, OPTIM.Muon),
    *(OPTIM.NAdam, OPTIM.RAdam, OPTIM.RMSprop, OPTIM.Rprop, OPTIM.SGD),
    Adafactor,
]


def linears() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))


def stepped(modules: nn.ModuleList, optimizers: list[Any], steps: int = 3) -> list[torch.Tensor]:
    """The weights after some steps on the same loss."""
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        sum(module(inputs).square().sum() for module in modules).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [module.weight.detach().clone() for module in modules]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__.split('.')[0]}-{kind.__name__}")
def test_the_parts_of_an_optimizer_step_as_the_whole_of_it(kind: Any) -> None:
    whole = linears()
    cut = copy.deepcopy(whole)
    options: dict[str, Any] = {"scale_parameter": False, "relative_step": False} if kind is Adafactor else {}

    def made(modules: nn.ModuleList) -> Any:
        groups = [{"params": [module.weight], "lr": rate} for module, rate in zip(modules, (0.1, 0.02), strict=True)]
        return kind(groups, lr=0.1, **options)

    expected = stepped(whole, [made(whole)])
    given = made(cut)
    LambdaLR(given, lambda step: 1.0)  # it wraps the given optimizer's `step`
    parts = [part_of(given, module) for module in cut]
    assert all(type(part) is kind for part in parts)
    for one, other in zip(expected, stepped(cut, parts), strict=True):
        assert torch.equal(one, other)


def test_a_part_goes_on_from_the_state_that_the_users_optimizer_has() -> None:
    whole = linears()
    optimizer = torch.optim.Adam(whole.parameters(), lr=0.1)
    stepped(whole, [optimizer])
    cut = copy.deepcopy(whole)
    given = torch.optim.Adam(cut.parameters(), lr=0.1)
    given.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    parts = [part_of(given, module) for module in cut]
    expected = stepped(whole, [optimizer], steps=1)
    assert all(torch.equal(a, b) for a, b in zip(expected, stepped(cut, parts, steps=1), strict=True))


def groups_of(model: Any, value: Any) -> list[dict[str, Any]]:
    """The policy's head apart from the rest of it, and the critic: a rate each."""
    head = [model.lm_head.weight]
    rest = [p for p in model.parameters() if p is not head[0]]
    return [{"params": rest, "lr": 0.4}, {"params": head, "lr": 0.2}, {"params": list(value.parameters()), "lr": 0.1}]


@pytest.mark.parametrize("schedule", ["linear", "constant_with_warmup"])
def test_a_second_training_has_the_rates_of_the_first(tmp_path: Path, schedule: str) -> None:
    made = tiny.trainer(tmp_path, lr_scheduler_type=schedule, warmup_steps=1, max_steps=3)
    rates = []
    for _ in range(2):
        made.train()
        rates.append([log["lr"] for log in made.state.log_history if "lr" in log])
    made.close()
    assert rates[0] == rates[1] and len(set(rates[0])) > 1


@pytest.mark.parametrize("kind", ["warmup", "lambdas", "plain"])
def test_every_group_follows_its_own_rate(tmp_path: Path, kind: str) -> None:
    """Warmup begins with every group at 0; of one lambda for each group every one is followed."""
    args, model, value = tiny.arguments(tmp_path, lr_scheduler_type="linear"), tiny.policy(), tiny.classifier()
    given = torch.optim.AdamW(groups_of(model, value))
    scheduler: Any = None
    expected = [[0.4, 0.2, 0.1], [0.4, 0.2, 0.1]]
    if kind == "warmup":
        scheduler = get_linear_schedule_with_warmup(given, 4, 1000)
        expected = [[0.0, 0.0, 0.0], [0.1, 0.05, 0.025]]
    elif kind == "lambdas":
        scheduler = LambdaLR(given, [lambda step: 1.0, lambda step: 0.5**step, lambda step: 0.0])
        expected = [[0.4, 0.2, 0.0], [0.4, 0.1, 0.0]]
    check_optimizer(args, given, scheduler, {"model": model, "value_model": value})
    rates = LearningRates.of(args, given, scheduler)
    parts = {Role.ACTOR: part_of(given, model), Role.CRITIC: part_of(given, value)}
    for step in range(2):
        for role, part in parts.items():
            GroupSettings(part).give(rates.role(role))
        told = [group["lr"] for part in parts.values() for group in part.param_groups]
        assert told == pytest.approx(expected[step])
        rates.scheduled.step()
        if scheduler is not None:
            scheduler.step()


def test_a_scheduler_that_changes_betas_changes_them_in_the_roles(tmp_path: Path) -> None:
    args, model, value = tiny.arguments(tmp_path), tiny.policy(), tiny.classifier()
    given = torch.optim.AdamW([*model.parameters(), *value.parameters()], lr=0.1)
    scheduler = OneCycleLR(given, max_lr=0.1, total_steps=4)
    part = part_of(given, model)
    settings = GroupSettings(part)
    given.step()
    scheduler.step()
    settings.give(LearningRates.of(args, given, scheduler).role(Role.ACTOR))
    assert part.param_groups[0]["betas"] == given.param_groups[0]["betas"] != (0.9, 0.999)


def test_the_scheduled_optimizer_is_not_stepped_and_is_the_users_afterwards(recwarn: pytest.WarningsRecorder) -> None:
    """A step without gradients may count in the groups, or fail."""
    weight = nn.Parameter(torch.ones(2))
    given = Adapting([weight])
    scheduler = LambdaLR(given, lambda step: 0.5**step)
    rates = LearningRates.of(None, given, scheduler, [Role.ACTOR])  # type: ignore[arg-type]
    with rates.unstepped():
        LambdaLR(given, lambda step: 1.0)  # a scheduler that is made in the training
        for _ in range(2):
            given.step()
            scheduler.step()
    assert given.param_groups[0]["k"] == 0 and given.param_groups[0]["lr"] == 0.25 and not recwarn.list
    weight.grad = torch.ones(2)
    given.step()
    assert given.param_groups[0]["k"] == 1 and not torch.equal(weight, torch.ones(2))


def test_what_is_saved_of_the_settings_is_what_has_changed(tmp_path: Path) -> None:
    def made() -> tuple[Any, Any, LearningRates]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.1)
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        return optimizer, scheduler, LearningRates.of(None, optimizer, scheduler, [Role.ACTOR])  # type: ignore[arg-type]

    optimizer, scheduler, rates = made()
    (first,) = rates.changed()
    assert first == {"lr": optimizer.param_groups[0]["lr"]}
    optimizer.step()
    scheduler.step()
    optimizer.param_groups[0]["hook"] = print  # a checkpoint cannot hold it
    (changed,) = rates.changed()
    assert changed.keys() == {"lr", "betas"}
    torch.save([changed], tmp_path / "saved.pt")
    other, _, again = made()
    other.param_groups[0]["eps"] = 1.0
    again.restore(torch.load(tmp_path / "saved.pt", weights_only=True))
    assert [other.param_groups[0][key] for key in ("lr", "betas", "eps")] == [*changed.values(), 1e-8]


def test_an_adamw_of_torch_trains_without_a_scheduler(tmp_path: Path) -> None:
    """Its defaults are not its constructor's arguments. The schedule is the config's, for each group from its rate."""
    model, value = tiny.policy(), tiny.classifier()
    given = torch.optim.AdamW(groups_of(model, value))
    made = tiny.trained(
        tmp_path,
        given={"model": model, "value_model": value, "optimizers": (given, None)},
        lr_scheduler_type="linear",
        max_steps=2,
    )
    assert [group["lr"] for group in made.placement.engine("actor.train").optimizer.param_groups] == [0.2, 0.1]
    assert [group["lr"] for group in made.placement.engine("critic.train").optimizer.param_groups] == [0.05]
    assert made.placement.engine("actor.train").optimizer.state and not given.state


@pytest.mark.parametrize("name", ["adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop"])
def test_the_optimizers_that_the_arguments_name_are_made(tmp_path: Path, name: str) -> None:
    args, models = tiny.arguments(tmp_path, optim=name), {"model": tiny.policy(), "value_model": tiny.classifier()}
    check_optimizer(args, None, None, models)
    assert make_optimizer(args, linears())


def test_a_policy_alone_is_trained_at_the_policys_rate(tmp_path: Path) -> None:
    args, model = tiny.arguments(tmp_path, learning_rate=1e-3), tiny.policy()
    check_optimizer(args, None, None, {"model": model})
    rates = LearningRates.of(args, None, None, [Role.ACTOR])
    assert len(rates.scheduled.param_groups) == 1 and rates.role(Role.ACTOR) == rates.first == 1e-3
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ConfigError, match="of model; make it over the parameters of model, after loading"):
        check_optimizer(args, other, None, {"model": model})
    given = torch.optim.SGD(model.parameters(), lr=0.3)
    check_optimizer(args, given, None, {"model": model})
    assert LearningRates.of(args, given, None, [Role.ACTOR]).role(Role.ACTOR)[0]["lr"] == 0.3


def refused(tmp_path: Path, given: Any, scheduler: Any = None, **changes: Any) -> str:
    models = {"model": tiny.policy(), "value_model": tiny.classifier()}
    own = given([p for model in models.values() for p in model.parameters()]) if given else None
    with pytest.raises(ConfigError) as caught:
        check_optimizer(tiny.arguments(tmp_path, **changes), own, scheduler, models)
    return str(caught.value)


def test_what_cannot_train_the_roles_is_refused_by_name(tmp_path: Path) -> None:
    assert "LBFGS" in refused(tmp_path, lambda p: torch.optim.LBFGS(p))
    assert "SparseAdam" in refused(tmp_path, lambda p: torch.optim.SparseAdam(p))
    assert "holds no trainable parameter of value_model" in refused(tmp_path, lambda p: torch.optim.SGD(p[:3], lr=1.0))
    assert "value_learning_rate" in refused(tmp_path, torch.optim.AdamW, value_learning_rate=1e-3)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    assert "another optimizer" in refused(tmp_path, torch.optim.AdamW, LambdaLR(other, lambda step: 1.0))
    assert "without the optimizer" in refused(tmp_path, None, LambdaLR(other, lambda step: 1.0))
    for optim in ("lomo", "galore_adamw", "apollo_adamw"):
        assert optim in refused(tmp_path, None, optim=optim)


def test_what_makes_a_part_of_the_users_optimizer_keeps_its_settings_without_the_parameters() -> None:
    model = torch.nn.Linear(2, 2)
    weight = weakref.ref(model.weight)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "weight_decay": 0.25}]
    make = partial(part_of, torch.optim.AdamW(groups, betas=(0.8, 0.9)))
    make(model)
    made = without_whole(make)
    del model, groups, make
    gc.collect()
    assert weight() is None
    settings = made.args[0]
    assert isinstance(settings, torch.optim.AdamW)
    assert [(group["lr"], group["weight_decay"]) for group in settings.param_groups] == [(0.5, 0.01), (1e-3, 0.25)]
    assert settings.param_groups[0]["betas"] == (0.8, 0.9)


class Overriding(PPOTrainer):
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        raise AssertionError("not called")


def test_an_optimizer_that_ppo_would_not_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Overriding.create_optimizer_and_scheduler is not called"):
        tiny.trainer(tmp_path, kind=Overriding)
    made = tiny.trainer(tmp_path)
    made.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ConfigError, match="trainer.optimizer has been set to another SGD"):
        made.train()
