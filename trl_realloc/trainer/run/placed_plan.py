"""`PlacedPlan`: the execution plan of a run, with the engines and the executor of its calls.

Searching for a faster plan is in `plan_change`, recovery from a failure in `planned_run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...engines.generation.sampling_checks import needs_tokenizer
from ...engines.model_changes import described, forward_changes
from ...plan.dataflow import Role
from ...plan.execution_plan import ExecutionPlan
from ...runtime.executor import Executor, make_executor
from ...runtime.failures.alarm import Alarm
from ...runtime.failures.temporary_folder import temporary_folder
from ...runtime.placement.placement import Placement
from ...runtime.placement.run_state import EXTRA_ATTRIBUTES
from ...runtime.process_groups import wait_for_all
from ...runtime.samples.partial_rollouts import PartialRollouts
from ..checkpoint.identity import Identity
from ..checkpoint.write_errors import WriteErrors
from ..checks.config_checks import ConfigError
from .run_setup import RunSetup


if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


class TrainerAdapter(Protocol):
    """The trainer-specific side of a run: shows models, holds unfinished work of the loop, and adds to checkpoints.

    Attributes:
        trainer: a `transformers.Trainer`.
        iteration: word for an iteration of the plan, in messages.
        calls_on_save: whether the callbacks' `on_save` is called with each complete checkpoint, because the loop does
            not.
        counters: names of whole numbers in the trainer's state.
    """

    trainer: Trainer
    iteration: str
    calls_on_save: bool
    counters: tuple[str, ...]

    def hold(self, models: Mapping[Role, PreTrainedModel]) -> None:
        """Show this rank's modules of the trained roles as the trainer's model."""

    def follow(self, executor: Executor) -> None:
        """Use a new executor for the calls, with no sample and no optimizer step in progress. All ranks together."""

    def stop_early(self) -> None:
        """Cancel work for later iterations."""

    def samples_under_way(self) -> PartialRollouts | None:
        """The samples already generated for later updates, on rank 0; `None` if there are none. All ranks together."""

    def go_on_with(self, partial_samples: PartialRollouts | None) -> None:
        """Continue with partial samples, passed on rank 0. All ranks together."""

    def forget_step(self) -> None:
        """Drop what an unfinished optimizer step has collected, because the weights have been replaced."""

    def identity(self, optimizer: str) -> Identity:
        """The properties of the run that must match those of a checkpoint it resumes from.

        Args:
            optimizer: class name of the roles' optimizers.
        """

    def about_checkpoint(self) -> dict[str, Any]:
        """Extra entries of a checkpoint's manifest."""

    def write_state(self, folder: Path, problems: WriteErrors) -> None:
        """Write extra files of a checkpoint."""

    def random_states_to_save(self) -> AbstractContextManager[None]:
        """Context in which the global random generators are as a run that resumes from a checkpoint needs them."""


H = TypeVar("H", bound=TrainerAdapter)


class PlacedPlan:
    """The setup of a run, with the process groups, the engines and the executor of its plan.

    Args:
        adapter: trainer-specific side of the run.
        setup: checked and planned run.
        alarm: used until the executor has its own.

    Attributes:
        placement: this rank's process groups and engines; set by `place`.
        executor: runs the calls; set by `place`.
        is_between_plans: whether a plan change is in progress, so that no engine holds the run's state.
    """

    placement: Placement
    executor: Executor

    def __init__(self, adapter: TrainerAdapter, setup: RunSetup, rank: int, alarm: Alarm) -> None:
        self.adapter, self.setup, self.rank, self.alarm = adapter, setup, rank, alarm
        self.is_between_plans = False

    @property
    def plan(self) -> ExecutionPlan:
        return self.setup.plan

    def place(self) -> None:
        """Create the process groups and the executor of the plan. `start` creates the engines."""
        options, settings = self.setup.engine_options, self.setup.call_settings
        self.placement = Placement(self.setup.plan, self.rank, self.setup.roles, options)
        if needs_tokenizer(settings.sampling):
            folder = temporary_folder(self.placement.stack)
            settings.processing_class.save_pretrained(folder)
            self.placement.options = replace(options, vllm={**options.vllm, "tokenizer": str(folder)})
        self._make_executor()

    def _make_executor(self) -> None:
        self.executor = make_executor(self.placement, self.setup.algorithm, self.setup.call_settings)
        self.alarm = self.executor.alarm
        self.adapter.follow(self.executor)

    def start(self) -> None:
        """Load the models and start the engines, unless this plan has started.

        Raises:
            ConfigError: vLLM is to generate, and the policy object has been changed since the plan was chosen.
        """
        has_models = self.placement.started
        if not has_models:
            self._check_policy()
        self.placement.start()
        if has_models:
            return
        models = {role: self._module_of(role, before) for role, before in self.setup.models_before_start.items()}
        self.adapter.hold(models)
        self.setup = self.setup.started(models)
        self.placement.roles = self.setup.roles
        self.placement.options = replace(self.placement.options, make_optimizer=self.setup.make_optimizer)

    def _check_policy(self) -> None:
        policy = self.setup.models_before_start[Role.ACTOR]
        changes = [change for change in forward_changes(policy) if not change.of_class]
        if changes and self.plan["actor.generate"].engine == "vllm":
            raise ConfigError(
                f"the trainer's model has {described(changes)}, and vLLM, which is to generate, has its config and "
                f"weights alone; put it on the model before the trainer is made, and give the trainer this model."
            )

    def _module_of(self, role: Role, structure: PreTrainedModel) -> PreTrainedModel:
        """This rank's module of a trained role; a structure without weights if the rank holds no part of the role."""
        engine = self.placement.trained(role)
        return structure if engine is None else engine.head.model

    def let_go(self) -> None:
        """Replace the plan's modules by structures without weights."""
        models = {role: self.setup.structure(role) for role in self.setup.models_before_start}
        for role, structure in models.items():
            module = self.setup.models_before_start[role]
            for name in EXTRA_ATTRIBUTES:
                if hasattr(module, name):
                    setattr(structure, name, getattr(module, name))
        self.adapter.hold(models)
        self.setup = replace(self.setup, models_before_start=models)

    def end_together(self) -> None:
        """Wait for all ranks. A process that exits closes connections that others may still read from."""
        self.executor.channels.flush()
        wait_for_all(self.placement.control, self.placement.options.device)

    @property
    def can_go_on(self) -> bool:
        """True if this process can continue after a failure: it is the job's only one, and was not changing its plan,
        so it still has the run's models."""
        return self.placement.plan.cluster.size == 1 and not self.is_between_plans

    def recover(self) -> None:
        """End the engines that a failure made unusable. If the plan has changed, these are the engines of the latest
        plan."""
        if not self.can_go_on:
            self.placement.close()
        elif self.placement.started:
            self.placement.reset()
            self._make_executor()
        else:  # some of its engines may exist
            self.placement.discard()
            self.place()


__all__ = ["H", "PlacedPlan", "TrainerAdapter"]
