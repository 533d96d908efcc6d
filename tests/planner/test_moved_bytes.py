"""The bytes of a reallocation, in the dtype in which its target takes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llamas import pricing, specs

from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import separate
from trl_realloc.planner.search.problem import Problem
from trl_realloc.planner.search.space import Space


@pytest.mark.parametrize("exact", [True, False])
def test_a_generation_engine_in_16_bits_gets_half_of_the_bytes(exact: bool) -> None:
    plan, narrow = separate(Cluster(1, 8)), specs(7, 7)
    wide = {call: tuple(replace(spec, bytes_per_element=4) for spec in of_call) for call, of_call in narrow.items()}
    mixed = {**wide, "actor.generate": narrow["actor.generate"]}

    def moves(of_call: object) -> dict[str, float]:
        problem = Problem(Space(plan.cluster, plan.graph, of_call, pricing(1)), {})  # type: ignore[arg-type]
        return dict(problem.priced_plan(problem.state_of(plan.assignments), "", exact=exact).estimate.moves)

    in_wide, in_mixed = moves(wide), moves(mixed)
    assert in_mixed["actor.generate"] == pytest.approx(in_wide["actor.generate"] / 2, rel=0.05)
    assert in_mixed["critic.forward"] == in_wide["critic.forward"]
