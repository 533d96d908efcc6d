"""`RunSetup`: a run that is checked and planned. `ppo_setup` has PPO's, and `policy_setup` that of GRPO and RLOO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from ...plan.dataflow import Role
from ...plan.execution_plan import ExecutionPlan
from ...profiling.auto_plan import JobPlan
from ...profiling.job import Job
from ...runtime.calls.generate_and_score import CallSettings
from ...runtime.placement.engine_options import EngineOptions
from ...runtime.placement.roles import Roles
from .optimizers import LearningRates, without_whole


@dataclass(frozen=True)
class RunSetup:
    """A run that is checked and planned. It holds no engine.

    Args:
        models_before_start: by trained role, the model as this rank has it before its engine is built: the loaded
            model, or the structure without weights of a model that is given by path or has no part on this rank. After
            the start it is the engine's module.
        rates: the learning rate of each trained role, which the scheduler changes. The optimizers themselves are made
            by the engines.
        make_optimizer: a `functools.partial` from a role's module to its optimizer (`ppo_setup.optimizer_maker`).
        job_plan: the plan with its estimate.
        job: the planner's input.
        train_dataset: of PPO tokenized, of other trainers as the user gave it.
        is_frozen_in_part: some parameters of a trained model that the user gave are not trained.
    """

    plan: ExecutionPlan
    roles: Roles
    call_settings: CallSettings
    algorithm: Any
    models_before_start: Mapping[Role, Any]
    rates: LearningRates
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    job_plan: JobPlan
    job: Job
    train_dataset: Any
    is_frozen_in_part: bool

    @property
    def engine_options(self) -> EngineOptions:
        """The engine options of the job for this plan, with the optimizer of this run."""
        options = self.job.options.for_plan(self.plan, self.job.workload.episodes)
        return replace(options, make_optimizer=self.make_optimizer)

    def started(self, models: Mapping[Role, Any]) -> Self:
        """The setup after the engines have started, without references to the models that the user passed, nor to the
        parameters in the user's optimizer.

        Args:
            models: this rank's modules of the trained roles.
        """
        make = without_whole(self.make_optimizer)
        return replace(self, models_before_start=models, roles=self.roles.loaded(), make_optimizer=make)

    def structure(self, role: Role) -> Any:
        """A new structure without weights of a trained role's model."""
        make = self.roles[role].shell
        assert make is not None, "trained roles have structures"
        return make()
