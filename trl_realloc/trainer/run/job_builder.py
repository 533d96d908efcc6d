"""Builds a run's `Job` and `EngineOptions` from its training arguments and its plugin.

Planning, measuring (`profiling`) and the run (`runtime`) receive these two objects, and read nothing else from the
training arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...engines.device import is_accelerator
from ...plan.cluster import Cluster
from ...plan.dataflow import DataflowGraph
from ...planner.cost.workload import Workload
from ...planner.recipe.defaults import recomputes
from ...planner.search.fused_choice import may_fuse
from ...profiling.job import Job
from ...profiling.job_models import JobModels
from ...runtime.placement.engine_options import EngineOptions
from ..accelerate_plugin import ReallocationPlugin
from ..plan_settings import vllm_settings
from ..ppo_config import PPOConfig
from .optimizers import make_optimizer


if TYPE_CHECKING:
    from ..grpo_config import PolicyConfig


def make_job(
    args: PPOConfig | PolicyConfig,
    cluster: Cluster,
    rank: int,
    generation_engine: str,
    models: JobModels,
    graph: DataflowGraph,
    workload: Workload,
    options: EngineOptions,
) -> Job:
    """The `Job` of one rank, before a plan is known.

    Args:
        workload: workload of one iteration. Real response lengths are known only after the first update.
        options: result of `engine_options`.
    """
    # megatron lacks the loss scaling that fp16 needs (`plan_checks`)
    engines = ("zero",) if compute_dtype(args) is torch.float16 else ("zero", "megatron")
    return Job(
        cluster,
        rank,
        generation_engine,
        models,
        options,
        workload,
        args.vllm_gpu_memory_utilization,
        args.memory_headroom,
        args.vllm_enable_sleep_mode,
        engines,
        deterministic=args.full_determinism,
        max_staleness=getattr(args, "max_staleness", 0),
        fused_training=may_fuse(getattr(args, "fused_training", None), on_gpus=is_accelerator(options.device)),
        graph=graph,
    )


def ppo_job(
    args: PPOConfig,
    plugin: ReallocationPlugin,
    cluster: Cluster,
    rank: int,
    generation_engine: str,
    models: JobModels,
    *,
    prompt_tokens: float,
    context_length: int,
    pad_token_id: int,
) -> Job:
    """The `Job` of one rank of a PPO run, in which every response has `response_length` tokens.

    Args:
        prompt_tokens: mean tokens of the prompts in the data set.
        context_length: tokens of the longest prompt plus `response_length`.
    """
    settings = args.ppo_settings()
    workload = Workload(
        episodes=args.per_device_train_batch_size * args.gradient_accumulation_steps * cluster.size,
        prompt_tokens=max(1.0, prompt_tokens),
        response_tokens=(args.response_length,),
        mini_batches=args.num_mini_batches,
        epochs=args.num_ppo_epochs,
        recompute=recomputes(vars(args)),
        forward_tokens=args.local_rollout_forward_batch_size * context_length,
        train_tokens=args.per_device_train_batch_size * context_length,
    )
    options = engine_options(args, plugin, context_length=context_length, pad_token_id=pad_token_id)
    return make_job(args, cluster, rank, generation_engine, models, settings.graph, workload, options)


def policy_job(
    args: PolicyConfig,
    plugin: ReallocationPlugin,
    cluster: Cluster,
    rank: int,
    generation_engine: str,
    models: JobModels,
    graph: DataflowGraph,
    *,
    prompt_tokens: float,
    usual_length: int,
    context_length: int,
    pad_token_id: int,
) -> Job:
    """The `Job` of one rank of a run of GRPO or RLOO.

    Args:
        prompt_tokens: mean tokens of the prompts in the data set.
        usual_length: tokens of a long sample, for sizes that a longer one may exceed.
        context_length: maximum tokens of a sample.
    """
    samples = args.per_device_train_batch_size
    generated = samples * args.steps_per_generation  # samples per generation of one process
    workload = Workload.of_groups(
        steps_per_generation=args.steps_per_generation,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        num_iterations=args.num_iterations,
        episodes=args.generation_batch_size,
        prompt_tokens=prompt_tokens,
        response_tokens=(args.max_completion_length,),
        recompute=recomputes(vars(args)),
        forward_tokens=samples * usual_length,
        generation_batch=generated,
        train_tokens=samples * usual_length,
        completions=args.num_generations,
    )
    options = engine_options(args, plugin, context_length=context_length, pad_token_id=pad_token_id)
    together = max(generated, args.per_device_eval_batch_size)
    options = replace(options, usual_length=usual_length, generation_batch_size=together)
    return make_job(args, cluster, rank, generation_engine, models, graph, workload, options)


def engine_options(
    args: PPOConfig | PolicyConfig, plugin: ReallocationPlugin, *, context_length: int, pad_token_id: int
) -> EngineOptions:
    """The settings of the engines, with the optimizer of the training arguments.

    The settings are the same for every plan. If the user passed an optimizer, the run uses that one instead
    (`RunSetup.engine_options`).

    Args:
        context_length: maximum tokens of a sample.
    """
    is_ppo = isinstance(args, PPOConfig)
    return EngineOptions(
        device=args.device,
        temperature=sampling_temperature(args) if is_ppo else args.temperature,
        response_length=args.response_length if is_ppo else args.max_completion_length,
        context_length=context_length,
        forward_batch_size=args.local_rollout_forward_batch_size if is_ppo else args.per_device_train_batch_size,
        train_batch_size=args.per_device_train_batch_size,
        pad_token_id=pad_token_id,
        make_optimizer=partial(make_optimizer, args),
        compute_dtype=compute_dtype(args),
        max_grad_norm=args.max_grad_norm or 0.0,
        gradient_checkpointing=recomputes(vars(args)),
        gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
        deepspeed=launched_deepspeed_config(args),
        seed=args.seed,
        bucket_bytes=(plugin.bucket_mb or 0) << 20,
        transfer_timeout_s=plugin.transfer_timeout or float(args.ddp_timeout),
        collective_timeout_s=float(args.ddp_timeout),
        heartbeat_timeout_s=plugin.heartbeat_timeout or 0.0,
        log_folder=Path(args.output_dir) / "logs",
        vllm=vllm_settings(args),
    )


def sampling_temperature(args: PPOConfig) -> float:
    """PPO's sampling temperature as TRL computes it. It is never 0."""
    return args.temperature + 1e-7


def compute_dtype(args: PPOConfig | PolicyConfig) -> torch.dtype | None:
    """The dtype of mixed precision, or `None`, by Accelerate's rules: without `bf16` and `fp16`, that of `accelerate
    launch --mixed_precision` (`args.mixed_precision`). A DeepSpeed config takes precedence."""
    name = args.mixed_precision
    config = launched_deepspeed_config(args)
    if config is not None:
        enabled = (kind for kind in ("fp16", "bf16") if config.get(kind, {}).get("enabled", False))
        name = next(enabled, "no")
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)


def launched_deepspeed_config(args: PPOConfig | PolicyConfig) -> Mapping[str, Any] | None:
    """The DeepSpeed config of the job's launch, if any."""
    plugin = args.deepspeed_plugin
    return None if plugin is None else plugin.deepspeed_config
