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
from .algorithm_graphs import PROXIMAL_CALL, ppo_graph
from .cluster import Cluster, DeviceMesh, halves
from .dataflow import CallKind, DataflowGraph, Role
from .execution_plan import Assignment, ExecutionPlan, ParallelStrategy


class Preset(Protocol):
    """Makes a plan for a cluster."""

    def __call__(
        self, cluster: Cluster, *, generation_engine: str = ..., zero_stage: int = ..., proximal: bool = ...
    ) -> ExecutionPlan: ...


def flatten(
    cluster: Cluster, *, generation_engine: str = "vllm", zero_stage: int = 0, proximal: bool = False
) -> ExecutionPlan:
    """Every call on all devices, one after the other, as TRL does."""
    plan = _data_parallel("flatten", cluster, {}, generation_engine, zero_stage)
    return with_proximal(plan) if proximal else plan


def interleave(
    cluster: Cluster, *, generation_engine: str = "vllm", zero_stage: int = 0, proximal: bool = False
) -> ExecutionPlan:
    """The reference scores on one half of the devices while the reward model scores on the other half. Every other call
    is on all devices. On one device this is `flatten`."""
    if cluster.size == 1:
        return flatten(cluster, generation_engine=generation_engine, zero_stage=zero_stage, proximal=proximal)
    first, second = halves(cluster)
    meshes = {Role.REFERENCE: first, Role.REWARD: second}
    plan = _data_parallel("interleave", cluster, meshes, generation_engine, zero_stage)
    return with_proximal(plan) if proximal else plan


def separate(
    cluster: Cluster, *, generation_engine: str = "vllm", zero_stage: int = 0, proximal: bool = False
) -> ExecutionPlan:
    """Actor and critic train on one half of the devices. Generation and scoring are on the other half, with copies of
    both that are updated when they change. On one device this is `flatten`."""
    if cluster.size == 1:
        return flatten(cluster, generation_engine=generation_engine, zero_stage=zero_stage, proximal=proximal)
    training, inference = halves(cluster)
    plan = _data_parallel("separate", cluster, {}, generation_engine, zero_stage, training=training, other=inference)
    return with_proximal(plan) if proximal else plan


AUTO = "auto"  # the planner's choice, for which the cluster's size is not enough

PRESETS: Mapping[str, Preset] = {"flatten": flatten, "interleave": interleave, "separate": separate}


def resolve_plan(
    plan: str | Path | Mapping[str, Any] | ExecutionPlan,
    cluster: Cluster,
    *,
    generation_engine: str = "vllm",
    zero_stage: int = 0,
    proximal: bool = False,
) -> ExecutionPlan:
    """The plan for a job on `cluster`.

    Args:
        plan: a preset's name, the path of a YAML file, a plan as a dictionary, or a plan.
        generation_engine: `vllm` or `transformers`; only for a preset.
        zero_stage: of the trained roles; only for a preset.
        proximal: with `actor.forward`; only for a preset.

    Raises:
        PlanError: the preset or file does not exist, the plan is invalid, or it is for another number of devices.
    """
    if isinstance(plan, str) and plan in PRESETS:
        return PRESETS[plan](cluster, generation_engine=generation_engine, zero_stage=zero_stage, proximal=proximal)
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


def with_proximal(plan: ExecutionPlan) -> ExecutionPlan:
    """A plan of PPO with `actor.forward`: as the plan has it, or, where it does not, on the mesh of `actor.train` and
    in its layout, so that no parameters move."""
    if PROXIMAL_CALL in plan.assignments:
        return plan
    training = plan["actor.train"]
    # stages 1 and 2 shard what a forward does not have
    stage = training.strategy.zero_stage if training.strategy.zero_stage == 3 else 0
    in_place = Assignment(training.mesh, replace(training.strategy, zero_stage=stage), training.engine)
    assignments = {**plan.assignments, PROXIMAL_CALL: in_place}
    return replace(plan, assignments=assignments, graph=ppo_graph(proximal=True))


def without_proximal(plan: ExecutionPlan) -> ExecutionPlan:
    """A plan of PPO without `actor.forward`.

    Raises:
        PlanError: `actor.forward` is the only call that the plan streams.
    """
    streams = plan.streams
    if streams is not None and streams.calls == (PROXIMAL_CALL,):
        raise PlanError(
            f"the plan streams {PROXIMAL_CALL} alone, which this run does not have; leave streams out of the plan, or "
            f"set vllm_importance_sampling_correction."
        )
    if streams is not None and streams.calls is not None:
        streams = replace(streams, calls=tuple(name for name in streams.calls if name != PROXIMAL_CALL))
    assignments = {name: assignment for name, assignment in plan.assignments.items() if name != PROXIMAL_CALL}
    return replace(plan, assignments=assignments, graph=ppo_graph(), streams=streams)


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
