"""`plan: auto` for a job: measure or remember, choose, say what and why; and what any plan is expected to take.

The same plan on every rank: rank 0 searches, all receive it. The choosing itself is `planner.choose`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from ..common.errors import PlanError
from ..plan.cluster import Cluster
from ..plan.execution_plan import ExecutionPlan
from ..plan.model_spec import ModelSpec
from ..plan.presets import flatten
from ..planner.choose import Chosen, choose
from ..planner.cost import Pricing
from ..planner.problem import Found, Problem
from ..planner.profile import Profile
from ..planner.show import beaten_table, estimate_table
from ..planner.space import Space
from ..planner.workload import Workload
from ..runtime.engine_options import EngineOptions
from ..runtime.process_groups import from_first_rank
from ..trainer.optimizers import make_optimizer
from ..trainer.ppo_config import PPOConfig
from .job import Job
from .job_models import Subject
from .profile_cache import cached_profile, known_profile


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

    @staticmethod
    def of(chosen: Chosen, profile: Profile) -> Planned:
        """The planner's own choice."""
        plan = replace(chosen.best.plan, name=f"auto ({chosen.best.name})")
        return Planned(plan, chosen.best, chosen, profile)


def job_of(
    args: PPOConfig,
    cluster: Cluster,
    rank: int,
    engine: str,
    subject: Subject,
    *,
    prompt_tokens: float,
    context_length: int,
    pad_token_id: int,
) -> Job:
    """A job by its training arguments: every response as long as it may be, for how long they are is known when they
    are; and engines in the short runs told what they are in the run itself, with the default optimizer.

    Args:
        prompt_tokens: mean of the data set.
        context_length: the longest prompt with the longest response.
    """
    episodes = args.per_device_train_batch_size * args.gradient_accumulation_steps * cluster.size
    workload = Workload(
        episodes=episodes,
        prompt_tokens=max(1.0, prompt_tokens),
        response_tokens=(args.response_length,),
        mini_batches=args.num_mini_batches,
        epochs=args.num_ppo_epochs,
        recompute=recomputes(args),
        forward_tokens=args.local_rollout_forward_batch_size * context_length,
        train_tokens=args.per_device_train_batch_size * context_length,
    )
    options = EngineOptions(
        device=args.device,
        temperature=1.0,
        response_length=args.response_length,
        context_length=context_length,
        forward_batch_size=args.local_rollout_forward_batch_size,
        train_batch_size=args.per_device_train_batch_size,
        pad_token_id=pad_token_id,
        make_optimizer=partial(make_optimizer, args),
        compute_dtype=mixed_precision(args),
        max_grad_norm=args.max_grad_norm or 0.0,
        gradient_checkpointing=recomputes(args),
        gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
        seed=args.seed,
        transfer_timeout_s=float(args.ddp_timeout),
        collective_timeout_s=float(args.ddp_timeout),
        log_folder=Path(args.output_dir) / "logs",
        vllm={
            "max_num_seqs": max(1, -(-episodes // cluster.size)),
            "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        },
    )
    return Job(cluster, rank, engine, subject, options, workload, args.vllm_gpu_memory_utilization)


def mixed_precision(args: PPOConfig) -> torch.dtype | None:
    """What the training arguments say is computed in, where that is not the parameters' dtype."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def recomputes(args: PPOConfig) -> bool:
    """Whether training computes its forwards again in its backwards."""
    return bool(getattr(args, "activation_checkpointing", args.gradient_checkpointing))


def plan_job(job: Job, *, time_limit_s: float = 5.0) -> Planned:
    """The fastest plan by estimate. All ranks call this together; the first time for a machine and its models it takes
    as long as measuring them.

    Raises:
        PlanError: the models fit on no plan.
    """
    if job.cluster.size == 1:
        return Planned(flatten(job.cluster, generation_engine=job.engine))  # there is nothing to choose
    profile, measured = cached_profile(job)
    chosen: Chosen | PlanError | None = None
    if job.rank == 0:
        pricing = job.pricing(profile)
        try:
            chosen = choose(job.subject.specs, pricing, generation_engine=job.engine, time_limit_s=time_limit_s)
            say(chosen, profile, measured)
        except PlanError as error:
            chosen = error
    chosen = from_first_rank(chosen)
    if isinstance(chosen, PlanError):
        raise chosen
    assert chosen is not None, "rank 0 chose or refused"
    return Planned.of(chosen, profile)


def known_estimate(job: Job, plan: ExecutionPlan) -> Planned:
    """A plan that the user named, with its estimate where this machine, these models and, of several hosts, the network
    between them have been measured before."""
    if job.rank != 0:
        return Planned(plan)
    try:
        profile = known_profile(job)
        if profile is None:
            return Planned(plan)
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


def at_lengths(job: Job, planned: Planned, lengths: Sequence[int]) -> Found | None:
    """The plan's estimate for responses of measured lengths, which is what a run's times are to be held against; `None`
    where nothing was measured."""
    if planned.found is None or planned.profile is None or not lengths:
        return planned.found
    return estimate(planned.plan, job.subject.specs, job.pricing(planned.profile, job.workload.of_lengths(lengths)))


def say(chosen: Chosen, profile: Profile, measured: bool) -> None:
    console = Console(stderr=True)
    source = "measured just now" if measured else "measured before"
    console.print(f"plan: auto on {profile.hardware} ({source}). {chosen.said}")
    console.print(estimate_table(chosen.best))
    if chosen.beaten:
        console.print(beaten_table(chosen))
