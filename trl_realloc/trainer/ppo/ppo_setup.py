"""Checks and plans a run from the inputs of PPO's trainer.

The checks are in `checks`, tokenization in `prompt_data`, and steps that all trainers share in `run_setup`.
"""

from __future__ import annotations

from torch import nn

from ...algorithms.ppo import PPO
from ...algorithms.rewards import check_columns_free
from ...engines.model_configs import read_config
from ...engines.models import changes_base, check_trains
from ...engines.requests import Sampling
from ...plan.dataflow import Role
from ...runtime.calls.generate_and_score import CallSettings
from ..accelerate_plugin import ReallocationPlugin
from ..checks import input_checks, model_checks
from ..checks.input_checks import SpecialTokens
from ..checks.obstacles import check_quantized
from ..checks.optimizer_checks import check_optimizer
from ..ppo_config import PPOConfig
from ..run.job_builder import ppo_job, sampling_temperature
from ..run.plan_request import PlanRequest
from ..run.replay_setup import replay_mode, with_replay
from ..run.role_models import reward_sources, role_configs
from ..run.run_inputs import RunInputs
from ..run.run_setup import RunSetup, plan_check, plan_run
from ..trainer_inputs import TrainerInputs
from .prompt_data import PromptData, read_prompts


def prepare(
    args: PPOConfig, plugin: ReallocationPlugin, request: PlanRequest, rank: int, inputs: TrainerInputs
) -> tuple[RunSetup, PromptData]:
    """Check the user's inputs, choose the plan, and then create the policy. No weights are read, unless the policy can
    only be loaded whole.

    All ranks together. Fills in the computed fields of `args`.

    Returns:
        The run, and its prompts.

    Raises:
        ConfigError, DataError, ModelError, PlanError, RewardError, ValueError: an input that cannot be used.
    """
    run, tokens = _check_inputs(args, plugin, request, rank, inputs)
    check = plan_check(run)
    context = input_checks.context_of(run.configs, [source.processing_class for source in run.rewards.models])
    vocabulary = run.configs[Role.ACTOR][0].get_text_config().vocab_size
    prompts = read_prompts(args, run.given, context, vocabulary, tokens.pad)
    args.set_batch_sizes(request.cluster.size, len(prompts.train))
    algorithm = PPO(args.ppo_settings(), args.seed, tokens.eos)
    for function in run.rewards.functions:
        for dataset, columns in prompts.columns.items():
            check_columns_free(columns, dataset)
            function.check_parameters(columns, dataset)
    context_length = prompts.longest + args.response_length
    input_checks.check_positions(run.configs, context_length)
    job = ppo_job(
        args,
        plugin,
        request.cluster,
        rank,
        request.engine,
        run.job_models(),
        prompt_tokens=prompts.mean_tokens,
        context_length=context_length,
        pad_token_id=tokens.pad,
    )
    policy = run.configs[Role.ACTOR][0]
    mode = replay_mode(args, policy, by_vllm=request.by_vllm, no_forward=_no_forward(args))
    job = with_replay(job, mode)
    stops = () if tokens.stop is None else (tokens.stop,)
    call_settings = CallSettings(
        sampling=Sampling(args.response_length, sampling_temperature(args), stops),
        seed=args.seed,
        eos_token_id=tokens.eos,
        processing_class=run.given.processing_class,
        functions=run.rewards.functions,
        reward_weights=run.rewards.weights,
        skip_nonfinite=args.skip_nonfinite_updates,
    )
    return plan_run(run, check, job, call_settings, algorithm, prompts.train), prompts


def _no_forward(args: PPOConfig) -> str | None:
    """The argument `no_forward` of `replay_mode`."""
    updates = args.num_ppo_epochs * args.num_mini_batches
    if updates == 1 or args.vllm_importance_sampling_correction:
        return None
    return (
        f"no forward of the policy comes before the {updates} optimizer steps of a batch; set "
        f"vllm_importance_sampling_correction to True, which adds one (actor.forward)"
    )


def _check_inputs(
    args: PPOConfig, plugin: ReallocationPlugin, request: PlanRequest, rank: int, inputs: TrainerInputs
) -> tuple[RunInputs, SpecialTokens]:
    """Check models, tokenizers, rewards and optimizers, and how they fit together."""
    input_checks.check_parts(
        inputs.processing_class, inputs.reward_processing_classes, inputs.data_collator, inputs.optimizers
    )
    inputs = inputs.gathered()
    model, ref_model, value_model = inputs.model, inputs.ref_model, inputs.value_model
    model_checks.check_models(model, ref_model, value_model, inputs.rewards)
    model_checks.check_adapters(args, model, inputs.peft_config)
    check_quantized(model, request.policy_config, inputs.peft_config, inputs.quantization_config)
    tokens = input_checks.special_tokens(args, inputs.processing_class)
    config = request.policy_config if isinstance(model, str) else read_config(model, "model")
    check_optimizer(args, inputs.optimizer, inputs.scheduler, {"model": model, "value_model": value_model})
    rewards = reward_sources(inputs, args.seed, args.reward_weights)
    graph = args.ppo_settings().graph
    configs = role_configs(inputs, graph, config)
    model_checks.check_roles(configs, model, ref_model, value_model, inputs.reward_models, rewards, tokens.stop)
    if isinstance(model, nn.Module) and inputs.peft_config is None:
        check_trains(model, "model")
    if isinstance(value_model, nn.Module):
        check_trains(value_model, "value_model")
    adapters = args.model_adapter_name, args.ref_adapter_name
    copies = changes_base(inputs.peft_config) and ref_model is None
    run = RunInputs(args, plugin, request, rank, inputs, graph, rewards, configs, adapters, copies_adapter=copies)
    return run, tokens
