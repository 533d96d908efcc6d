"""`PlannedPolicyTrainer`: TRL's trainer of one policy, such as `GRPOTrainer`, with its model calls under a plan.

TRL keeps the host: data, tools, rewards, advantages, the arithmetic of the loss, logs, and Trainer's loop. The devices
are the plan's: generation, the log-probabilities of policy and reference, and the training.

Everything here replaces a method of TRL's or Trainer's, and so does `policy_loss`, which has those of a loss. From
inputs to a plan is in `policy_setup`, what a failure ends in `recovery`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers.utils import logging

from ..engines.generation.sampling_checks import needs_tokenizer
from ..engines.training.packed_attention import base_of
from ..plan.dataflow import Role
from ..plan.execution_plan import ExecutionPlan
from ..runtime.executor import make_executor
from ..runtime.failures.alarm import Alarm
from ..runtime.failures.temporary_folder import temporary_folder
from ..runtime.failures.watchdog_client import watch
from ..runtime.host_calls import HostCalls
from ..runtime.placement import Placement
from ..runtime.process_groups import meet, wait_for_all
from ..runtime.training_calls import check_first_weights
from .accelerate_fallback import (
    check_resumable,
    checkpoint_of_trainer,
    config_or_model,
    leave_to_accelerate,
    plan_generation,
)
from .accelerate_plugin import ReallocationPlugin
from .checkpoint.mixin import CheckpointMixin
from .checkpoint.policy_mixin import PolicyCheckpointMixin
from .checkpoint.saving import make_output_dir
from .config_checks import ConfigError
from .fixed_settings import fixed_attributes
from .host_generation import HostGeneration
from .optimizers import check_own_optimizer
from .plan_settings import use_one_device
from .planned_generation import PlannedGeneration
from .plug import finish_turns, takes_turns
from .policy_data import check_columns, check_rows, check_types
from .policy_loss import PolicyLossMixin
from .policy_modules import ModelInEngine, ReferenceInEngine
from .policy_plan_change import PolicyPlanChangeMixin
from .policy_rewards import REWARD, planned_rewards
from .policy_scoring import PolicyScoringMixin
from .policy_setup import PolicySetup, prepare_policy
from .policy_window import Window
from .recovery import RecoveryMixin
from .trainable import why_not_trained


logger = logging.get_logger(__name__)


class PlannedPolicyTrainer(
    RecoveryMixin, PolicyLossMixin, PolicyScoringMixin, PolicyCheckpointMixin, PolicyPlanChangeMixin
):
    """The methods of a trainer of TRL's that a plan replaces. To be mixed in before TRL's class."""

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
    setup: PolicySetup
    vllm_generation: Any
    create_scheduler: Callable[..., Any]
    _load_optimizer_and_scheduler: Callable[[str], None]

    trains_by_accelerate = False  # the plan's engines cannot train this run (`trainable`); TRL's own methods are used
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
            self.trains_by_accelerate = True
            return arguments
        self._is_by_name = isinstance(arguments["model"], str)
        self.alarm = Alarm(watch(self.plugin.heartbeat_timeout or 0.0) if world.num_processes > 1 else None)
        with self.alarm.covers():
            self.setup = prepare_policy(args, self.plugin, world, arguments)
        return {
            **arguments,
            **planned_rewards(arguments, self.setup.reward_models, lambda *texts: self.calls.score(REWARD, *texts)),
            # TRL's class would add an adapter to a model that has some
            "model": base_of(self.setup.model_before_start),
            "peft_config": None,
            "optimizers": (self.setup.rates.scheduled, (arguments.get("optimizers") or (None, None))[1]),
        }

    @property
    def _hidden_settings(self) -> dict[str, Any]:
        """Settings that the constructor of TRL's class sees with other values, so that it makes no engine and no
        reference of its own, and does not say that it ignores those of a model that has been loaded by them."""
        if self.trains_by_accelerate:
            return {"use_vllm": False}
        loaded = {"model_init_kwargs": None} if self._is_by_name else {}
        return {"use_vllm": False, "beta": 0.0, **loaded}

    def _take_over(self) -> None:
        """Put the plan's calls in the place of TRL's. After the constructor of TRL's class."""
        args = self.args
        if self.trains_by_accelerate:
            plan_generation(self, self.plugin)
            return
        self.model = self.model_wrapped = self.setup.model_before_start
        # newer releases of TRL replace the method by a closure over this model, which its copies would run
        vars(base_of(self.model)).pop("forward", None)
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False  # the engines do what the launcher asked for
        self._follow_callbacks()
        self.accelerator.backward = self._backward
        self._place()
        self._observe_run(self.plugin)
        self.beta = args.beta
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
        if not self.trains_by_accelerate:
            return self.setup.plan
        if not isinstance(getattr(self, "vllm_generation", None), PlannedGeneration):
            raise ConfigError("Accelerate trains this run and TRL generates, so it has no plan.")
        return self.vllm_generation.plan  # type: ignore[no-any-return]

    def _place(self) -> None:
        """Make the process groups and the executor of the plan. `_start` makes the engines."""
        options = self.setup.engine_options
        self.placement = Placement(self.setup.plan, self.accelerator.process_index, self.setup.roles, options)
        if needs_tokenizer(self.setup.call_settings.sampling):
            folder = temporary_folder(self.placement.stack)
            self.setup.processing_class.save_pretrained(folder)
            self.placement.options = replace(options, vllm={**options.vllm, "tokenizer": str(folder)})
        self._make_calls()

    def _make_calls(self) -> None:
        """Make what runs the calls, with no sample and no optimizer step under way. All ranks together."""
        settings = replace(self.setup.call_settings, reward_tokens=self.tokens_for_reward_models)
        self.executor = make_executor(self.placement, self.setup.algorithm, settings)
        self.alarm = self.executor.alarm
        self.calls = HostCalls(self.executor, self._mode_kept, self._first_generation)
        self._window, self._leaves = Window(self.calls, self.accelerator.device), None
        self.vllm_generation = HostGeneration(self.calls, self.setup.engine_options.context_length, self)

    def _start(self) -> None:
        """Load the models and start the engines, unless it has been done. Puts this rank's module into `self.model`."""
        has_model = self.placement.started
        self.placement.start()
        if has_model:
            return
        engine = self.placement.trained(Role.ACTOR)
        if engine is not None:
            self.model = engine.head.model
        self.callback_handler.model = self.model
        if not isinstance(self.model_wrapped, ModelInEngine):
            self.model_wrapped = self.model
        self.placement.roles = self.setup.roles.loaded()
        self.setup = self.setup.started(self.model)
        self.placement.options = replace(self.placement.options, make_optimizer=self.setup.make_optimizer)

    # --- Trainer's hooks ----------------------------------------------------------------------------------------------

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Does nothing: each engine moves its model to its device."""

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
        if self.trains_by_accelerate:
            given = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
            folder = checkpoint_of_trainer(given, self.args.output_dir)
            check_resumable(folder, self.args.output_dir)
            return super(CheckpointMixin, self).train(folder, trial, ignore_keys_for_eval)  # type: ignore[misc]
        check_rows(self.args, self.train_dataset, self.accelerator.num_processes)
        check_own_optimizer(self.optimizer, self.setup.rates)
        self.is_in_train = True
        with self._failing_together(), self.setup.rates.unstepped(self._train_step):
            self._resumed = self._find_checkpoint(resume_from_checkpoint)
            load_start = time.time()
            self._start()
            self._start_seconds = time.time() - load_start
            resumed = None if self._resumed is None else str(self._resumed.folder)
            check_first_weights(self.placement, "they were given")
            output = super().train(resumed, trial, ignore_keys_for_eval)  # type: ignore[misc]
            self._finish_save()
            self.calls.stop()
            self.executor.exchange.flush()
            wait_for_all(self.placement.control, self.args.device)
        self.is_in_train = False
        return output

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """The scheduler, and the state of a checkpoint. Model and optimizer are the engines'."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = ModelInEngine(self)
        if self._resumed is not None:
            self._load_checkpoint(self._resumed)
            # TRL's, for what it keeps in a file of its own; there is none of Trainer's optimizer
            self._load_optimizer_and_scheduler(str(self._resumed.folder))
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model_wrapped, train_dataloader

    _created_lr_scheduler = False

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer whose learning rate the scheduler changes. The engines have the real ones."""
        return self.optimizer

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return ModelInEngine(self)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._finish_save(wait=False)
        meet(self.placement.control)  # a callback may have taken one rank long, and the devices gather the loss next
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if self.control.should_training_stop:
            self._finish_save()  # Trainer looks for the best checkpoint at the end, and may delete the others

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Does nothing: the training state of a checkpoint has the weights (`_load_optimizer_and_scheduler`)."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as Trainer does."""
        with self._failing_together():
            self._start()
            self.calls.begin_evaluation()
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)  # type: ignore[misc]
            return metrics

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as Trainer does."""
        with self._failing_together():
            self._start()
            self.calls.begin_evaluation()
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _mode_kept(self) -> Iterator[None]:
        """Engines switch a module to evaluation, and TRL asks `self.model.training` whether it trains or evaluates."""
        training = self.model.training
        try:
            yield
        finally:
            self.model.train(training)

    def _end_engines(self) -> None:
        super()._end_engines()
        # TRL's loop then begins with a generation, as that of a new trainer
        self._step, self._untrained, self._buffered_inputs = 0, 0, None

    def close(self) -> None:
        """Stop the engines. They are also stopped when the process exits."""
        if not self.trains_by_accelerate:
            self.placement.close()
        elif isinstance(getattr(self, "vllm_generation", None), PlannedGeneration):
            self.vllm_generation.close()


# The methods of TRL's and Trainer's that a plan replaces. Where Accelerate trains, they are TRL's and Trainer's. So is
# `train` then, but for the checkpoint that it resumes from.
SEAMS = (
    *("evaluate", "predict", "save_model", "_save_checkpoint", "_load_best_model", "_load_from_checkpoint"),
    *("_prepare_for_training", "create_optimizer", "_wrap_model", "_move_model_to_device"),
    *("_clip_grad_norm", "_get_grad_norm", "_maybe_log_save_evaluate"),
    *("_prepare_inputs", "_generate_single_turn", "compute_loss", "_get_per_token_logps_and_entropies"),
)


leave_to_accelerate(PlannedPolicyTrainer, SEAMS)
