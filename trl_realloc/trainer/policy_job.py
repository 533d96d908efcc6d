"""Builds the `Job`, with its engine options, of a trainer of one policy from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..plan.dataflow import DataflowGraph, Role
from ..planner.workload import Workload
from ..profiling.job import Job
from ..profiling.job_models import JobModels
from .accelerate_plugin import ReallocationPlugin
from .grpo_config import PolicyConfig
from .job_builder import engine_options, make_job, recomputes
from .plan_request import PlanRequest
from .policy_lengths import Lengths, measure_lengths


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
    """
    lengths = _lengths(inputs, models.processing_class, args.chat_template_kwargs or {})
    (config,) = models.configs[Role.ACTOR]
    context = _context_length(args, lengths, config, inputs)
    usual = min(context, (lengths.longest or int(2 * lengths.mean)) + args.max_completion_length)
    workload = Workload.of_groups(
        steps_per_generation=args.steps_per_generation,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        num_iterations=args.num_iterations,
        episodes=args.generation_batch_size,
        prompt_tokens=lengths.mean,
        response_tokens=(args.max_completion_length,),
        recompute=recomputes(args),
        forward_tokens=args.per_device_train_batch_size * usual,
        train_tokens=args.per_device_train_batch_size * usual,
    )
    tokenizer = models.processing_class
    options = engine_options(
        args,
        plugin,
        temperature=args.temperature,
        response_length=args.max_completion_length,
        context_length=context,
        forward_batch_size=args.per_device_train_batch_size,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    options = replace(options, usual_length=usual)
    return make_job(args, plugin, request.cluster, rank, request.engine, models, graph, workload, options)


def turn_makers(inputs: Mapping[str, Any]) -> list[str]:
    """The given arguments of the trainer's constructor that make prompts, or parts of them, while the run goes on: a
    completion may then be made in several turns."""
    return [name for name in ("tools", "environment_factory", "rollout_func") if inputs.get(name)]


def _lengths(inputs: Mapping[str, Any], tokenizer: Any, template: Mapping[str, Any]) -> Lengths:
    """The lengths of the training prompts, and the longest of all data sets."""
    lengths = measure_lengths(inputs.get("train_dataset"), tokenizer, template)
    evaluation = inputs.get("eval_dataset")
    others = [*evaluation.values()] if isinstance(evaluation, Mapping) else [evaluation]
    longest = [measure_lengths(rows, tokenizer, template).longest for rows in others if rows is not None]
    if lengths.longest is None or None in longest:
        return Lengths(lengths.mean, None)
    return Lengths(lengths.mean, max([lengths.longest, *(length for length in longest if length is not None)]))


def _context_length(args: PolicyConfig, lengths: Lengths, config: Any, inputs: Mapping[str, Any]) -> int:
    """Most tokens of a prompt with its response: `vllm_max_model_length`, or what the data set needs, or, where prompts
    are made while the run goes on, what the model has positions for."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if args.vllm_max_model_length is not None:
        return int(args.vllm_max_model_length)
    if limit is not None and (turn_makers(inputs) or lengths.longest is None):
        return int(limit)
    needed = (lengths.longest or int(4 * lengths.mean)) + int(args.max_completion_length)
    return needed if limit is None else min(needed, int(limit))
