"""`RunSetup`: a checked and planned run, and the last steps to it, which all trainers share.

Earlier steps are in `ppo_setup`, and in `policy_setup` for GRPO and RLOO. `runtime.placement.placement` builds the
engines later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from ...common.errors import PlanError
from ...engines.models import adapter_configs
from ...plan.dataflow import Role
from ...plan.execution_plan import ExecutionPlan
from ...plan.quantization import Quantization
from ...profiling.auto_plan import JobPlan, known_estimate, plan_job
from ...profiling.job import Job
from ...profiling.job_models import POLICIES
from ...runtime.calls.generate_and_score import CallSettings
from ...runtime.launch.hosts import Process, check_gpus
from ...runtime.launch.launcher import announce
from ...runtime.placement.engine_options import EngineOptions
from ...runtime.placement.roles import Roles
from ..checks.model_checks import check_generated
from ..checks.plan_checks import check_adapters_split, check_plan, check_sharding, check_unsplit
from .job_builder import compute_dtype, launched_deepspeed_config
from .optimizer_sharding import OptimizerSharding
from .optimizers import LearningRates, make_optimizer, part_of, without_parameters, without_whole
from .role_models import build_roles
from .run_inputs import RunInputs


if TYPE_CHECKING:
    from ..grpo_config import PolicyConfig
    from ..ppo_config import PPOConfig


@dataclass(frozen=True)
class RunSetup:
    """A checked and planned run. It holds no engine.

    Args:
        models_before_start: this rank's model of each trained role before its engine is built: the loaded model, or a
            structure without weights if the model is passed by path or has no part on this rank. After the start it is
            the engine's module.
        rates: learning rate of each trained role, which the scheduler changes. The engines create the optimizers.
        make_optimizer: `functools.partial` from a role's module to its optimizer: a part of the user's optimizer, or
            else the optimizer that the training arguments name.
        job_plan: plan with its estimate.
        job: input of the planner.
        train_dataset: training data; tokenized for PPO, as passed by the user for other trainers.
        is_fixed: whether a user's model is more than its config and weights: it is trained in part, or has changes
            (`model_changes`).
    """

    plan: ExecutionPlan
    roles: Roles
    call_settings: CallSettings
    algorithm: Any
    models_before_start: Mapping[Role, Any]
    rates: LearningRates
    make_optimizer: partial[torch.optim.Optimizer]
    job_plan: JobPlan
    job: Job
    train_dataset: Any
    is_fixed: bool

    @property
    def engine_options(self) -> EngineOptions:
        """The job's engine options for this plan, with this run's optimizer."""
        options = self.job.options.for_plan(self.plan, self.job.workload.episodes)
        return replace(options, make_optimizer=self.make_optimizer)

    def started(self, models: Mapping[Role, Any]) -> Self:
        """The setup after the start of the engines, without references to the user's models and to the parameters in
        the user's optimizer.

        Args:
            models: this rank's modules of the trained roles.
        """
        make = without_whole(self.make_optimizer)
        return replace(self, models_before_start=models, roles=self.roles.loaded(), make_optimizer=make)

    def structure(self, role: Role) -> Any:
        """A new structure without weights of a trained role's model."""
        return structure(self.roles, role)


@dataclass(frozen=True)
class PlanCheck:
    """Refuses plans that a run cannot have. It lives as long as the run, so it holds no user model.

    Args:
        configs: the Transformers config of every model of every role.
        adapters: PEFT configs of the policy's adapters, by name.
        sharding: sharding that the optimizer allows.
        changes: see `RunInputs`.
        own_reference, copies_adapter, quantization: see `RunInputs`.
    """

    args: PPOConfig | PolicyConfig
    configs: Mapping[Role, Sequence[Any]]
    adapters: Mapping[str, Any]
    sharding: OptimizerSharding
    processes: Sequence[Process]
    changes: Mapping[Role, str]
    own_reference: bool
    copies_adapter: bool
    quantization: Quantization | None

    def __call__(self, plan: ExecutionPlan) -> None:
        """Refuse a plan that the models, the optimizer or the visible GPUs do not allow.

        Raises:
            PlanError, ValueError: names what is not allowed.
        """
        if self.copies_adapter and plan.base_holder("reference.forward") is None:
            raise PlanError(
                "the reference of a policy with an adapter is a copy of the adapter beside it, so reference.forward "
                "runs where the plan has the policy in the same layout: with actor.train, as in plan: flatten, or with "
                "actor.generate and tp: 1, as in plan: separate."
            )
        for name, assignment in plan.assignments.items():
            role = plan.graph.call(name).role
            if assignment.engine == "megatron" and role in self.changes:
                raise PlanError(
                    f"{name} has engine megatron, which splits the modules of a model, and the {role}'s has "
                    f"{self.changes[role]}; use engine zero."
                )
            if (
                self.quantization is not None
                and role in POLICIES
                and not (role is Role.REFERENCE and self.own_reference)
            ):
                check_unsplit(name, assignment)
        precision, deepspeed = compute_dtype(self.args), launched_deepspeed_config(self.args)
        adapted = [Role.ACTOR] if self.adapters else []
        check_plan(
            self.args,
            plan,
            self.configs,
            adapted,
            precision,
            deepspeed,
            own_reference=self.own_reference,
            quantization=self.quantization,
        )
        check_adapters_split(self.adapters, plan)
        check_sharding(self.sharding.name, self.sharding.splits, plan)
        check_gpus(self.processes, plan)


def plan_check(run: RunInputs) -> PlanCheck:
    """The check of the run's plans. At once checks the user's plan, and a policy with adapters that vLLM engines are to
    generate with.

    Raises:
        ConfigError, PlanError, ValueError: names what is not allowed.
    """
    inputs, request = run.given, run.request
    settings = None if inputs.optimizer is None else without_parameters(inputs.optimizer)
    check = PlanCheck(
        run.args,
        run.configs,
        adapter_configs(inputs.model, inputs.peft_config),
        OptimizerSharding(run.args, settings),
        request.processes,
        run.changes(),
        run.own_reference,
        run.copies_adapter,
        run.quantization,
    )
    if request.plan is not None:
        check(request.plan)
    if request.by_vllm:
        check_generated(run.args, inputs.model, run.configs[Role.ACTOR][0], inputs.peft_config)
    return check


def plan_run(
    run: RunInputs, check: PlanCheck, job: Job, call_settings: CallSettings, algorithm: Any, train_dataset: Any
) -> RunSetup:
    """Choose the plan, and create the policy. No weights are read, unless the policy can only be loaded whole. All
    ranks together.

    Args:
        check: checks the run's plans.
        job: input of the planner.

    Raises:
        ConfigError, ModelError, PlanError: see `plan_job` and `build_roles`.
    """
    inputs, request = run.given, run.request
    engines = tuple(
        engine
        for engine in job.engines
        if engine != "megatron" or not (check.changes or check.quantization is not None)
    )
    splits = check.sharding.splits_with(check.adapters)
    if check.quantization is not None:
        splits = replace(splits, elements=False, parameters=False)
    job = replace(job, check=check, engines=engines, splits=splits)
    if request.plan is not None:
        job_plan = known_estimate(job, request.plan)
    else:
        job_plan = plan_job(job, measure_first=run.plugin.measure == "first")
    plan = job_plan.plan
    announce(request.processes, plan, run.rank)
    policy, roles = build_roles(run, plan)
    models = {Role.ACTOR: policy, Role.CRITIC: inputs.value_model}
    trained = {role: models[role] for role in plan.graph.trained_roles}
    return RunSetup(
        plan=plan,
        roles=roles,
        call_settings=replace(call_settings, attention_at=job.models.attention_at(job.graph)),
        algorithm=algorithm,
        models_before_start={
            role: model if _is_here(model, role, plan, run.rank) else structure(roles, role)
            for role, model in trained.items()
        },
        rates=LearningRates.of(run.args, inputs.optimizer, inputs.scheduler, tuple(trained)),
        make_optimizer=(
            partial(make_optimizer, run.args) if inputs.optimizer is None else partial(part_of, inputs.optimizer)
        ),
        job_plan=job_plan,
        job=job,
        train_dataset=train_dataset,
        is_fixed=bool(check.changes) or frozen_in_part(inputs.model, inputs.value_model),
    )


def _is_here(model: Any, role: Role, plan: ExecutionPlan, rank: int) -> bool:
    """True if a trained role has a part on this rank, and its model is not a name."""
    home = plan.graph.train_call(role)
    return not isinstance(model, str) and home is not None and rank in plan.mesh(home)


def structure(roles: Roles, role: Role) -> Any:
    """A new structure without weights of a trained role's model."""
    make = roles[role].shell
    assert make is not None, "trained roles have structures"
    return make()


def frozen_in_part(*models: Any) -> bool:
    """True if some parameters of the models are not trained. Models passed by name are trained whole. Call this on the
    user's models, so that all ranks get the same answer: later a rank keeps only its parts."""
    loaded = [model for model in models if isinstance(model, nn.Module)]
    return any(not parameter.requires_grad for model in loaded for parameter in model.parameters())
