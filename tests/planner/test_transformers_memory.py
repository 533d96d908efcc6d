"""What generation by Transformers in the training's model takes: weights that stay cast, and gathered parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from llamas import llama, pricing, specs

from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.plan.presets import flatten
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.hardware import DEVICES
from trl_realloc.planner.search.priced_plan import PricedPlan
from trl_realloc.planner.search.problem import Problem
from trl_realloc.planner.search.space import Space


SPEC = llama(7)
MASTERED = replace(SPEC, bytes_per_element=4)  # float32 parameters under bf16 autocast
CLUSTER = Cluster(1, 8)


def priced(stage: int, spec: ModelSpec) -> PricedPlan:
    models: dict[str, Sequence[ModelSpec]] = {**specs(), "actor.generate": (spec,), "actor.train": (spec,)}
    plan = flatten(CLUSTER, generation_engine="transformers", zero_stage=stage)
    problem = Problem(Space(CLUSTER, plan.graph, models, pricing()), {})
    return problem.priced_plan(problem.state_of(plan.assignments), "")


def test_weights_stay_cast_while_transformers_generates() -> None:
    plain, cast = (priced(0, spec).calls["actor.generate"].cost.transient for spec in (SPEC, MASTERED))
    assert cast - plain == pytest.approx(2 * SPEC.elements)


@pytest.mark.parametrize("spec", [SPEC, MASTERED])
def test_a_model_that_zero_3_trains_is_gathered_while_it_generates(spec: ModelSpec) -> None:
    whole, sharded = (priced(stage, spec) for stage in (2, 3))
    alone = whole.calls["actor.generate"].cost.transient
    assert sharded.calls["actor.generate"].cost.transient == alone
    holds = sharded.estimate.holds
    assert holds["while actor.generate runs"] == pytest.approx(alone + spec.bytes)
    assert sum(holds.values()) == pytest.approx(sharded.estimate.memory)
    assert whole.estimate.holds.get("while actor.generate runs", alone) == pytest.approx(alone)


def test_a_decode_step_reads_the_cast_weights() -> None:
    rates = AnalyticRates(DEVICES["h100"])
    assert rates.decode(MASTERED, 1, 128, 1) == rates.decode(SPEC, 1, 128, 1)
    assert rates.decode_head(MASTERED, 1, 1) == rates.decode_head(SPEC, 1, 1)
    rates = rates.changed(launch=0.0)
    assert rates.layer(MASTERED, 1, 1, 1) > rates.layer(SPEC, 1, 1, 1), "a forward casts each weight again"
