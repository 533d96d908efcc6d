"""Builds the `Job`, with its engine options, of a trainer of one policy from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...plan.dataflow import DataflowGraph, Role
from ...planner.cost.workload import Workload
from ...profiling.job import Job
from ...profiling.job_models import JobModels
from ..accelerate_plugin import ReallocationPlugin
from ..grpo_config import PolicyConfig
from ..run.job_builder import engine_options, make_job, recomputes
from ..run.plan_request import PlanRequest
from .prompt_lengths import check_lengths, context_length, lengths_of
from .trl_sampling import tokenizer_of


def make_policy_job(
    args: PolicyConfig,
    plugin: ReallocationPlugin,
    request: PlanRequest,
    rank: int,
    models: JobModels,
    inputs: Mapping[str, Any],
    graph: DataflowGraph,
) -> Job:
    """Returns the `Job` of one rank. The plan is not known yet.

    Args:
        inputs: the arguments of the trainer's constructor, by name.

    Raises:
        DataError: a prompt of the data sets leaves no room for a completion.
    """
    datasets = (inputs.get("train_dataset"), inputs.get("eval_dataset"))
    lengths = lengths_of(*datasets, models.processing_class, args.chat_template_kwargs or {})
    (config,) = models.configs[Role.ACTOR]
    completion, is_open = int(args.max_completion_length), bool(turn_makers(inputs))
    context = context_length(args.vllm_max_model_length, lengths, completion, config, is_open=is_open)
    context = context or int(4 * lengths.mean) + completion
    if not is_open:
        check_lengths(lengths, context, config)
    usual = min(context, lengths.usual + completion)
    share = args.per_device_train_batch_size * args.steps_per_generation  # that TRL generates at once
    workload = Workload.of_groups(
        steps_per_generation=args.steps_per_generation,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        num_iterations=args.num_iterations,
        episodes=args.generation_batch_size,
        prompt_tokens=lengths.mean,
        response_tokens=(args.max_completion_length,),
        recompute=recomputes(args),
        forward_tokens=args.per_device_train_batch_size * usual,
        generation_batch=share,
        train_tokens=args.per_device_train_batch_size * usual,
    )
    tokenizer = tokenizer_of(models.processing_class)
    options = engine_options(
        args,
        plugin,
        temperature=args.temperature,
        response_length=args.max_completion_length,
        context_length=context,
        forward_batch_size=args.per_device_train_batch_size,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    together = max(share, args.per_device_eval_batch_size)
    options = replace(options, usual_length=usual, generation_batch_size=together)
    return make_job(args, request.cluster, rank, request.engine, models, graph, workload, options)


def turn_makers(inputs: Mapping[str, Any]) -> list[str]:
    """The given arguments of the trainer's constructor that make prompts, or parts of them, while the run goes on: a
    completion may then be made in several turns."""
    return [name for name in ("tools", "environment_factory", "rollout_func") if inputs.get(name)]
