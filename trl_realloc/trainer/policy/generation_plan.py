"""The plan of a run that only generates under a plan, while Accelerate trains on all of its ranks: `actor.generate` of
the user's plan, and a training on every device.

Plans of runs in which this package trains are read in `plan_request`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.errors import PlanError, in_file, shown
from ...plan.assignment import Assignment, ParallelStrategy
from ...plan.cluster import Cluster
from ...plan.dataflow import Call, CallKind, DataflowGraph, Role
from ...plan.execution_plan import ExecutionPlan
from ...plan.presets import AUTO, PRESETS, resolve_plan


GENERATE, TRAIN = "actor.generate", "actor.train"
GRAPH = DataflowGraph(
    (
        Call(Role.ACTOR, CallKind.GENERATE, ("prompts",), ("responses", "logprobs")),
        Call(Role.ACTOR, CallKind.TRAIN, ("prompts", "responses", "logprobs")),
    )
)


def generation_plan(plan: Any, cluster: Cluster, *, tp: int = 1, sleeps: bool = False) -> ExecutionPlan:
    """The plan of a run on `cluster` in which Accelerate trains.

    Args:
        plan: a preset's name, the path of a YAML file, a plan, or the assignment of `actor.generate` alone; a plan or
            an assignment may be a dictionary. Of a plan the assignment of `actor.generate` is used. `None` for engines
            on all devices, with `tp` devices each.
        sleeps: engines free all their memory between their uses, unless the plan says something else.

    Raises:
        PlanError: there is no such plan, it is for another number of processes, or the assignment cannot be run here.
    """
    if plan is None:
        if cluster.size % tp:
            raise PlanError(
                f"engines with tp {tp} cannot use {cluster.size} devices evenly; choose a divisor, or give a plan."
            )
        generate = Assignment(cluster.mesh, ParallelStrategy(dp=cluster.size // tp, tp=tp), "vllm")
    else:
        generate = _requested(plan, cluster)
        if generate.engine != "vllm":
            raise PlanError(
                f"{GENERATE} has the engine {generate.engine}, and Accelerate's training is joined to vLLM engines "
                f"alone; set engine: vllm (without a plan TRL itself generates with Transformers)."
            )
    if sleeps and not generate.offload:
        generate = Assignment(generate.mesh, generate.strategy, "vllm", drop=True)
    train = Assignment(cluster.mesh, ParallelStrategy(dp=cluster.size), "zero")
    return ExecutionPlan(cluster, {GENERATE: generate, TRAIN: train}, GRAPH, "planned generation")


def _requested(plan: Any, cluster: Cluster) -> Assignment:
    if isinstance(plan, Assignment):
        return plan
    if isinstance(plan, Mapping) and "calls" not in plan:
        return Assignment.from_dict(plan)
    if plan == AUTO:
        raise PlanError(
            f"plan {AUTO} is for runs in which every call is planned; name {', '.join(PRESETS)}, or give the "
            f"assignment of {GENERATE}, like {{mesh: 0-1, engine: vllm, dp: 2}}."
        )
    if isinstance(plan, os.PathLike):
        plan = Path(plan)
    is_file = isinstance(plan, str | Path) and plan not in PRESETS
    with in_file(plan) if is_file else contextlib.nullcontext():
        resolved = resolve_plan(plan, cluster)
    if GENERATE not in resolved.assignments:
        raise PlanError(f"the plan has no call {GENERATE}; it has {', '.join(resolved.order)}.")
    if resolved.streams is not None or resolved.staleness.versions:
        overlap = "streams" if resolved.streams is not None else "staleness"
        raise PlanError(
            f"the plan has {shown(overlap)}, which needs a training of this package; leave it out where Accelerate "
            f"trains."
        )
    return resolved[GENERATE]
