"""Process groups of a plan, as one process can see them."""

from __future__ import annotations

import resource
from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.plan.presets import flatten, separate
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.device_memory import DeviceMemory
from trl_realloc.planner.cost.hardware import DEVICES
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.search.problem import estimate_plan
from trl_realloc.runtime.process_groups import (
    LONGEST_CALL,
    destroy_groups,
    from_first_rank,
    make_groups,
    make_reallocation_groups,
    make_split_groups,
)


FLAT = flatten(Cluster(1, 4)).to_dict()
SPLIT = {"mesh": "0-3", "engine": "megatron", "dp": 1, "tp": 2, "pp": 2}
FUSED = ExecutionPlan.from_dict(
    {
        **FLAT,
        "calls": {name: call if name.endswith("generate") else SPLIT for name, call in FLAT["calls"].items()},
        "fused": ["actor.train", "critic.train"],
    }
)


@pytest.mark.parametrize("limit", [timedelta(seconds=77), 2 * LONGEST_CALL])
def test_every_group_has_the_time_limit_of_the_config_and_that_of_samples_a_day_at_least(limit: timedelta) -> None:
    plan = flatten(Cluster(1, 1), zero_stage=1)  # DeepSpeed wants a group of one rank
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups, control = make_groups(plan, 0, limit)
        assert not make_split_groups(plan, 0, limit) and not make_reallocation_groups(plan, 0, limit)
        made = [mesh.group for mesh in groups.values() if mesh.group is not None]
        *limits, of_samples = [g._get_backend(torch.device("cpu")).options._timeout for g in (*made, control)]
        assert limits and set(limits) == {limit}
        assert of_samples == max(limit, LONGEST_CALL)
    finally:
        dist.destroy_process_group()


def test_a_rank_may_open_as_many_files_as_gloo_has_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    make_groups(separate(Cluster(64, 8)), 0, timedelta(seconds=1))
    assert limits == [(4096, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(PlanError, match=r"at least 2048 connections over gloo, .* open 1024 files; raise that limit"):
        make_groups(separate(Cluster(64, 8)), 0, timedelta(seconds=1))


def test_no_group_is_a_part_of_a_default_group_that_is_bound_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed binds that of a job on GPUs. To divide its communicator torch needs all ranks, also those that are not
    in the new group, and not for a gloo group of theirs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world: Any = dist.group.WORLD
    seen: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> None:
        seen.append(world.bound_device_id)

    world.bound_device_id = torch.device("cuda", 0)
    monkeypatch.setattr(dist, "new_group", make)
    try:
        with monkeypatch.context() as patched:
            patched.setattr("trl_realloc.runtime.process_groups.is_accelerator", lambda device: True)
            patched.setattr("trl_realloc.runtime.process_groups._host_groups", [])
            patched.setattr(dist, "broadcast_object_list", lambda *args, **kwargs: None)
            from_first_rank(0, 1.0)
            plan, limit = separate(Cluster(1, 4), zero_stage=2), timedelta(seconds=1)
            for rank_values in (0, 3):
                make_groups(plan, rank_values, limit)
                make_reallocation_groups(plan, rank_values, limit)
                make_split_groups(FUSED, rank_values, limit)
        assert len(seen) > 10 and not any(seen)
        assert world.bound_device_id == torch.device("cuda", 0)
    finally:
        world.bound_device_id = None
        dist.destroy_process_group()


PLANS = {
    "flatten": flatten(Cluster(1, 4)),
    "separate, ZeRO": separate(Cluster(1, 4), zero_stage=2),
    "one device": flatten(Cluster(1, 1)),
    "fused": FUSED,
    "split": replace(FUSED, fused=()),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_planner_counts_the_communicators_that_a_run_makes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, limit, made = PLANS[name], timedelta(seconds=1), list[list[int]]()

    def make(ranks: list[int] | None = None, backend: str | None = None, **_: Any) -> None:
        if backend is None and ranks is not None and len(ranks) > 1:
            made.append(ranks)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "new_group", make)
    monkeypatch.setattr("trl_realloc.runtime.process_groups.is_accelerator", lambda device: True)
    try:
        make_groups(plan, 0, limit)
        make_split_groups(plan, 0, limit)
        make_reallocation_groups(plan, 0, limit)
    finally:
        dist.destroy_process_group()
    of_job = int(plan.cluster.size > 1)
    rates = AnalyticRates(DEVICES["h100"])
    pricing = Pricing(plan.cluster, Workload(8, 4, (4,)), rates, memory=DeviceMemory(80e9, 0.0, 0.0, 1.0))
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_attention_heads": 4, "vocab_size": 100}
    spec = ModelSpec.from_config(config, bytes_per_element=2)
    holds = estimate_plan(plan, dict.fromkeys(plan.order, (spec,)), pricing).estimate.holds
    split = {(a.mesh, a.strategy.tp, a.strategy.pp) for a in plan.assignments.values() if a.engine == "megatron"}
    of_pairs = sum(min(2, pp - 1) for mesh, _, pp in split if 0 in mesh)  # of neighbouring stages
    assert holds.get("communicators", 0.0) == sum(0 in ranks for ranks in made) + of_job + of_pairs


@pytest.mark.parametrize("name", [name for name in PLANS if name != "one device"])
def test_two_ranks_destroy_the_groups_that_they_share_in_one_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits in the end of a communicator for its other ranks."""
    plan, limit, made = PLANS[name], timedelta(seconds=1), list[Any]()
    destroyed: dict[int, list[Any]] = {rank: [] for rank in range(plan.cluster.size)}

    def make(ranks: list[int] | None = None, **_: Any) -> Any:
        made.append((len(made), tuple(ranks or range(plan.cluster.size))))
        return FakeGroup(*made[-1]) if ranks is None or here in ranks else dist.GroupMember.NON_GROUP_MEMBER

    class FakeGroup(dist.ProcessGroup):
        def __init__(self, number: int, ranks: tuple[int, ...]) -> None:
            super().__init__(ranks.index(here), len(ranks))
            self.made_as = number, ranks

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with monkeypatch.context() as patched:
        patched.setattr(dist, "new_group", make)
        patched.setattr(dist, "destroy_process_group", lambda group: destroyed[here].append(group.made_as))
        for here in destroyed:
            made.clear()
            groups, control = make_groups(plan, here, limit)
            split, edges = make_split_groups(plan, here, limit), make_reallocation_groups(plan, here, limit)
            destroy_groups((groups, split, edges, control))
    dist.destroy_process_group()
    for one, other in combinations(destroyed, 2):
        first, second = ([ranks for _, ranks in destroyed[rank] if {one, other} <= set(ranks)] for rank in (one, other))
        assert first == second and first
