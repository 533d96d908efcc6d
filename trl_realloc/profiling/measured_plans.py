"""The plans under which short runs measure a job: every call on all devices, without splits and in each split that the
planner may choose. Plans that do not fit in a device's memory are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..common.errors import PlanError
from ..plan.assignment import Assignment, ParallelStrategy
from ..plan.dataflow import CallKind
from ..plan.execution_plan import ExecutionPlan
from ..plan.presets import flatten
from ..planner.cost.pricing import Pricing
from ..planner.cost.profile import Profile
from ..planner.cost.workload import Workload
from ..planner.search.problem import estimate_plan
from .job import Job


def measured_plans(job: Job, shallow: Job, work: Workload, profile: Profile, thorough: bool) -> list[ExecutionPlan]:
    """The plans in the order in which they are measured. The first has no splits; it is included even if it does not
    fit in memory.

    Args:
        shallow: the job with the models of the short runs.
        work: workload of the short runs.
        profile: profile of the machine, which may have no observations.
        thorough: whether generation is also measured under tensor-parallel degrees.
    """
    whole, *splits = _plans(shallow, thorough)
    full, short = job.pricing(profile), shallow.pricing(profile, work)
    return [whole, *(plan for plan in splits if _is_of_use(plan, job, full) and fits(plan, shallow, short))]


def fits(plan: ExecutionPlan, job: Job, pricing: Pricing) -> bool:
    """True if the job's models fit in a device's memory under a plan, by the estimate, or if the memory is unknown."""
    if pricing.memory is None:
        return True
    return estimate_plan(plan, job.models.specs, pricing, exact=False).fits


def _is_of_use(plan: ExecutionPlan, job: Job, pricing: Pricing) -> bool:
    """True if one of the plan's split calls fits in memory with the job's own models."""
    if pricing.memory is None:
        return True
    for name, assignment in plan.assignments.items():
        strategy = assignment.strategy
        if strategy.tp * strategy.pp > 1 or strategy.zero_stage:
            cost = pricing.work(plan.graph.call(name), job.models.specs.get(name, ()), assignment)
            if cost.static + cost.transient <= pricing.memory.usable:
                return True
    return False


def _plans(job: Job, thorough: bool) -> Iterator[ExecutionPlan]:
    """Plans without splits; with scoring and training under each tensor-parallel degree that all models support, and in
    pipelines of two stages; with training under each ZeRO stage of the planner; and with `thorough`, generation under
    each tensor-parallel degree. Training is not split if the optimizer does not allow it."""
    cluster = job.cluster
    graph = job.measured_graph
    yield flatten(cluster, generation_engine=job.engine, graph=graph)
    per_node = cluster.devices_per_node
    tensor = [tp for tp in range(2, per_node + 1) if per_node % tp == 0]
    for tp, pp in [*((tp, 1) for tp in tensor), (1, 2)]:
        if per_node % (tp * pp) == 0 and "megatron" in job.engines and _can_split(job, tp, pp):
            yield _split(job, tp, pp)
    for stage in filter(None, job.zero_stages if job.splits.elements else ()):
        # runs on the samples of the first plan, so the engine does not generate
        plan = flatten(cluster, generation_engine="transformers", zero_stage=stage, graph=graph)
        yield ExecutionPlan(cluster, plan.assignments, plan.graph, f"ZeRO-{stage}")
    if thorough and job.engine == "vllm":
        (spec,) = job.models.specs["actor.generate"]
        for tp in tensor:
            if spec.layers > 0 and spec.generates_under(tp):
                yield _generating(job, tp)


def _can_split(job: Job, tp: int, pp: int) -> bool:
    try:
        for specs in job.models.specs.values():
            for spec in specs:
                spec.check_strategy(tp, pp)
    except PlanError:
        return False
    return True


def _generating(job: Job, tp: int) -> ExecutionPlan:
    plan = flatten(job.cluster, generation_engine=job.engine, graph=job.measured_graph)
    mesh = job.cluster.mesh
    split = Assignment(mesh, ParallelStrategy(mesh.size // tp, tp), job.engine)
    return ExecutionPlan(job.cluster, {**plan.assignments, "actor.generate": split}, plan.graph, f"generation tp {tp}")


def _split(job: Job, tp: int, pp: int) -> ExecutionPlan:
    mesh, graph = job.cluster.mesh, job.measured_graph
    split = Assignment(mesh, ParallelStrategy(mesh.size // (tp * pp), tp, pp), "megatron")
    whole = Assignment(mesh, ParallelStrategy(mesh.size), "transformers")
    training = split if job.splits.allow("megatron", tp, pp) else replace(whole, engine="zero")
    of_kind = {CallKind.GENERATE: whole, CallKind.FORWARD: split, CallKind.TRAIN: training}
    assignments = {c.name: of_kind[c.kind] for c in graph.calls}
    return ExecutionPlan(job.cluster, assignments, graph, f"tp {tp} pp {pp}")
