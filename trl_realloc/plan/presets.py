"""The preset plans for any number of devices, and `resolve_plan`, which reads a plan in any form that a user gives.

Plans that are searched for are in `planner`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ..common.errors import PlanError, nearest, shown
from ..common.files import exists
from .algorithm_graphs import ppo_graph
from .cluster import Cluster, DeviceMesh, halves
from .dataflow import CallKind, DataflowGraph, Role
from .execution_plan import Assignment, ExecutionPlan, ParallelStrategy


class Preset(Protocol):
    """Makes a plan for a cluster."""

    def __call__(self, cluster: Cluster, *, generation_engine: str = ..., zero_stage: int = ...) -> ExecutionPlan: ...


def flatten(cluster: Cluster, *, generation_engine: str = "vllm", zero_stage: int = 0) -> ExecutionPlan:
    """Every call on all devices, one after the other, as TRL does."""
    return _data_parallel("flatten", cluster, {}, generation_engine, zero_stage)


def interleave(cluster: Cluster, *, generation_engine: str = "vllm", zero_stage: int = 0) -> ExecutionPlan:
    """The reference scores on one half of the devices while the reward model scores on the other half. Every other call
    is on all devices. On one device this is `flatten`."""
    if cluster.size == 1:
        return flatten(cluster, generation_engine=generation_engine, zero_stage=zero_stage)
    first, second = halves(cluster)
    return _data_parallel(
        "interleave", cluster, {Role.REFERENCE: first, Role.REWARD: second}, generation_engine, zero_stage
    )


def separate(cluster: Cluster, *, generation_engine: str = "vllm", zero_stage: int = 0) -> ExecutionPlan:
    """Actor and critic train on one half of the devices. Generation and scoring are on the other half, with copies of
    both that are updated when they change. On one device this is `flatten`."""
    if cluster.size == 1:
        return flatten(cluster, generation_engine=generation_engine, zero_stage=zero_stage)
    training, inference = halves(cluster)
    return _data_parallel("separate", cluster, {}, generation_engine, zero_stage, training=training, other=inference)


AUTO = "auto"  # the planner's choice, for which the cluster's size is not enough

PRESETS: Mapping[str, Preset] = {"flatten": flatten, "interleave": interleave, "separate": separate}


def resolve_plan(
    plan: str | Path | Mapping[str, Any] | ExecutionPlan,
    cluster: Cluster,
    *,
    generation_engine: str = "vllm",
    zero_stage: int = 0,
) -> ExecutionPlan:
    """The plan for a job on `cluster`.

    Args:
        plan: a preset's name, the path of a YAML file, a plan as a dictionary, or a plan.
        generation_engine: `vllm` or `transformers`; only for a preset.
        zero_stage: of the trained roles; only for a preset.

    Raises:
        PlanError: the preset or file does not exist, the plan is invalid, or it is for another number of devices.
    """
    if isinstance(plan, str) and plan in PRESETS:
        return PRESETS[plan](cluster, generation_engine=generation_engine, zero_stage=zero_stage)
    if isinstance(plan, (str, Path)):
        resolved = load_plan(plan)
    elif isinstance(plan, Mapping):
        resolved = ExecutionPlan.from_dict(plan)
    elif isinstance(plan, ExecutionPlan):
        resolved = plan
    else:
        presets = ", ".join((AUTO, *PRESETS))
        raise PlanError(f"a plan is {presets}, a YAML file's path, a dict or an ExecutionPlan, not {shown(plan)}.")
    resolved.check_world(cluster.size)
    return resolved


def with_sleeping_engines(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with `drop` for every vLLM engine of which it does not say what happens between its uses."""
    assignments = {
        name: replace(a, drop=True) if a.engine == "vllm" and not a.offload else a
        for name, a in plan.assignments.items()
    }
    return replace(plan, assignments=assignments)


def load_plan(path: str | Path) -> ExecutionPlan:
    """The plan in a YAML file. Raises `PlanError`, which suggests a preset if there is no such file."""
    file = Path(path)
    if exists(file):
        return ExecutionPlan.load(file)
    presets = ", ".join(PRESETS)
    if file.suffix in (".yaml", ".yml") or len(file.parts) > 1:
        raise PlanError(f"there is no plan file {shown(str(path))}; give its path, or one of the presets {presets}.")
    near = nearest(str(path), (*PRESETS, AUTO))
    hint = f"; did you mean {near!r}?" if near else "."
    raise PlanError(f"{shown(str(path))} is neither a file nor one of the presets {presets}{hint}")


def _data_parallel(
    name: str,
    cluster: Cluster,
    meshes: Mapping[Role, DeviceMesh],
    generation_engine: str,
    zero_stage: int,
    *,
    training: DeviceMesh | None = None,
    other: DeviceMesh | None = None,
) -> ExecutionPlan:
    """A plan with every call data-parallel. A call that does not train has ZeRO stage 3 if `zero_stage` is 3, and
    otherwise 0, because it has no optimizer state or gradients to shard.

    Args:
        meshes: by role.
        training, other: the mesh of calls that train, and of other calls, for roles that are not in `meshes`; by
            default all devices.
    """
    graph: DataflowGraph = ppo_graph()
    assignments = {}
    for call in graph.calls:
        mesh = meshes.get(call.role, (training if call.trains else other) or cluster.mesh)
        if call.kind is CallKind.GENERATE:
            assignments[call.name] = Assignment(mesh, ParallelStrategy(dp=mesh.size), generation_engine)
        else:
            stage = zero_stage if call.trains or zero_stage == 3 else 0
            assignments[call.name] = Assignment(mesh, ParallelStrategy(dp=mesh.size, zero_stage=stage), "zero")
    return ExecutionPlan(cluster, assignments, graph, name)
