"""The parameter groups of an engine's optimizer: what the run sets, and what the optimizer keeps there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from group_optimizers import Adapting, Counting
from torch import nn

from trl_realloc.engines.base import GROUP
from trl_realloc.engines.training.optimizer_state import GroupSettings, copied, is_same


def stepped(optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()


def weights(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def test_each_parameter_group_is_set_to_its_own_settings() -> None:
    a, b = weights(2)
    groups: list[dict[str, Any]] = [{"params": [a], GROUP: 2}, {"params": [b], GROUP: 0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    settings = GroupSettings(optimizer)
    settings.give([{"lr": 0.5, "momentum": 0.9}, {"lr": 0.1}, {"lr": 0.2}])
    assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == [(0.2, 0), (0.5, 0.9)]
    settings.give(0.3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.3]
    assert settings.numbers() == {2: {}, 0: {}}, "they are the run's"


def test_a_setting_that_changes_is_followed_and_what_the_optimizer_keeps_stays() -> None:
    optimizer = Adapting([{"params": weights(2), GROUP: 0}])
    settings = GroupSettings(optimizer)
    (group,) = optimizer.param_groups
    scheduled = {key: value for key, value in group.items() if key != "params"}
    kept = []
    for betas, growth in [((0.9, 0.99), 1.25), ((0.8, 0.99), 1.25), ((0.9, 0.99), 1.5)]:
        scheduled |= {"betas": betas, "growth": growth, "lr": 0.5}
        settings.give([scheduled])
        assert (group["betas"], group["growth"], group["lr"]) == (betas, growth, 0.5)
        stepped(optimizer, 1)
        kept.append((group["k"], group["d"]))
    assert [k for k, _ in kept] == [1, 2, 3] and kept[0][1] < kept[1][1] < kept[2][1]
    assert settings.numbers()[0].keys() == {"k", "d", "numerator"}
    scheduled["k"] = 7  # by a callback
    settings.give([scheduled])
    stepped(optimizer, 1)
    settings.give([scheduled])
    assert group["k"] == 8


@pytest.mark.parametrize("kind", [Adapting, Counting])
def test_numbers_are_loaded_in_the_place_of_the_present_ones(kind: Any) -> None:
    first, other = kind(weights(1)), kind(weights(1))
    of_first, of_other = GroupSettings(first), GroupSettings(other)
    stepped(first)
    saved = of_first.numbers()
    stepped(first)
    of_other.load(saved)
    of_first.load(saved)
    for optimizer in (first, other):
        (group,) = optimizer.param_groups
        assert group["k" if kind is Adapting else "step"] == 3
    assert of_first.numbers() == of_other.numbers() == saved
    of_first.load({})
    assert of_first.numbers() == {0: {}} and "step" not in first.param_groups[0]


def test_a_group_without_parameters_says_nothing_and_is_told_the_numbers() -> None:
    optimizer = Counting([{"params": weights(1)}, {"params": []}])
    settings = GroupSettings(optimizer)
    stepped(optimizer)
    assert settings.numbers() == {0: {"step": 3}} and settings.empty() == {0: {}, 1: {}}
    settings.load({0: {"step": 5}, 1: {"step": 5}})
    assert [group["step"] for group in optimizer.param_groups] == [5, 5]


def test_values_that_cannot_be_compared_or_are_not_finite_do_no_harm() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ValueError

    optimizer = torch.optim.SGD([{"params": weights(1), GROUP: 0, "odd": Odd(), "best": 1.0}], lr=0.1)
    settings = GroupSettings(optimizer)
    optimizer.param_groups[0] |= {"best": math.nan, "rates": [1, 2]}
    numbers = settings.numbers()[0]
    assert numbers.keys() == {"best"} and math.isnan(numbers["best"])
    new = Odd()
    settings.give([{"lr": 0.2, "odd": new}])
    assert optimizer.param_groups[0]["odd"] is new


def test_a_copy_of_settings_follows_no_change_in_place_and_keeps_parameters_that_are_in_them() -> None:
    (named,) = weights(1)
    first = {"params": [named], "lr": torch.tensor(0.1), "betas": [0.9, torch.tensor(0.5)], "named": {"a": [named]}}
    copy = copied(first)
    assert "params" not in copy and copy["named"]["a"][0] is named
    first["lr"].fill_(0.2)  # type: ignore[attr-defined]
    first["betas"][0] = 0.8  # type: ignore[index]
    first["betas"][1].fill_(0.6)  # type: ignore[index]
    assert is_same(copy["lr"], torch.tensor(0.1)) and copy["betas"] == [0.9, 0.5]
