"""What ZeRO stages cost beyond replicas, measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from llamas import work
from test_profile import ACTOR, BANDWIDTH, CRITIC, FORWARD, STEP, TRAIN, made_up

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.planner.cost.measured_rates import MeasuredRates
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.profile import Observation, Profile, model_key


EXTRA = {1: 1.5, 2: 2.5, 3: 6.0}  # seconds of an optimizer step of one micro-batch


def measured(stages: tuple[int, ...] = (1, 2, 3)) -> Profile:
    profile, rows = made_up(), []
    for spec in (ACTOR, CRITIC):
        counts: dict[str, Any] = {"layers": spec.layers, "elements": float(spec.elements), "bytes": float(spec.bytes)}
        for tokens in (2000.0, 4000.0):
            counts |= {"tokens": tokens, "squared": 50 * tokens, "answered": tokens / 2, "micro": 1.0}
            for stage in stages:
                seconds = TRAIN * tokens + STEP / 4 + EXTRA[stage] * spec.bytes / ACTOR.bytes
                rows.append(Observation("train", model_key(spec), seconds, 4, steps=1.0, zero_stage=stage, **counts))
            if 3 in stages:
                seconds = FORWARD * tokens + 2.0 * spec.bytes / ACTOR.bytes
                rows.append(Observation("forward", model_key(spec), seconds, 4, zero_stage=3, **counts))
    return replace(profile, observations=(*profile.observations, *rows))


def seconds(profile: Profile, call: str, stage: int) -> float:
    pricing = Pricing(Cluster(1, 4), work(episodes=64, epochs=1, recompute=False), MeasuredRates(profile))
    strategy = ParallelStrategy(4, zero_stage=stage)
    return pricing.price(ppo_graph().call(call), [ACTOR], Assignment(DeviceMesh(0, 4), strategy, "zero")).seconds


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_costs_what_it_took_beyond_the_arithmetic(stage: int) -> None:
    whole = seconds(measured(), "actor.train", 0)
    reduction = 1.5 * ACTOR.elements * 4 / BANDWIDTH  # of the replicas' gradients, in float32
    expected = whole - reduction - STEP * 3 / 4 + EXTRA[stage]
    assert seconds(measured(), "actor.train", stage) == pytest.approx(expected, rel=0.1)


def test_scoring_under_stage_3_costs_what_it_took_to_gather() -> None:
    whole = seconds(measured(), "reference.forward", 0)
    assert seconds(measured(), "reference.forward", 3) == pytest.approx(whole + 2.0, rel=0.1)


def test_without_measurements_a_stage_costs_what_the_formula_says() -> None:
    rates = MeasuredRates(measured(stages=(1,)))
    assert rates.zero(1, trains=True) != 1.0
    assert rates.zero(3, trains=True) == rates.zero(3, trains=False) == 1.0


def test_measurements_of_stages_change_nothing_of_replicas() -> None:
    assert seconds(measured(), "actor.train", 0) == seconds(made_up(), "actor.train", 0)
    assert MeasuredRates(measured()).reallocation(1e9) == MeasuredRates(made_up()).reallocation(1e9)


def test_a_measured_stage_without_its_micro_batches_is_refused(tmp_path: Any) -> None:
    rows = [replace(row, micro=0.0) for row in measured().observations]
    replace(measured(), observations=tuple(rows)).save(tmp_path / "profile.json")
    with pytest.raises(PlanError, match="micro is 0"):
        Profile.load(tmp_path / "profile.json")
