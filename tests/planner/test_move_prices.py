"""What prices a reallocation: its transfer schedule, and for thousands of devices a bound."""

from __future__ import annotations

import pytest
from llamas import llama, pricing

from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import DeviceMesh
from trl_realloc.planner.search import problem as problems
from trl_realloc.planner.search.problem import Problem
from trl_realloc.planner.search.space import Space
from trl_realloc.realloc.layout import layout_of
from trl_realloc.realloc.schedule import make_schedule, schedule_entries


def priced(nodes: int) -> tuple[float, Assignment, Assignment]:
    """(seconds of the actor's reallocation, its layouts): from ZeRO 3 on all devices, where each has a piece of every
    parameter, to engines of a node each."""
    prices = pricing(nodes)
    space = Space(prices.cluster, graph := grpo_graph(), {call.name: (llama(70),) for call in graph.calls}, prices)
    everywhere = DeviceMesh(0, 8 * nodes)
    shards = Assignment(everywhere, ParallelStrategy(8 * nodes, zero_stage=3), "zero")
    engines = Assignment(everywhere, ParallelStrategy(nodes, tp=8), "vllm")
    problem = Problem(space, {})
    plan = dict.fromkeys(problem.names, shards) | {"actor.generate": engines}
    moves = problem.priced_plan(problem.state_of(plan), "").estimate.moves
    return moves["actor.generate"], shards, engines


def test_the_bound_of_a_wide_reallocation_is_what_its_schedule_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    by_schedule, _, _ = priced(32)
    monkeypatch.setattr(problems, "MAX_SCHEDULE_S", 0.0)
    by_bound, _, _ = priced(32)
    assert by_bound != by_schedule
    assert by_bound == pytest.approx(by_schedule, rel=0.03)


@pytest.mark.timeout(60)
def test_a_reallocation_of_4096_devices_is_priced_at_once() -> None:
    """Its schedule would take minutes, and gigabytes."""
    few, many = priced(32)[0], priced(512)[0]
    assert many == pytest.approx(few, rel=0.03)


def test_the_size_of_a_schedule_is_known_before_it_is_made() -> None:
    _, source, target = priced(4)
    layouts = [layout_of(assignment, llama(70)) for assignment in (source, target)]
    schedule = make_schedule(pricing(4).cluster, layouts[0], layouts[1])
    assert schedule.entries <= schedule_entries(layouts[0], layouts[1]) <= 1.1 * schedule.entries
