"""What a plan leaves of a device's memory to what is not parameters and activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llamas import pricing, specs

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import flatten
from trl_realloc.planner.cost.device_memory import CONTEXT, DeviceMemory, gpu_memory
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.problem import estimate_plan
from trl_realloc.planner.search.show import memory_table
from trl_realloc.planner.search.space import Space


def test_a_plan_for_gpus_leaves_the_headroom_and_counts_contexts_and_communicators() -> None:
    bare = pricing(1)
    total = bare.memory.total
    full = choose(Space.of_run(specs(7, 7), bare), time_limit_s=1.0).best.estimate
    chosen = choose(Space.of_run(specs(7, 7), replace(bare, memory=gpu_memory(total))), time_limit_s=1.0).best
    estimate = chosen.estimate
    assert full.memory > 0.9 * total, "without a headroom these models fill the devices"
    assert estimate.memory <= 0.9 * total
    assert estimate.holds["contexts"] >= 2 * CONTEXT, "the trainer's process and the generation engine's"
    assert estimate.holds["communicators"] > 0
    assert sum(estimate.holds.values()) == pytest.approx(estimate.memory)


@pytest.mark.parametrize(("pp", "more"), [(1, 0), (2, 3), (4, 4)])
def test_a_pipeline_has_communicators_of_its_neighbours_too(pp: int, more: int) -> None:
    """Beside those of the stages, of their ends, and of each pair of neighbours."""
    whole, memory = flatten(Cluster(1, 8)), gpu_memory(80e9)
    counts = []
    for stages in (1, pp):
        split = Assignment(whole.cluster.mesh, ParallelStrategy(dp=8 // stages, pp=stages), "megatron")
        assignments = {**whole.assignments, "critic.train": split, "critic.forward": split}
        plan = replace(whole, assignments=assignments)
        priced = estimate_plan(plan, specs(1, 1), replace(pricing(1), memory=memory), exact=False)
        counts.append(round(priced.estimate.holds["communicators"] / memory.communicator))
    assert counts[1] - counts[0] == more


def test_the_parts_of_the_fullest_device_are_shown_with_what_is_free() -> None:
    space = Space.of_run(specs(7, 7), replace(pricing(1), memory=gpu_memory(80e9, 0.2)))
    chosen = choose(space, time_limit_s=0.5).best
    table = memory_table(chosen)
    parts = list(table.columns[0].cells)
    assert {"contexts", "communicators", "free (20% of 80 GB at least)"} <= set(parts)
    assert set(parts) & set(chosen.plan.assignments)
    sizes = [float(text) for text in table.columns[1].cells]
    assert sum(sizes) == pytest.approx(80, abs=0.1) and sizes[:-1] == sorted(sizes[:-1], reverse=True)


def test_of_two_trained_roles_on_a_device_one_has_gradients_at_a_time() -> None:
    plan = flatten(Cluster(1, 8))
    priced = estimate_plan(plan, specs(7, 7), pricing(1), exact=False)
    costs = priced.costs
    most = max(cost.transient for cost in costs.values())
    assert most == costs["actor.train"].transient > costs["actor.train"].gradients > 0
    held = sum(cost.static for name, cost in costs.items() if name != "critic.forward")  # in critic.train's layout
    assert priced.estimate.memory == pytest.approx(held + most)
    assert priced.estimate.holds["actor.train"] == costs["actor.train"].static


def test_usable_is_what_the_headroom_leaves() -> None:
    assert DeviceMemory(80e9, 0.25).usable == 60e9


@pytest.mark.parametrize("total", [16e9, 24e9, 40e9, 80e9, 80 * 2**30, 141e9])
def test_the_share_that_a_refusal_of_an_engine_names_is_taken_and_the_next_is_not(total: float) -> None:
    memory = gpu_memory(total)
    with pytest.raises(PlanError) as refused:
        memory.check_engine(1.0)
    share = float(str(refused.value).rpartition("to at most ")[2].rstrip("."))
    memory.check_engine(share)
    with pytest.raises(PlanError):
        memory.check_engine(share + 0.01)
