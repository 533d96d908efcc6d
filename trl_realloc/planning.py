"""`plan: auto` for a job: measure or remember, choose, say what and why; and what any plan is expected to take.

The same plan on every rank: rank 0 searches, all receive it. The choosing itself is `planner.choose`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from .cluster import Cluster
from .dataflow import DataflowGraph, Role, ppo_graph
from .errors import PlanError
from .models import shell
from .modelspec import FAMILIES, ModelSpec
from .plan import ExecutionPlan
from .planner.choose import Chosen, choose, explain
from .planner.cost import Pricing
from .planner.presets import flatten
from .planner.profile import Measured, Profile
from .planner.search import Found, Problem
from .planner.space import Space
from .planner.workload import Workload
from .profiling import Subject, cache_path, cached_profile
from .runtime.placement import CACHED_TOKENS, EngineOptions


MOMENTS = 8  # bytes of AdamW's float32 moments for each element


@dataclass(frozen=True)
class Job:
    """What there is to know of a job before a model is loaded.

    Args:
        engine: that generates.
        vllm_share: of a GPU's memory that a vLLM engine takes.
    """

    cluster: Cluster
    rank: int
    engine: str
    subject: Subject
    options: EngineOptions
    workload: Workload
    vllm_share: float = 0.3

    def pricing(self, profile: Profile, workload: Workload | None = None) -> Pricing:
        device = self.options.device
        on_gpu = device.type == "cuda"
        memory = float(torch.cuda.get_device_properties(device).total_memory) * 0.95 if on_gpu else None
        if self.cluster.memory_gb is not None:
            memory = self.cluster.memory_gb * 1e9
        return Pricing(
            self.cluster,
            workload or self.workload,
            Measured(profile),
            memory=memory,
            vllm_share=self.vllm_share,
            moments=MOMENTS,
            default_cap=None if on_gpu else CACHED_TOKENS,
        )


@dataclass(frozen=True)
class Planned:
    """A job's plan.

    Args:
        found: with its estimate; `None` where nothing was measured.
        chosen: what it was chosen over; `None` where the user named the plan.
        profile: the measurements behind it.
    """

    plan: ExecutionPlan
    found: Found | None = None
    chosen: Chosen | None = None
    profile: Profile | None = None


def specs_of(configs: Mapping[Role, Sequence[Any]], graph: DataflowGraph | None = None) -> dict[str, list[ModelSpec]]:
    """By call, the models that it runs; of a family that no table describes by its shapes."""
    found: dict[str, list[ModelSpec]] = {}
    for call in (graph or ppo_graph()).calls:
        is_policy = call.role in (Role.ACTOR, Role.REFERENCE)
        found[call.name] = [_spec(config, is_policy) for config in configs.get(call.role, ())]
    return found


def _spec(config: Any, is_policy: bool) -> ModelSpec:
    if config.model_type in FAMILIES:
        return ModelSpec.from_config(config, "lm" if is_policy else "score", bytes_per_element=4)
    shapes = [(name, tuple(p.shape)) for name, p in shell(config, is_policy).named_parameters()]
    return ModelSpec.of_shapes(shapes, bytes_per_element=4)


def plan_job(job: Job, *, time_limit_s: float = 5.0) -> Planned:
    """The fastest plan by estimate. All ranks call this together; the first time for a machine and its models it takes
    as long as measuring them.

    Raises:
        PlanError: the models fit on no plan.
    """
    if job.cluster.size == 1:
        return Planned(flatten(job.cluster, generation_engine=job.engine))  # there is nothing to choose
    profile, measured = cached_profile(job.subject, job.cluster, job.rank, job.options, job.workload, job.engine)
    box: list[Any] = [None]
    if job.rank == 0:
        try:
            box = [
                choose(job.subject.specs, job.pricing(profile), generation_engine=job.engine, time_limit_s=time_limit_s)
            ]
            say(box[0], profile, measured)
        except PlanError as error:
            box = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(box, 0)
    if isinstance(box[0], PlanError):
        raise box[0]
    chosen: Chosen = box[0]
    return Planned(replace(chosen.best.plan, name=f"auto ({chosen.best.name})"), chosen.best, chosen, profile)


def known_estimate(job: Job, plan: ExecutionPlan) -> Planned:
    """A plan that the user named, with its estimate where this machine and these models have been measured before."""
    path = cache_path(job.subject, job.cluster, job.options, job.engine)
    if job.rank != 0 or not path.is_file():
        return Planned(plan)
    try:
        profile = Profile.load(path)
        return Planned(plan, estimate(plan, job.subject.specs, job.pricing(profile)), profile=profile)
    except PlanError:  # a split that was not measured
        return Planned(plan)


def estimate(plan: ExecutionPlan, specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing) -> Found:
    """What a written plan is expected to take.

    Raises:
        PlanError: a model or a split that the rates do not know.
    """
    space = Space(plan.cluster, plan.graph, specs, pricing)
    problem = Problem(space, {}, barrier=True)
    return problem.found(problem.state_of(plan.assignments), plan.name)


# --- what a person sees -----------------------------------------------------------------------------------------------


def say(chosen: Chosen, profile: Profile, measured: bool) -> None:
    console = Console(stderr=True)
    source = "measured just now" if measured else "measured before"
    console.print(f"plan: auto on {profile.hardware} ({source}). {chosen.said}")
    console.print(estimate_table(chosen.best))
    if chosen.beaten:
        console.print(beaten_table(chosen))


def estimate_table(found: Found) -> Table:
    """A row for each call: where and how it runs, the memory it takes of a device, and its time."""
    table = Table("call", "mesh", "engine", "strategy", "memory", "time", title=found.name, title_justify="left")
    for name, choice in found.choices.items():
        assignment, cost = choice.assignment, choice.cost
        strategy = f"{assignment.strategy}{' offload' if assignment.offload else ''}"
        memory = f"{(cost.static + cost.transient) / 1e9:.2f} GB"
        table.add_row(name, str(assignment.mesh), assignment.engine, strategy, memory, f"{cost.seconds:.3f} s")
    for name, seconds in found.estimate.moves.items():
        table.add_row(f"parameters to {name}", "", "", "", "", f"{seconds:.3f} s")
    table.add_section()
    most = f"{found.estimate.memory / 1e9:.2f} GB"
    table.add_row("iteration", str(found.space.cluster.mesh), "", "", most, f"{found.seconds:.3f} s")
    return table


def beaten_table(chosen: Chosen) -> Table:
    """The alternatives, and why each lost."""
    table = Table("instead", "time", "why not", title="alternatives", title_justify="left")
    for each in chosen.beaten:
        time = f"{each.found.seconds:.3f} s" if each.found else "does not fit"
        table.add_row(each.name, time, each.reason)
    return table


def explained(found: Found, call: str) -> str:
    """What bounds a call of a plan. Raises `PlanError` for a call that there is not."""
    name = found.space.graph.call(call).name
    return f"{name}, {found.costs[name].seconds:.3g} s: {explain(found.costs[name])}"


def save_estimate(found: Found, folder: str | Path) -> None:
    """`estimate.json`: the iteration as it is expected to go, as a timeline."""
    found.timeline.save(Path(folder) / "estimate.json")
