"""`PlannedPolicyTrainer`: TRL's trainer of one policy, such as `GRPOTrainer`, with its model calls under a plan.

TRL keeps the host: data, tools, rewards, advantages, the arithmetic of the loss, logs, and Trainer's loop. The devices
are the plan's: generation, the log-probabilities of policy and reference, and the training.

Everything here replaces a method of TRL's or Trainer's, and so does `loss`, which has those of a loss. From
inputs to a plan is in `policy_setup`, what a failure ends in `planned_run`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers.utils import logging

from ...engines.training.packed_attention import base_of
from ...plan.dataflow import Role
from ...plan.execution_plan import ExecutionPlan
from ...runtime.calls.training_calls import check_first_weights
from ...runtime.failures.alarm import Alarm
from ...runtime.failures.watchdog_client import watch
from ...runtime.process_groups import from_every_rank, meet
from ..accelerate_plugin import ReallocationPlugin
from ..checkpoint.saving import make_output_dir
from ..checks.config_checks import ConfigError
from ..checks.data_checks import check_columns, check_rows, check_types
from ..checks.fixed_settings import fixed_attributes
from ..checks.trainable import why_not_trained
from ..plan_settings import use_one_device
from ..run.optimizers import check_own_optimizer
from ..run.planned_run import PlannedRun
from .accelerate_fallback import (
    check_resumable,
    checkpoint_of_trainer,
    config_or_model,
    plan_generation,
)
from .engine_modules import ModelInEngine, ReferenceInEngine
from .loss import PolicyLossMixin
from .planned_generation import PlannedGeneration
from .planned_rewards import REWARD, planned_rewards
from .plug import finish_turns, takes_turns
from .policy_host import PolicyHost
from .policy_setup import PolicySetup, prepare_policy
from .record import Period
from .scoring import PolicyScoringMixin


logger = logging.get_logger(__name__)


class PlannedPolicyTrainer(PolicyLossMixin, PolicyScoringMixin):
    """The methods of a trainer of TRL's that a plan replaces. To be mixed in before TRL's class.

    Attributes:
        run: the run under the plan; `None` where the plan's engines cannot train it (`trainable`). Accelerate trains
            then, and the methods are TRL's.
    """

    args: Any
    state: Any
    control: Any
    model: Any
    model_wrapped: Any
    accelerator: Any
    train_dataset: Any
    optimizer: Any
    lr_scheduler: Any
    callback_handler: Any
    vllm_generation: Any
    num_iterations: int  # TRL's
    create_scheduler: Callable[..., Any]
    _period: Period  # of `PolicyRecordMixin`
    _load_optimizer_and_scheduler: Callable[[str], None]

    run: PlannedRun[PolicySetup, PolicyHost] | None = None
    setup = property(attrgetter("run.placed.setup"))
    placement = property(attrgetter("run.placed.placement"))
    executor = property(attrgetter("run.placed.executor"))
    alarm = property(attrgetter("run.placed.alarm"))
    observer = property(attrgetter("run.change.observer"))
    replanner = property(attrgetter("run.change.replanner"))
    measuring = property(attrgetter("run.change.measuring"))
    calls = property(attrgetter("run.host.calls"))
    _is_by_name = False  # the user gave the name of a model

    # --- making it --------------------------------------------------------------------------------------------------

    def _plan(self, arguments: dict[str, Any], plugin: ReallocationPlugin | None) -> dict[str, Any]:
        """Check the inputs and choose the plan. Returns the arguments of the constructor of TRL's class.

        Args:
            arguments: those of our constructor that TRL's has too, by name.
            plugin: `reallocation_plugin` of our constructor.
        """
        args = arguments["args"]
        self.plugin = (plugin or ReallocationPlugin()).under(args)
        check_types(arguments)
        check_columns(arguments)
        make_output_dir(Path(args.output_dir))
        use_one_device(args)
        world = PartialState()
        reason = why_not_trained(
            args,
            config_or_model(args, arguments["model"]),
            arguments.get("peft_config"),
            quantization_config=arguments.get("quantization_config"),
            trainer=type(self),
        )
        if reason is not None:
            if args.max_staleness:
                raise ConfigError(f"{reason} It generates nothing ahead: set max_staleness to 0.")
            if world.is_main_process:
                logger.warning(reason)
            return arguments
        self._is_by_name = isinstance(arguments["model"], str)
        alarm = Alarm(watch(self.plugin.heartbeat_timeout or 0.0) if world.num_processes > 1 else None)
        with alarm.covers():
            setup = prepare_policy(args, self.plugin, world, arguments)
        settings = replace(setup.call_settings, reward_tokens=self.tokens_for_reward_models)
        setup = replace(setup, call_settings=settings)
        self.run = PlannedRun(PolicyHost(self), setup, self.plugin, world.process_index, alarm)
        return {
            **arguments,
            **planned_rewards(arguments, setup.reward_models, lambda *texts: self.calls.score(REWARD, *texts)),
            # TRL's class would add an adapter to a model that has some
            "model": base_of(setup.models_before_start[Role.ACTOR]),
            "peft_config": None,
            "optimizers": (setup.rates.scheduled, (arguments.get("optimizers") or (None, None))[1]),
        }

    @property
    def _hidden_settings(self) -> dict[str, Any]:
        """Settings that the constructor of TRL's class sees with other values, so that it makes no engine and no
        reference of its own, and does not say that it ignores those of a model that has been loaded by them."""
        if self.run is None:
            return {"use_vllm": False}
        loaded = {"model_init_kwargs": None} if self._is_by_name else {}
        return {"use_vllm": False, "beta": 0.0, **loaded}

    def _take_over(self) -> None:
        """Put the plan's calls in the place of TRL's. After the constructor of TRL's class."""
        if self.run is None:
            plan_generation(self, self.plugin)
            return
        self.model = self.model_wrapped = self.run.placed.setup.models_before_start[Role.ACTOR]
        # newer releases of TRL replace the method by a closure over this model, which its copies would run
        vars(base_of(self.model)).pop("forward", None)
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False  # the engines do what the launcher asked for
        self.run.follow_callbacks()
        self.accelerator.backward = self._backward
        self.run.place()
        self.beta = self.args.beta
        self.use_vllm = True  # of TRL's two ways to generate, that with an object of its own
        self.vllm_importance_sampling_correction = self.setup.corrects
        self.ref_model = ReferenceInEngine() if "reference.forward" in self.plan.graph.order else None
        self._fixed = fixed_attributes(self)
        self._last_loaded_step = -1
        self.vllm_mode = "colocate"  # TRL then asks `vllm_generation` how long a context may be
        if takes_turns(self):
            finish_turns(self, lambda: self.calls.finish_turns())  # a plan change replaces `self.calls`

    @property
    def plan(self) -> ExecutionPlan:
        """The execution plan that this run follows.

        Raises:
            ConfigError: there is none, because Accelerate trains and TRL generates.
        """
        if self.run is not None:
            return self.run.placed.plan
        if not isinstance(getattr(self, "vllm_generation", None), PlannedGeneration):
            raise ConfigError("Accelerate trains this run and TRL generates, so it has no plan.")
        return self.vllm_generation.plan  # type: ignore[no-any-return]

    # --- Trainer's hooks ----------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as Trainer does.

        Args:
            resume_from_checkpoint: a checkpoint's folder; True for the newest complete checkpoint in
                `args.output_dir`; or "auto" for the same if there is one, and a new run if there is none.

        Raises:
            CheckpointError: there is no checkpoint, it is not complete, or this run cannot continue its run.
            DataError: the training data set does not fill one generation.
            JobFailed: a call failed, here or on another rank.
        """
        if self.run is None:
            given = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
            folder = checkpoint_of_trainer(given, self.args.output_dir)
            check_resumable(folder, self.args.output_dir)
            return super().train(folder, trial, ignore_keys_for_eval)  # type: ignore[misc]
        check_rows(self.args, self.train_dataset, self.accelerator.num_processes)
        placed, rates = self.run.placed, self.run.placed.setup.rates
        check_own_optimizer(self.optimizer, rates)
        self.is_in_train = True
        with self.run.failing_together(), rates.unstepped(self._train_step):
            self._resumed = self.run.checkpoints.find(resume_from_checkpoint)
            self.run.start()
            resumed = None if self._resumed is None else str(self._resumed.folder)
            check_first_weights(placed.placement, "they were given")
            output = super().train(resumed, trial, ignore_keys_for_eval)  # type: ignore[misc]
            self.run.checkpoints.finish()
            self.calls.stop()
            placed.end_together()
        self.is_in_train = False
        return output

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """The scheduler, and the state of a checkpoint. Model and optimizer are the engines'."""
        if self.run is None:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = ModelInEngine(self)
        if self._resumed is not None:
            self.run.checkpoints.load(self._resumed)
            # TRL's, for what it keeps in a file of its own; there is none of Trainer's optimizer
            self._load_optimizer_and_scheduler(str(self._resumed.folder))
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model_wrapped, train_dataloader

    _created_lr_scheduler = False

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer whose learning rate the scheduler changes. The engines have the real ones."""
        return super().create_optimizer(model) if self.run is None else self.optimizer  # type: ignore[misc]

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if self.run is None:
            return super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
        return ModelInEngine(self)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Nothing under a plan: each engine moves its model to its device."""
        if self.run is None:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """After an optimizer step: what Trainer does. After the last one on a generation also the change of the plan,
        where another is faster: nothing of TRL's is left then that the engines have computed."""
        if self.run is None:
            super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
            return
        self.run.checkpoints.finish(wait=False)
        # a callback may have taken one rank long, and the devices gather the loss next
        meet(self.run.placed.placement.control)
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if self.control.should_training_stop:
            self.run.checkpoints.finish()  # Trainer looks for the best one at the end, and may delete the others
        period, within = self._period, self.run.host.is_within_generation
        # Trainer also calls this at the end of an epoch
        if within or not period.generations or not period.seconds:
            return
        self._period = Period()
        if self.control.should_training_stop:
            return
        placed, every = self.run.placed, self.args.steps_per_generation * self.num_iterations
        lengths = [n for of_rank in from_every_rank(period.lengths, placed.placement.control) for n in of_rank]
        left = (self.state.max_steps - self.state.global_step) * self.args.gradient_accumulation_steps // every
        with self._mode_kept():
            is_first = placed.rank == 0
            self.run.change.note(period.spans, lengths if is_first else [], period.seconds, left, period.generations)

    # --- saving and resuming ----------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or its adapter) and the tokenizer to `output_dir`. Collective over the job.

        Raises:
            SaveError: on every rank, if one could not write.
        """
        if self.run is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        else:
            self.run.save_model(output_dir, pushes=not _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.run is None:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        else:
            self.run.checkpoints.save()

    def _load_best_model(self) -> None:
        if self.run is None:
            super()._load_best_model()  # type: ignore[misc]
        else:
            self.run.checkpoints.load_best()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing under a plan: `_load_optimizer_and_scheduler` loads the weights with the training state."""
        if self.run is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as Trainer does."""
        with self._evaluating():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)  # type: ignore[misc]
            return metrics

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as Trainer does."""
        with self._evaluating():
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Around an evaluation."""
        if self.run is None:
            yield
            return
        with self.run.failing_together():
            self.run.placed.start()
            self.calls.begin_evaluation()
            yield

    @contextlib.contextmanager
    def _mode_kept(self) -> Iterator[None]:
        """Engines switch a module to evaluation, and TRL asks `self.model.training` whether it trains or evaluates."""
        training = self.model.training
        try:
            yield
        finally:
            self.model.train(training)

    def close(self) -> None:
        """Stop the engines. They are also stopped when the process exits."""
        if self.run is not None:
            self.run.placed.placement.close()
        elif isinstance(getattr(self, "vllm_generation", None), PlannedGeneration):
            self.vllm_generation.close()
