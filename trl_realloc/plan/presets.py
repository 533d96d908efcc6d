"""The preset plans for any number of devices, and `resolve_plan`, which reads a plan in any form of user input.

`planner` searches for plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ..common.errors import PlanError, Problems, nearest, shown
from ..common.files import exists, or_packaged, parse_yaml, read_text
from .algorithm_graphs import PROXIMAL_CALL, ppo_graph
from .cluster import Cluster, DeviceMesh, halves
from .dataflow import CallKind, DataflowGraph, Role
from .execution_plan import Assignment, ExecutionPlan, ParallelStrategy
from .fitting import plan_of_run, read_plan


class Preset(Protocol):
    """Makes a plan for a cluster.

    Args:
        graph: the run's calls; by default PPO's.
    """

    def __call__(
        self,
        cluster: Cluster,
        *,
        generation_engine: str = ...,
        zero_stage: int = ...,
        graph: DataflowGraph | None = ...,
    ) -> ExecutionPlan: ...


def flatten(
    cluster: Cluster, *, generation_engine: str = "vllm", zero_stage: int = 0, graph: DataflowGraph | None = None
) -> ExecutionPlan:
    """Every call on all devices, one after the other, as TRL does."""
    return _data_parallel("flatten", cluster, graph, {}, generation_engine, zero_stage)


def interleave(
    cluster: Cluster, *, generation_engine: str = "vllm", zero_stage: int = 0, graph: DataflowGraph | None = None
) -> ExecutionPlan:
    """The reference scores on one half of the devices while the reward model scores on the other half. Every other call
    is on all devices. On one device this is `flatten`.

    Raises:
        PlanError: the graph has no reference or no reward models.
    """
    absent = [role for role in (Role.REFERENCE, Role.REWARD) if role not in (graph or ppo_graph()).roles]
    if absent:
        raise PlanError(
            f"the preset interleave gives one half of the devices to the reference and the other half to the reward "
            f"models, and this run has no call {' and no call '.join(f'{role}.forward' for role in absent)}; name "
            f"flatten or separate."
        )
    if cluster.size == 1:
        return flatten(cluster, generation_engine=generation_engine, zero_stage=zero_stage, graph=graph)
    first, second = halves(cluster)
    meshes = {Role.REFERENCE: first, Role.REWARD: second}
    return _data_parallel("interleave", cluster, graph, meshes, generation_engine, zero_stage)


def separate(
    cluster: Cluster, *, generation_engine: str = "vllm", zero_stage: int = 0, graph: DataflowGraph | None = None
) -> ExecutionPlan:
    """Actor and critic train on one half of the devices. Generation and scoring are on the other half, with copies that
    are updated after each training. The actor scores where it trains. On one device this is `flatten`."""
    if cluster.size == 1:
        return flatten(cluster, generation_engine=generation_engine, zero_stage=zero_stage, graph=graph)
    training, inference = halves(cluster)
    return _data_parallel(
        "separate", cluster, graph, {}, generation_engine, zero_stage, training=training, other=inference
    )


AUTO = "auto"  # the planner's choice, which needs more than the cluster's size

PRESETS: Mapping[str, Preset] = {"flatten": flatten, "interleave": interleave, "separate": separate}


def presets_of(graph: DataflowGraph) -> Mapping[str, Preset]:
    """The presets for a graph: `interleave` needs a reference and reward models."""
    frozen = {Role.REFERENCE, Role.REWARD} <= set(graph.roles)
    return {name: preset for name, preset in PRESETS.items() if frozen or name != "interleave"}


def resolve_plan(
    plan: str | Path | Mapping[str, Any] | ExecutionPlan,
    cluster: Cluster,
    *,
    generation_engine: str = "vllm",
    zero_stage: int = 0,
    graph: DataflowGraph | None = None,
) -> ExecutionPlan:
    """The plan for a job on `cluster`.

    Args:
        plan: a preset's name, the path of a YAML file, a plan as a dictionary, or a plan.
        generation_engine: `vllm` or `transformers`; only for a preset.
        zero_stage: ZeRO stage of the trained roles; only for a preset.
        graph: the run's calls, to which the plan is fitted (`plan_of_run`). Without it a preset is for PPO, and another
            plan is not fitted.

    Raises:
        PlanError: the preset or file does not exist, the plan is invalid, or it is for another number of devices or
            another algorithm.
    """
    if isinstance(plan, str) and plan in PRESETS:
        return PRESETS[plan](cluster, generation_engine=generation_engine, zero_stage=zero_stage, graph=graph)
    if isinstance(plan, (str, Path)):
        resolved = load_plan(plan, graph)
    elif isinstance(plan, Mapping):
        resolved = read_plan(plan, graph)
    elif isinstance(plan, ExecutionPlan):
        resolved = plan
    else:
        presets = ", ".join((AUTO, *PRESETS))
        raise PlanError(f"a plan is {presets}, a YAML file's path, a dict or an ExecutionPlan, not {shown(plan)}.")
    resolved.check_world(cluster.size)
    return resolved if graph is None else plan_of_run(resolved, graph)


def with_sleeping_engines(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with `drop` for every vLLM engine without `offload` or `drop`."""
    assignments = {
        name: replace(a, drop=True) if a.engine == "vllm" and not a.offload else a
        for name, a in plan.assignments.items()
    }
    return replace(plan, assignments=assignments)


def load_plan(path: str | Path, graph: DataflowGraph | None = None) -> ExecutionPlan:
    """The plan in a YAML file. Raises `PlanError`, which suggests a preset if there is no such file.

    Args:
        path: path of the file, or name of a packaged plan.
        graph: the run's calls, for a file without a graph; by default PPO's.
    """
    file = or_packaged(path)
    if exists(file):
        text, problems = read_text(file, "the plan"), Problems()
        with problems.of(str(file)):
            return read_plan(parse_yaml(text, "the plan"), graph)
        problems.refuse()
    presets = ", ".join(PRESETS)
    if file.suffix in (".yaml", ".yml") or len(file.parts) > 1:
        raise PlanError(f"there is no plan file {shown(str(path))}; give its path, or one of the presets {presets}.")
    near = nearest(str(path), (*PRESETS, AUTO))
    hint = f"; did you mean {near!r}?" if near else "."
    raise PlanError(f"{shown(str(path))} is neither a file nor one of the presets {presets}{hint}")


def _data_parallel(
    name: str,
    cluster: Cluster,
    graph: DataflowGraph | None,
    meshes: Mapping[Role, DeviceMesh],
    generation_engine: str,
    zero_stage: int,
    *,
    training: DeviceMesh | None = None,
    other: DeviceMesh | None = None,
) -> ExecutionPlan:
    """A plan with every call data-parallel. A call that does not train has ZeRO stage 3 if `zero_stage` is 3, and
    otherwise 0, because it has no optimizer state or gradients to shard. `actor.forward` is on the mesh of
    `actor.train`, so that no parameters move for it.

    Args:
        training, other: mesh of calls that train, and of other calls, for roles that are not in `meshes`; by default
            all devices.
    """
    graph = graph or ppo_graph()
    assignments = {}
    for call in graph.calls:
        is_with_training = call.trains or call.name == PROXIMAL_CALL
        mesh = meshes.get(call.role, (training if is_with_training else other) or cluster.mesh)
        if call.kind is CallKind.GENERATE:
            assignments[call.name] = Assignment(mesh, ParallelStrategy(dp=mesh.size), generation_engine)
        else:
            stage = zero_stage if call.trains or zero_stage == 3 else 0
            assignments[call.name] = Assignment(mesh, ParallelStrategy(dp=mesh.size, zero_stage=stage), "zero")
    return ExecutionPlan(cluster, assignments, graph, name)
