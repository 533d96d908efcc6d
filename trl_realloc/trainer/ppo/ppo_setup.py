"""The order of the steps from the user's inputs to a run that is checked and planned (`Setup`).

The steps themselves are in `plan_request`, `input_checks`, `model_checks`, `prompt_data`, `plan_checks` and
`role_models`. Engines are built later, by `runtime.placement.placement`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...algorithms.ppo import PPO
from ...algorithms.rewards import Rewards
from ...engines.base import Sampling
from ...engines.model_configs import read_config
from ...engines.models import adapter_configs, check_trains, shell
from ...plan.dataflow import Role
from ...plan.execution_plan import ExecutionPlan
from ...profiling.auto_plan import JobPlan, known_estimate, plan_job
from ...profiling.job import Job
from ...profiling.job_models import JobModels
from ...runtime.calls.generate_and_score import CallSettings
from ...runtime.launch.hosts import Process, check_gpus
from ...runtime.launch.launcher import announce
from ..accelerate_plugin import ReallocationPlugin
from ..checks import input_checks, model_checks
from ..checks.input_checks import SpecialTokens
from ..checks.optimizer_checks import check_optimizer
from ..checks.plan_checks import check_adapters_split, check_plan, check_sharding
from ..grpo_config import PolicyConfig
from ..ppo_config import PPOConfig
from ..run.job_builder import compute_dtype, launched_deepspeed_config, ppo_job, sampling_temperature
from ..run.optimizer_sharding import OptimizerSharding
from ..run.optimizers import LearningRates, make_optimizer, part_of, without_parameters
from ..run.plan_request import PlanRequest
from ..run.run_setup import RunSetup
from ..trainer_inputs import TrainerInputs
from .prompt_data import PromptData, read_prompts
from .role_models import build_roles, reward_sources, role_configs


@dataclass(frozen=True)
class Setup(RunSetup):
    """A run of PPO that is checked and planned.

    Args:
        check_prompts: refuses a tokenized dataset to which the policy cannot respond (`PromptData.check`).
        context_length: the longest prompt with the longest response, tokens.
    """

    algorithm: PPO
    eval_dataset: Any
    collate: Callable[[list[Any]], Any]
    check_prompts: Callable[[Any, str], list[int]]
    context_length: int
    stop_token_id: int | None


def prepare(
    args: PPOConfig, plugin: ReallocationPlugin, request: PlanRequest, rank: int, inputs: TrainerInputs
) -> Setup:
    """Check everything that the user passed, choose the plan, and then make the policy. No weights are read, unless the
    policy can only be loaded whole.

    All ranks together. Fills in the computed fields of `args`.

    Raises:
        ConfigError, DataError, ModelError, PlanError, RewardError, ValueError: an input that cannot be used.
    """
    inputs, tokens, rewards, configs = _check_inputs(args, request, inputs)
    adapters = adapter_configs(inputs.model, inputs.peft_config)
    # kept for the whole run, without the loaded models that `inputs` holds
    settings = None if inputs.optimizer is None else without_parameters(inputs.optimizer)
    sharding = OptimizerSharding(args, settings)
    check = partial(
        check_plan_of_run,
        args,
        configs,
        adapters,
        sharding,
        request.processes,
        own_reference=inputs.ref_model is not None,
    )
    if request.plan is not None:
        check(request.plan)
    if (request.plan["actor.generate"].engine if request.plan is not None else request.engine) == "vllm":
        model_checks.check_generated(args, inputs.model, configs[Role.ACTOR][0], inputs.peft_config)
    prompts = read_prompts(args, inputs, configs[Role.ACTOR][0], tokens.pad)
    args.set_batch_sizes(request.cluster.size, len(prompts.train))
    algorithm = PPO(args.ppo_settings(), args.seed, tokens.eos)
    for function in rewards.functions:
        for dataset, columns in prompts.columns.items():
            function.check_parameters(columns, dataset)
    context_length = prompts.longest + args.response_length
    input_checks.check_positions(configs, context_length)
    job = _describe_job(args, plugin, request, rank, inputs, configs, prompts, context_length, tokens.pad)
    job = replace(job, check=check, splits=sharding.splits_with(adapters))
    job_plan = plan_of_job(job, request, plugin)
    plan = job_plan.plan
    announce(request.processes, plan, rank)
    policy, roles = build_roles(args, plan, rank, inputs, rewards, configs)
    value_model = inputs.value_model
    has_value_model = not isinstance(value_model, str) and rank in plan.mesh("critic.train")
    return Setup(
        plan=plan,
        roles=roles,
        call_settings=_call_settings(args, inputs, tokens, rewards, job),
        algorithm=algorithm,
        train_dataset=prompts.train,
        eval_dataset=prompts.evaluation,
        collate=prompts.collate,
        check_prompts=prompts.check,
        rates=LearningRates.of(args, inputs.optimizer, inputs.scheduler),
        context_length=context_length,
        make_optimizer=optimizer_maker(args, inputs.optimizer),
        stop_token_id=tokens.stop,
        job_plan=job_plan,
        job=job,
        models_before_start={
            Role.ACTOR: policy if rank in plan.mesh("actor.train") else shell(configs[Role.ACTOR][0]),
            Role.CRITIC: value_model if has_value_model else shell(configs[Role.CRITIC][0], is_policy=False),
        },
        is_frozen_in_part=frozen_in_part(inputs.model, inputs.value_model),
    )


def plan_of_job(job: Job, request: PlanRequest, plugin: ReallocationPlugin) -> JobPlan:
    """The plan that the user asked for, or else the planner's choice, with its estimate. All ranks together."""
    if request.plan is not None:
        return known_estimate(job, request.plan)
    return plan_job(job, measure_first=plugin.measure == "first")


def frozen_in_part(*models: Any) -> bool:
    """True if some parameters of the given models are not trained. Models given by name are trained whole. Call this on
    the models as the user gave them, so that all ranks get the same answer: later a rank keeps only its parts."""
    given = [model for model in models if isinstance(model, nn.Module)]
    return any(not parameter.requires_grad for model in given for parameter in model.parameters())


def check_plan_of_run(
    args: PPOConfig | PolicyConfig,
    configs: Mapping[Role, Sequence[Any]],
    adapters: Mapping[str, Any],
    sharding: OptimizerSharding,
    processes: Sequence[Process],
    plan: ExecutionPlan,
    *,
    own_reference: bool = False,
) -> None:
    """Refuse a plan that the models, the optimizer or the visible GPUs do not allow.

    Args:
        adapters: the PEFT configs of the policy's adapters, by their names.
        own_reference: the user gave a reference model.

    Raises:
        PlanError, ValueError: names what is not allowed.
    """
    precision, deepspeed = compute_dtype(args), launched_deepspeed_config(args)
    adapted = [Role.ACTOR] if adapters else []
    check_plan(args, plan, configs, adapted, precision, deepspeed, own_reference=own_reference)
    check_adapters_split(adapters, plan)
    check_sharding(sharding.name, sharding.splits, plan)
    check_gpus(processes, plan)


def _check_inputs(
    args: PPOConfig, request: PlanRequest, inputs: TrainerInputs
) -> tuple[TrainerInputs, SpecialTokens, Rewards, Mapping[Role, Sequence[Any]]]:
    """Check models, tokenizers, rewards and optimizers, and how they fit together.

    Returns:
        The inputs with whole parameters and names as text; the special tokens; the rewards; every model's config.
    """
    input_checks.check_parts(
        inputs.processing_class, inputs.reward_processing_classes, inputs.data_collator, inputs.optimizers
    )
    inputs = inputs.gathered()
    model, ref_model, value_model = inputs.model, inputs.ref_model, inputs.value_model
    model_checks.check_models(model, ref_model, value_model, inputs.rewards)
    model_checks.check_adapters(args, model, inputs.peft_config)
    tokens = input_checks.special_tokens(args, inputs.processing_class)
    checkpoint_config = request.policy_config if isinstance(model, str) else read_config(model, "model")
    check_optimizer(args, inputs.optimizer, inputs.scheduler, {"model": model, "value_model": value_model})
    rewards = reward_sources(args, inputs)
    configs = role_configs(inputs, checkpoint_config)
    tokenizer = inputs.processing_class
    model_checks.check_roles(
        configs, model, ref_model, value_model, inputs.reward_models, rewards, tokenizer, tokens.stop
    )
    if isinstance(model, nn.Module) and inputs.peft_config is None:
        check_trains(model, "model")
    if isinstance(value_model, nn.Module):
        check_trains(value_model, "value_model")
    return inputs, tokens, rewards, configs


def _describe_job(
    args: PPOConfig,
    plugin: ReallocationPlugin,
    request: PlanRequest,
    rank: int,
    inputs: TrainerInputs,
    configs: Mapping[Role, Sequence[Any]],
    prompts: PromptData,
    context_length: int,
    pad_token_id: int,
) -> Job:
    """Describe this run for the planner."""
    models = JobModels.of_run(
        configs,
        args.ppo_settings().graph,
        inputs.model,
        peft_config=inputs.peft_config,
        processing_class=inputs.processing_class,
        mixed=compute_dtype(args),
        generation_engine=request.engine,
        own_reference=inputs.ref_model is not None,
    )
    return ppo_job(
        args,
        plugin,
        request.cluster,
        rank,
        request.engine,
        models,
        prompt_tokens=prompts.mean_tokens,
        context_length=context_length,
        pad_token_id=pad_token_id,
    )


def _call_settings(
    args: PPOConfig, inputs: TrainerInputs, tokens: SpecialTokens, rewards: Rewards, job: Job
) -> CallSettings:
    return CallSettings(
        sampling=Sampling(
            args.response_length, sampling_temperature(args), () if tokens.stop is None else (tokens.stop,)
        ),
        seed=args.seed,
        eos_token_id=tokens.eos,
        processing_class=inputs.processing_class,
        functions=rewards.functions,
        reward_weights=rewards.weights,
        skip_nonfinite=args.skip_nonfinite_updates,
        attention_at=job.models.attention_at(job.graph),
    )


def optimizer_maker(
    args: PPOConfig, optimizer: torch.optim.Optimizer | None
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Makes a role's optimizer: its part of the user's optimizer, or, without one, the optimizer that `args` name."""
    return partial(make_optimizer, args) if optimizer is None else partial(part_of, optimizer)
