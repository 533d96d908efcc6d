"""From the inputs of a trainer of one policy, such as GRPO's, to a run that is checked and planned (`PolicySetup`).

TRL checks its own arguments when its constructor runs, after this. Engines are built later, by
`runtime.placement.placement`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import AutoTokenizer

from ...algorithms.host_loss import HostLoss
from ...algorithms.rewards import RewardModelSource, Rewards, read_rewards
from ...common.errors import PlanError
from ...common.notices import notice
from ...engines.base import Sampling
from ...engines.generation.sampling_checks import why_not_moved
from ...engines.model_configs import loaded_config, read_config, trained_config
from ...engines.models import adapter_configs, check_trains, has_adapters, load_classifier, shell
from ...engines.training.deepspeed_compat import gathered
from ...engines.training.weight_source import fill
from ...plan.algorithm_graphs import grpo_graph
from ...plan.assignment import in_place
from ...plan.dataflow import DataflowGraph, Role
from ...plan.execution_plan import ExecutionPlan
from ...profiling.job import Job
from ...profiling.job_models import JobModels
from ...runtime.calls.generate_and_score import CallSettings
from ...runtime.launch.launcher import announce
from ...runtime.samples.context_limit import ContextLimit
from ..accelerate_plugin import ReallocationPlugin
from ..checks import model_checks
from ..checks.config_checks import ConfigError, best_model_problems
from ..checks.input_checks import check_positions
from ..checks.optimizer_checks import check_optimizer
from ..grpo_config import PolicyConfig, check_init_kwargs, given_attention, given_dtype, reward_dtype
from ..ppo.ppo_setup import check_plan_of_run, frozen_in_part, optimizer_maker, plan_of_job
from ..ppo.role_models import load_seeded
from ..run.job_builder import compute_dtype
from ..run.optimizer_sharding import OptimizerSharding
from ..run.optimizers import LearningRates, without_parameters
from ..run.plan_request import PlanRequest, read_plan_request
from ..run.run_setup import RunSetup
from .planned_rewards import reward_models
from .policy_job import make_policy_job, turn_makers
from .policy_roles import build_policy_roles
from .prompt_lengths import context_limit, positions_of
from .trl_sampling import generation_config, sampling_of, stop_token_ids, tokenizer_of, uncorrected_loss


@dataclass(frozen=True)
class PolicySetup(RunSetup):
    """A run of a trainer of one policy that is checked and planned.

    Args:
        corrects: the loss is corrected for the log-probabilities of the generation engine, as TRL does for vLLM's.
        reward_models: those among the reward functions.
    """

    algorithm: HostLoss
    corrects: bool
    reward_models: Sequence[RewardModelSource]


def prepare_policy(
    args: PolicyConfig, plugin: ReallocationPlugin, world: Any, inputs: Mapping[str, Any]
) -> PolicySetup:
    """Check the inputs that the engines need, choose the plan, and then make the policy. No weights are read, unless
    the policy can only be loaded whole. All ranks together.

    Args:
        world: Accelerate's `PartialState`.
        inputs: the arguments of the trainer's constructor, by name.

    Raises:
        ConfigError, ModelError, PlanError, ValueError: an input that cannot be used.
    """
    model, peft_config = inputs["model"], inputs.get("peft_config")
    optimizer, scheduler = inputs.get("optimizers") or (None, None)
    rank = world.process_index
    if problems := list(best_model_problems(args)):
        raise ConfigError("\n".join(problems))
    if any(isinstance(given, str) for given in [model, *reward_models(inputs.get("reward_funcs"))]):
        check_init_kwargs(args)
    rewards = _reward_sources(args, inputs)
    graph = grpo_graph(reference=args.beta != 0.0, reward_models=bool(rewards.models))
    check_turns(args, inputs)
    request = of_host_loop(read_plan_request(args, plugin, world, model, graph), inputs)
    configs = _check_models(args, model, peft_config, request, graph, reward_models(inputs.get("reward_funcs")))
    check_optimizer(args, optimizer, scheduler, {"model": model})
    processing_class = inputs.get("processing_class") or _load_tokenizer(args, model)
    adapters = adapter_configs(model, peft_config)
    settings = None if optimizer is None else without_parameters(optimizer)  # kept for the whole run
    sharding = OptimizerSharding(args, settings)
    check = partial(check_plan_of_run, args, configs, adapters, sharding, request.processes)
    if has_adapters(model) and Role.REFERENCE in graph.roles:
        check = partial(_check_with_adapters, check)
    if request.plan is not None:
        check(request.plan)
    by_vllm = (request.plan["actor.generate"].engine if request.plan is not None else request.engine) == "vllm"
    if by_vllm:
        model_checks.check_generated(args, model, configs[Role.ACTOR][0], peft_config)
    vocabulary = configs[Role.ACTOR][0].get_text_config().vocab_size
    sampling = sampling_of(args, stop_token_ids(tokenizer_of(processing_class), model), vocabulary, by_vllm=by_vllm)
    job = _describe_job(args, plugin, request, rank, inputs, configs, graph, processing_class, sampling)
    job = replace(job, check=check, splits=sharding.splits_with(adapters))
    job_plan = plan_of_job(job, request, plugin)
    corrects = by_vllm and bool(args.vllm_importance_sampling_correction)
    if corrects and (problem := uncorrected_loss(args)):
        raise ConfigError(problem)
    check_positions(configs, job.options.context_length)
    announce(request.processes, job_plan.plan, rank)
    policy, roles = build_policy_roles(args, job_plan.plan, rank, model, peft_config, configs, rewards)
    if world.num_processes == 1:
        # a user of TRL may look at the weights before the training; a vLLM engine starts before they are on its device
        fill(policy, torch.device("cpu"))
    has_part = rank in job_plan.plan.mesh("actor.train")
    return PolicySetup(
        plan=job_plan.plan,
        models_before_start={Role.ACTOR: policy if has_part else _shell(configs[Role.ACTOR][0], model)},
        roles=roles,
        call_settings=_call_settings(
            args, sampling, processing_class, rewards, _context(args, job, configs[Role.ACTOR][0], by_vllm), job
        ),
        reward_models=rewards.models,
        algorithm=HostLoss(graph),
        rates=LearningRates.of(args, optimizer, scheduler, (Role.ACTOR,)),
        make_optimizer=optimizer_maker(args, optimizer),
        corrects=corrects,
        job_plan=job_plan,
        job=job,
        train_dataset=inputs.get("train_dataset"),
        is_frozen_in_part=frozen_in_part(model),
    )


def _load_tokenizer(args: PolicyConfig, model: Any) -> Any:
    """The tokenizer of a policy for which the user gave none, as TRL loads it."""
    name = model if isinstance(model, str) else model.config._name_or_path
    return AutoTokenizer.from_pretrained(
        name, truncation_side="left", padding_side="left", trust_remote_code=args.trust_remote_code
    )


def _describe_job(
    args: PolicyConfig,
    plugin: ReallocationPlugin,
    request: PlanRequest,
    rank: int,
    inputs: Mapping[str, Any],
    configs: Mapping[Role, Sequence[Any]],
    graph: DataflowGraph,
    processing_class: Any,
    sampling: Sampling,
) -> Job:
    """Describe this run for the planner.

    Raises:
        ConfigError: see `check_moves`.
        DataError: see `make_policy_job`.
    """
    stays = why_not_moved(sampling)
    check_moves(args, request.plan, stays)
    models = JobModels.of_run(
        configs,
        graph,
        inputs["model"],
        peft_config=inputs.get("peft_config"),
        processing_class=processing_class,
        mixed=compute_dtype(args),
        generation_engine=request.engine,
    )
    job = make_policy_job(args, plugin, request, rank, models, inputs, graph)
    return replace(job, max_staleness=args.max_staleness, streams=not turn_makers(inputs) and stays is None)


def _context(args: PolicyConfig, job: Job, config: Any, by_vllm: bool) -> ContextLimit | None:
    """The most tokens of a prompt with its completion; `None` if the model has no limit.

    Args:
        config: the policy's Transformers config.
        by_vllm: whether vLLM engines generate. The training engine's model also takes prompts that are longer than
            those of the data sets.
    """
    tokens = job.options.context_length if by_vllm else args.vllm_max_model_length or positions_of(config)
    return None if tokens is None else context_limit(tokens, config)


def check_turns(args: PolicyConfig, inputs: Mapping[str, Any]) -> None:
    """Refuse a staleness where a completion may be made in several turns.

    Args:
        inputs: the arguments of the trainer's constructor, by name.

    Raises:
        ConfigError: for that.
    """
    by = turn_makers(inputs)
    if args.max_staleness and by:
        raise ConfigError(
            f"max_staleness is {args.max_staleness}, but with {by[0]} the next turn of a completion is known only when "
            f"it is asked for, so nothing can be generated ahead; set max_staleness to 0."
        )


def check_moves(args: PolicyConfig, plan: ExecutionPlan | None, stays: str | None) -> None:
    """Refuse plans in which a completion is begun by one engine and ended by another, or stopped and gone on with,
    where its sampling does not allow that. With a staleness evaluations and checkpoints stop what is drawn ahead.

    Args:
        stays: the reason (`why_not_moved`); `None` where the sampling allows it.

    Raises:
        ConfigError: for that.
    """
    if stays is None:
        return
    if args.max_staleness:
        raise ConfigError(
            f"max_staleness is {args.max_staleness}, and evaluations and checkpoints stop completions that are drawn "
            f"ahead, which go on later; but {stays}. Leave the setting out, or set max_staleness to 0."
        )
    if plan is not None and plan.streams is not None and plan.streams.migration is not None:
        raise ConfigError(
            f"the plan's streams let completions move between engines, but {stays}. Leave migration out of the plan, "
            f"or leave the setting out."
        )


def of_host_loop(request: PlanRequest, inputs: Mapping[str, Any]) -> PlanRequest:
    """The request with a plan that TRL's loop can follow.

    Args:
        inputs: the arguments of the trainer's constructor, by name.
    """
    plan, by = request.plan, turn_makers(inputs)
    if plan is None or not by:
        return request
    if plan.streams is not None:
        notice(f"the plan's streams have no effect: with {by[0]} a completion may be made in several turns")
        plan = replace(plan, streams=None)
    return replace(request, plan=plan)


def _reward_sources(args: PolicyConfig, inputs: Mapping[str, Any]) -> Rewards:
    """The reward models, of weight 1: TRL weighs the scores."""
    models = reward_models(inputs.get("reward_funcs"))
    if not models:
        return Rewards((), (), {})
    load = partial(load_classifier, dtype=reward_dtype(args), attention=given_attention(args))
    return read_rewards(models, partial(load_seeded, args.seed, load, trained=False))


def _check_models(
    args: PolicyConfig,
    model: Any,
    peft_config: Any,
    request: PlanRequest,
    graph: DataflowGraph,
    rewards: Sequence[Any],
) -> dict[Role, Sequence[Any]]:
    """Check the policy and the reward models. Returns the Transformers config of the model of every role."""
    gathered(model)
    model_checks.check_policy(model)
    model_checks.check_adapter_kinds(model, peft_config)
    config = request.policy_config if isinstance(model, str) else read_config(model, "model")
    model_checks.check_config_of(config, model, "model")
    if not isinstance(model, str) and peft_config is None:
        check_trains(model, "model")
    attention = given_attention(args)
    config = loaded_config(config, model, attention=attention)
    configs: dict[Role, Sequence[Any]] = {Role.ACTOR: [trained_config(config, model, given_dtype(args, config))]}
    if Role.REFERENCE in graph.roles:
        configs[Role.REFERENCE] = [config]
    if rewards:
        dtype = reward_dtype(args)
        configs[Role.REWARD] = [
            loaded_config(read_config(reward, "reward_funcs"), reward, dtype, attention) for reward in rewards
        ]
        for reward_config, reward in zip(configs[Role.REWARD], rewards, strict=True):
            model_checks.check_config_of(reward_config, reward, "reward_funcs")
    return configs


def _check_with_adapters(check: Callable[[ExecutionPlan], None], plan: ExecutionPlan) -> None:
    """Check a plan for a policy that came with an adapter, of which a copy is the reference.

    Raises:
        PlanError: the reference has parameters of its own in this plan.
    """
    if not in_place(plan["actor.train"], plan["reference.forward"]):
        raise PlanError(
            "the reference of a policy with an adapter is a copy of the adapter beside it, so reference.forward runs "
            "on the mesh and in the layout of actor.train, as in plan: flatten."
        )
    check(plan)


def _shell(config: Any, model: Any) -> Any:
    """The policy's structure on a rank without a part of it, with the generation config that TRL reads on every
    rank."""
    structure = shell(config)
    if (given := generation_config(model)) is not None:
        structure.generation_config = given
    return structure


def _call_settings(
    args: PolicyConfig,
    sampling: Sampling,
    processing_class: Any,
    rewards: Rewards,
    context: ContextLimit | None,
    job: Job,
) -> CallSettings:
    return CallSettings(
        sampling=sampling,
        seed=args.seed,
        eos_token_id=tokenizer_of(processing_class).eos_token_id,
        processing_class=processing_class,
        functions=(),
        reward_weights=rewards.weights,
        skip_nonfinite=args.skip_nonfinite_updates,
        context=context,
        attention_at=job.models.attention_at(job.graph),
    )
