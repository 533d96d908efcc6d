"""Engines that give their memory back between their calls, in the estimate of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llamas import pricing, specs

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten, with_sleeping_engines
from trl_realloc.planner.cost.device_memory import gpu_memory
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.priced_plan import PricedPlan
from trl_realloc.planner.search.problem import Problem
from trl_realloc.planner.search.space import Space


def priced(plan: ExecutionPlan) -> PricedPlan:
    prices = replace(pricing(1), memory=gpu_memory(80e9))
    problem = Problem(Space(plan.cluster, plan.graph, specs(7, 7), prices), {})
    return problem.priced_plan(problem.state_of(plan.assignments), "")


def test_a_sleeping_engines_share_counts_while_it_generates_alone() -> None:
    plan = flatten(Cluster(1, 8))
    awake, asleep = priced(plan), priced(with_sleeping_engines(plan))
    generate = asleep.calls["actor.generate"].cost
    share = 0.3 * 80e9
    assert generate.static == 0 and generate.transient == pytest.approx(share)
    most_else = max(c.cost.transient for name, c in awake.calls.items() if name != "actor.generate")
    saved = awake.estimate.memory - asleep.estimate.memory
    assert saved == pytest.approx(min(share, most_else), rel=0.01)
    assert asleep.plan["actor.generate"].drop, "also where the training holds the same parameters"
    assert 0 < generate.seconds - awake.calls["actor.generate"].cost.seconds < 2


def test_weights_that_rest_in_host_memory_are_copied_both_ways() -> None:
    plan = flatten(Cluster(1, 8))
    assignments = {**plan.assignments, "actor.generate": replace(plan["actor.generate"], offload=True)}
    offloaded = priced(replace(plan, assignments=assignments)).calls["actor.generate"].cost
    dropped = priced(with_sleeping_engines(plan)).calls["actor.generate"].cost
    assert offloaded.parts["load"] > dropped.parts["load"]
    assert (offloaded.static, offloaded.transient) == (dropped.static, dropped.transient)


@pytest.mark.parametrize("sleeps", [True, False])
def test_engines_sleep_or_do_not_where_the_job_says_so(sleeps: bool) -> None:
    prices = replace(pricing(1), memory=gpu_memory(80e9), vllm_sleeps=sleeps)
    best = choose(Space.of_run(specs(7, 7), prices), time_limit_s=1.0).best
    assert best.plan["actor.generate"].drop == sleeps


def test_engines_sleep_by_themselves_only_where_no_plan_fits_otherwise() -> None:
    prices = replace(pricing(1, 1), memory=gpu_memory(76e9), vllm_share=0.5)
    with pytest.raises(PlanError, match="fit on no plan"):
        choose(Space.of_run(specs(1, 1), replace(prices, vllm_sleeps=False)), time_limit_s=0.3)
    best = choose(Space.of_run(specs(1, 1), prices), time_limit_s=0.3).best
    assert best.fits and best.plan["actor.generate"].drop
    roomy = replace(prices, vllm_share=0.4)
    assert not choose(Space.of_run(specs(1, 1), roomy), time_limit_s=0.3).best.plan["actor.generate"].drop


def test_weights_to_an_engine_of_several_gpus_take_longer_than_to_one_of_one_gpu() -> None:
    """An engine of one GPU opens the sender's memory; others get theirs through the host's."""
    prices, (spec,) = replace(pricing(1), memory=gpu_memory(80e9)), specs(7, 7)["actor.generate"]
    seconds = {
        tp: prices.load_seconds(spec, Assignment(DeviceMesh(0, 8), ParallelStrategy(8 // tp, tp), "vllm"))
        for tp in (1, 2, 8)
    }
    bus = spec.bytes / prices.rates.host_bandwidth
    assert seconds[1] < bus / 2 and seconds[2] > seconds[8] > 1.3 * bus
    on_hosts = replace(prices, memory=None)
    assert on_hosts.load_seconds(spec, Assignment(DeviceMesh(0, 8), ParallelStrategy(4, 2), "vllm")) == bus
