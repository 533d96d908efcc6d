"""Plans for optimizers that need whole parameters: what trains is not split, what is frozen may be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llamas import pricing, specs, work

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.planner.cost.device_memory import DeviceMemory
from trl_realloc.planner.search.ahead_choice import _separate_presets
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.problem import Problem
from trl_realloc.planner.search.space import Space, TrainingSplits


MODELS = specs(1, 1)
PRICES = replace(pricing(1, 4), memory=DeviceMemory(70e9))
TRAINED = ("actor.train", "critic.train")


@pytest.mark.parametrize("splits", [TrainingSplits(elements=False), TrainingSplits(elements=False, parameters=False)])
def test_no_training_call_is_split_as_the_optimizer_does_not_allow(splits: TrainingSplits) -> None:
    space = Space(PRICES.cluster, ppo_graph(), MODELS, PRICES, splits=splits)
    candidates = space.candidates()
    for name in TRAINED:
        layouts = {(c.assignment.engine, *c.assignment.strategy.layout[1:]) for c in candidates[name]}
        assert all(tp == 1 and not (engine == "zero" and stage) for engine, tp, _, stage in layouts)
        if not splits.parameters:
            assert layouts == {("zero", 1, 1, 0)}
    strategies = [c.assignment.strategy for c in candidates["reference.forward"]]
    assert any(strategy.zero_stage == 3 or strategy.tp > 1 for strategy in strategies), "frozen roles may be split"
    assert [plan.name for plan in _separate_presets(Problem(space, {}))] == ["separate"]


def test_what_trains_under_another_adapter_than_plain_lora_is_not_split_by_tp() -> None:
    splits = TrainingSplits(tensor=False)
    candidates = Space(PRICES.cluster, ppo_graph(), MODELS, PRICES, splits=splits).candidates()
    strategies = [c.assignment.strategy for name in TRAINED for c in candidates[name]]
    assert {strategy.tp for strategy in strategies} == {1} and any(strategy.zero_stage for strategy in strategies)
    prices = replace(pricing(1, 1), memory=DeviceMemory(50e9))
    with pytest.raises(PlanError, match="An adapter that is not plain LoRA is not split by tp"):
        choose(Space.of_run(specs(70, 7), prices, splits=splits, generation_engine="transformers"), time_limit_s=0.1)


def test_the_planner_proposes_plans_that_the_optimizer_allows_and_no_others() -> None:
    """With these models it would shard the optimizer's state."""
    split = choose(Space.of_run(MODELS, PRICES), time_limit_s=0.5).best.plan
    assert any(split[name].strategy.zero_stage or split[name].strategy.tp > 1 for name in TRAINED)
    decision = choose(Space.of_run(MODELS, PRICES, splits=TrainingSplits(False, False)), time_limit_s=0.5)
    plans = [decision.best.plan, *(other.plan.plan for other in decision.alternatives if other.plan is not None)]
    for plan in plans:
        for name in TRAINED:
            assert plan[name].strategy.layout[1:] == (1, 1, 0)


def test_a_refusal_says_that_the_optimizer_leaves_what_trains_whole() -> None:
    prices = replace(pricing(1, 2, work(episodes=8)), memory=DeviceMemory(50e9))
    with pytest.raises(PlanError, match=r"The optimizer may not support training in parts.*adamw_torch"):
        choose(
            Space.of_run(specs(7, 7), prices, splits=TrainingSplits(elements=False, parameters=False)), time_limit_s=0.1
        )
