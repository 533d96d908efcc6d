"""Checks and plans a run from the inputs of a trainer of one policy, such as GRPO's.

TRL's constructor checks its own arguments afterwards. Steps that all trainers share are in `run_setup`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoTokenizer

from ...algorithms.rewards import RewardModelSource, Rewards
from ...algorithms.trainer_loss import TrainerLoss
from ...common.notices import notice
from ...engines.generation.sampling_checks import engine_only_settings, why_not_moved
from ...engines.model_configs import most_positions, read_config
from ...engines.models import changes_base, check_trains, has_adapters
from ...engines.requests import Sampling
from ...engines.training.weight_source import fill
from ...plan.algorithm_graphs import grpo_graph
from ...plan.dataflow import DataflowGraph, Role
from ...plan.execution_plan import ExecutionPlan
from ...profiling.job import Job
from ...runtime.calls.generate_and_score import CallSettings
from ...runtime.samples.context_limit import ContextLimit
from ..accelerate_plugin import ReallocationPlugin
from ..checks import model_checks
from ..checks.config_checks import ConfigError, best_model_problems
from ..checks.input_checks import check_context, check_positions
from ..checks.obstacles import check_quantized
from ..checks.optimizer_checks import check_optimizer
from ..checks.trainable import router_loss_coefficient, users_method
from ..checks.unfollowed_settings import Then, unfollowed_settings
from ..grpo_config import (
    PolicyConfig,
    check_init_kwargs,
    given_attention,
    given_dtype,
    given_quantization,
    reward_dtype,
)
from ..run.job_builder import policy_job
from ..run.plan_request import PlanRequest, read_plan_request
from ..run.replay_setup import replay_mode, with_replay
from ..run.role_models import reward_sources, role_configs
from ..run.run_inputs import RunInputs
from ..run.run_setup import RunSetup, plan_check, plan_run
from ..trainer_inputs import TrainerInputs
from .prompt_lengths import check_lengths, context_length, context_limit, lengths_of
from .rewards import reward_models
from .trl_sampling import generation_config, sampling_of, stop_token_ids, tokenizer_of, uncorrected_loss


def prepare_policy(
    args: PolicyConfig, plugin: ReallocationPlugin, world: Any, inputs: Mapping[str, Any]
) -> tuple[RunSetup, Sequence[RewardModelSource]]:
    """Check the inputs that the engines need, choose the plan, and then create the policy. No weights are read, unless
    the policy can only be loaded whole. All ranks together.

    Args:
        world: Accelerate's `PartialState`.
        inputs: constructor arguments of the trainer, by name.

    Returns:
        The run, and the reward models among the reward functions.

    Raises:
        ConfigError, ModelError, PlanError, ValueError: an input that cannot be used.
    """
    if problems := [*unfollowed_settings(args, Then.REFUSE), *best_model_problems(args)]:
        raise ConfigError("\n".join(problems))
    arguments, turns = _given(args, inputs), turn_makers(inputs)
    rewards = reward_sources(arguments, args.seed) if arguments.rewards else Rewards((), (), {})
    graph = grpo_graph(reference=args.beta != 0.0, reward_models=bool(rewards.models))
    request = of_host_loop(read_plan_request(args, plugin, world, arguments.model, graph), turns)
    run = _check_models(args, plugin, request, world.process_index, arguments, graph, rewards)
    arguments, (config,) = run.given, run.configs[Role.ACTOR]
    check = plan_check(run)
    tokenizer, by_vllm = tokenizer_of(arguments.processing_class), request.by_vllm
    stops = stop_token_ids(tokenizer, arguments.model)
    sampling = sampling_of(args, stops, config.get_text_config().vocab_size, by_vllm=by_vllm)
    job = _describe_job(run, sampling, turns)
    if by_vllm and args.vllm_importance_sampling_correction and (problem := uncorrected_loss(args)):
        raise ConfigError(problem)
    engine_only = engine_only_settings(sampling, full_vocabulary=args.full_vocabulary_logprobs)
    if args.max_staleness and engine_only:
        raise ConfigError(
            f"max_staleness {args.max_staleness} corrects the loss by the engine's log-probabilities, which with "
            f"{', '.join(engine_only)} are not those of the policy; leave these settings out, or max_staleness."
        )
    call_settings = CallSettings(
        sampling=sampling,
        seed=args.seed,
        eos_token_id=None,  # `sampling` says which tokens end a response
        processing_class=arguments.processing_class,
        functions=(),
        reward_weights=rewards.weights,
        skip_nonfinite=args.skip_nonfinite_updates,
        context=_context(args, job, config, by_vllm),
    )
    setup = plan_run(run, check, job, call_settings, TrainerLoss(graph), arguments.train_dataset)
    policy = setup.models_before_start[Role.ACTOR]
    if world.num_processes == 1:
        # users of TRL may read the weights before training; a vLLM engine starts before they are on its device
        fill(policy, torch.device("cpu"))
    if run.rank not in setup.plan.mesh("actor.train") and (of_model := generation_config(arguments.model)) is not None:
        policy.generation_config = of_model  # TRL reads it on every rank
    return setup, rewards.models


def _given(args: PolicyConfig, inputs: Mapping[str, Any]) -> TrainerInputs:
    """The constructor arguments that a plan needs.

    Raises:
        ConfigError: see `check_init_kwargs`.
    """
    model, rewards = inputs["model"], reward_models(inputs.get("reward_funcs"))
    if any(isinstance(candidate, str) for candidate in [model, *rewards]):
        check_init_kwargs(args)
    return TrainerInputs(
        model=model,
        processing_class=inputs.get("processing_class"),
        reward_model=rewards,
        train_dataset=inputs.get("train_dataset"),
        eval_dataset=inputs.get("eval_dataset"),
        optimizers=inputs.get("optimizers") or (None, None),
        peft_config=inputs.get("peft_config"),
        reward_argument="reward_funcs",
        attention=given_attention(args),
        reward_dtype=reward_dtype(args),
        quantization_config=given_quantization(args, model, inputs.get("quantization_config")),
    )


def turn_makers(inputs: Mapping[str, Any]) -> list[str]:
    """The constructor arguments that create prompts, or parts of them, during the run; a completion may then take
    several turns."""
    return [name for name in ("tools", "environment_factory", "rollout_func") if inputs.get(name)]


def _check_models(
    args: PolicyConfig,
    plugin: ReallocationPlugin,
    request: PlanRequest,
    rank: int,
    inputs: TrainerInputs,
    graph: DataflowGraph,
    rewards: Rewards,
) -> RunInputs:
    """Check the policy, the reward models and the optimizer, and load the policy's tokenizer if none was passed."""
    inputs = inputs.gathered()
    model = inputs.model
    model_checks.check_policy(model)
    model_checks.check_adapter_kinds(model, inputs.peft_config)
    config = request.policy_config if isinstance(model, str) else read_config(model, "model")
    model_checks.check_config_of(config, model, "model")
    check_quantized(model, config, inputs.peft_config, inputs.quantization_config)
    if not isinstance(model, str) and inputs.peft_config is None:
        check_trains(model, "model")
    configs = role_configs(inputs, graph, config, given_dtype(args, config))
    for reward_config, reward in zip(configs.get(Role.REWARD, ()), inputs.reward_models, strict=True):
        model_checks.check_config_of(reward_config, reward, inputs.reward_argument)
        model_checks.check_read_in_parts(reward, inputs.reward_argument)
    check_optimizer(args, inputs.optimizer, inputs.scheduler, {"model": model})
    inputs = replace(inputs, processing_class=inputs.processing_class or _load_tokenizer(args, model))
    copies = Role.REFERENCE in graph.roles and (has_adapters(model) or changes_base(inputs.peft_config))
    return RunInputs(args, plugin, request, rank, inputs, graph, rewards, configs, copies_adapter=copies)


def _load_tokenizer(args: PolicyConfig, model: Any) -> Any:
    """The policy's tokenizer, loaded as TRL does."""
    name = model if isinstance(model, str) else model.config._name_or_path
    return AutoTokenizer.from_pretrained(
        name, truncation_side="left", padding_side="left", trust_remote_code=args.trust_remote_code
    )


def _describe_job(run: RunInputs, sampling: Sampling, turns: Sequence[str]) -> Job:
    """The planner's description of this run. `turns` is as in `turn_makers`.

    Raises:
        ConfigError: see `check_moves`.
        DataError: a prompt of the data sets leaves no room for a completion, or the policy cannot respond to it.
        ModelError: see `check_context` and `check_positions`.
    """
    args: Any = run.args
    inputs, request, (config,) = run.given, run.request, run.configs[Role.ACTOR]
    stays = why_not_moved(sampling)
    check_moves(args, request.plan, stays)
    models = run.job_models()
    template, completion = args.chat_template_kwargs or {}, int(args.max_completion_length)
    vocabulary = config.get_text_config().vocab_size
    lengths = lengths_of(inputs.train_dataset, inputs.eval_dataset, inputs.processing_class, template, vocabulary)
    context = context_length(args.vllm_max_model_length, lengths, completion, config, is_open=bool(turns))
    context = context or int(4 * lengths.mean) + completion
    if not turns:
        check_lengths(lengths, context, config)
    check_context(run.configs, min(context, lengths.counted + completion))
    check_positions(run.configs, context)
    tokenizer = tokenizer_of(inputs.processing_class)
    job = policy_job(
        args,
        run.plugin,
        request.cluster,
        run.rank,
        request.engine,
        models,
        run.graph,
        prompt_tokens=lengths.mean,
        usual_length=min(context, lengths.usual + completion),
        context_length=context,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    mask = None if args.full_vocabulary_logprobs else sampling.mask
    options = replace(job.options, sampling_mask=mask, router_sums=router_loss_coefficient(args, config) != 0.0)
    mode = replay_mode(args, config, by_vllm=request.by_vllm)
    job = with_replay(replace(job, options=options), mode)
    return replace(job, streams=not turns and stays is None)


def _context(args: PolicyConfig, job: Job, config: Any, by_vllm: bool) -> ContextLimit | None:
    """The maximum tokens of a prompt with its completion; `None` if the model has no limit. Without vLLM, the training
    engine's model also takes prompts longer than those of the data sets."""
    tokens = job.options.context_length if by_vllm else args.vllm_max_model_length or most_positions(config)
    return None if tokens is None else context_limit(tokens, config)


def check_turns(args: Any, turns: Sequence[str], trainer: type) -> None:
    """Refuse a staleness if completions take turns that only the rank of their prompt can make.

    Args:
        turns: constructor arguments that create turns (`turn_makers`).
        trainer: class of the trainer.

    Raises:
        ConfigError: the run has both.
    """
    if not args.max_staleness or not turns:
        return
    obstacle = None
    replaced = users_method(trainer, ("_generate", "_generate_single_turn", "_tool_call_loop"))
    if "environment_factory" in turns:
        obstacle = "the rewards of completions read environments, which are on another rank than the engine"
    elif replaced is not None:
        obstacle = f"{replaced} replaces a method of TRL's that makes their turns"
    elif turns[0] == "tools" and args.tool_workers == 0:
        obstacle = "tool_workers 0 runs tools in the main thread, which trains meanwhile"
    if obstacle is not None:
        raise ConfigError(
            f"max_staleness is {args.max_staleness}, but completions with {turns[0]} cannot be generated ahead: "
            f"{obstacle}. Set max_staleness to 0, or change that."
        )


def check_moves(args: PolicyConfig, plan: ExecutionPlan | None, stays: str | None) -> None:
    """Refuse plans that move or interrupt a completion between engines if its sampling does not allow that. With a
    staleness, evaluations and checkpoints interrupt what is generated ahead.

    Args:
        stays: reason why a completion cannot be moved (`why_not_moved`); `None` if it can.

    Raises:
        ConfigError: the plan does so.
    """
    if stays is None:
        return
    if args.max_staleness:
        raise ConfigError(
            f"max_staleness is {args.max_staleness}, and evaluations and checkpoints interrupt completions "
            f"generated ahead and resume them later; but {stays}. Leave the setting out, or set max_staleness to 0."
        )
    if plan is not None and plan.streams is not None and plan.streams.migration is not None:
        raise ConfigError(
            f"the plan's streams let completions move between engines, but {stays}. Leave migration out of the plan, "
            f"or leave the setting out."
        )


def of_host_loop(request: PlanRequest, turns: Sequence[str]) -> PlanRequest:
    """The request, restricted to plans that TRL's loop can follow.

    Args:
        turns: see `turn_makers`.
    """
    plan = request.plan
    if plan is None or plan.streams is None or not turns:
        return request
    notice(f"the plan's streams have no effect: with {turns[0]} a completion may be made in several turns")
    return replace(request, plan=replace(plan, streams=None))
