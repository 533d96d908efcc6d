"""`Job`: description of a job before a model is loaded: devices, models, engine options and the size of an iteration.

`trainer.run.job_builder` builds it from a trainer's config, for planning and measuring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..engines.device import memory_bytes
from ..engines.training import deepspeed_compat
from ..engines.training.zero_setup import scales_losses
from ..plan.algorithm_graphs import PROXIMAL_CALL, ppo_graph
from ..plan.assignment import CACHED_TOKENS, MEMORY_SHARE
from ..plan.cluster import Cluster
from ..plan.dataflow import DataflowGraph, Role
from ..plan.execution_plan import ExecutionPlan
from ..planner.cost.device_memory import HEADROOM, DeviceMemory, gpu_memory
from ..planner.cost.pricing import Pricing
from ..planner.cost.profile import Profile
from ..planner.cost.specification import rates_of
from ..planner.cost.workload import Workload
from ..planner.search.choose import choose
from ..planner.search.decision import Decision
from ..planner.search.ladder import AllowedOptions
from ..planner.search.space import Space, TrainingSplits
from ..realloc.memory import MOMENTS
from ..runtime.placement.engine_options import EngineOptions
from .job_models import JobModels


def any_plan(plan: ExecutionPlan) -> None:
    """The default of `Job.check`: accepts every plan."""


@dataclass(frozen=True)
class Job:
    """A job as one rank sees it.

    Args:
        engine: name of the engine that generates.
        vllm_share, vllm_sleeps: fields of `planner.cost.pricing.Pricing`.
        headroom: share of a device's memory that a plan leaves free.
        engines: names of the engines that may score and train.
        deterministic: whether two runs must give the same bits.
        max_staleness: largest staleness of a plan.
        fused_training: whether two calls may train in fused pipelines.
        streams: whether samples may stream.
        graph: calls of the run.
        splits: splits of training calls that the run's optimizer and adapters allow. The same on all ranks.
        check: function that raises `PlanError` or `ValueError` for a plan that the run cannot have. The same on all
            ranks.
    """

    cluster: Cluster
    rank: int
    engine: str
    models: JobModels
    options: EngineOptions
    workload: Workload
    vllm_share: float | None = MEMORY_SHARE
    headroom: float = HEADROOM
    vllm_sleeps: bool | None = None
    engines: tuple[str, ...] = ("zero", "megatron")
    deterministic: bool = False
    max_staleness: int = 0
    fused_training: bool = True
    streams: bool = True
    graph: DataflowGraph = field(default_factory=ppo_graph)
    splits: TrainingSplits = TrainingSplits()
    check: Callable[[ExecutionPlan], None] = any_plan

    def choose(self, profile: Profile, workload: Workload | None = None, *, time_limit_s: float) -> Decision:
        """The planner's decision for this job on a machine, for the job's workload or another one.

        Raises:
            PlanError: the models fit on no plan.
        """
        space = Space.of_run(
            self.models.specs,
            self.pricing(profile, workload),
            graph=self.graph,
            generation_engine=self.engine,
            engines=self.engines,
            zero_stages=self.zero_stages,
            splits=self.splits,
        )
        allowed = AllowedOptions(
            deterministic=self.deterministic,
            max_staleness=self.max_staleness,
            fused_training=self.fused_training,
            streams=self.streams,
        )
        return choose(space, allowed, time_limit_s=time_limit_s)

    @property
    def measured_graph(self) -> DataflowGraph:
        """The calls of the short runs. In a run with a critic `actor.forward` is left out, because the reference's
        forward has the same rate."""
        return self.graph.without([PROXIMAL_CALL]) if Role.CRITIC in self.graph.roles else self.graph

    @property
    def zero_stages(self) -> tuple[int, ...]:
        """The ZeRO stages that the planner considers and measures. Only 0 if DeepSpeed is not installed, if it does not
        scale losses in float16, or if the memory of a device is unknown, because the other stages save memory."""
        scaled = self.options.compute_dtype is not torch.float16 or scales_losses(self.options.deepspeed)
        return (0, 1, 2, 3) if deepspeed_compat.is_installed() and scaled and self.memory is not None else (0,)

    @property
    def memory(self) -> DeviceMemory | None:
        """The memory of this rank's device; `None` if unknown, as on a CPU."""
        size = memory_bytes(self.options.device)
        total = None if size is None else float(size)
        if self.cluster.memory_gb is not None:
            total = self.cluster.memory_gb * 1e9
        if total is None:
            return None
        return DeviceMemory(total) if size is None else gpu_memory(total, self.headroom)

    def pricing(self, profile: Profile, workload: Workload | None = None) -> Pricing:
        """The cost model of this job on a machine, for the job's workload or another one."""
        return Pricing(
            self.cluster,
            workload or self.workload,
            rates_of(profile),
            memory=self.memory,
            vllm_share=self.vllm_share,
            vllm_sleeps=self.vllm_sleeps,
            context_length=self.options.context_length,
            moments=MOMENTS,
            default_cap=CACHED_TOKENS if memory_bytes(self.options.device) is None else None,
            calibration=profile.calibration,
        )
