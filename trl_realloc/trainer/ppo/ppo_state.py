"""`TrainingStateMixin`: the state, the learning rates, the settings and the logs of a training, as Transformers'
Trainer and TRL's PPO have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..checkpoint.resuming import STATE, Checkpoint
from ..checks.fixed_settings import fixed_settings, refuse_changed
from ..config_checks import check_settings
from ..run.metrics import RunMetrics
from ..run.planned_run import PlannedRun
from .ppo_host import PPOHost
from .ppo_setup import Setup
from .trl_attributes import OnlineTrainerState


class TrainingStateMixin:
    """The state, the learning rate schedule, the settings and the logs of PPO's training loop. To be mixed into a
    trainer that has Trainer's attributes, and those of `EvaluationMixin`."""

    args: Any
    state: OnlineTrainerState
    control: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    callback_handler: Any
    train_dataset: Any
    run: PlannedRun[Setup, PPOHost]
    metrics: RunMetrics
    log: Callable[[dict[str, float]], None]
    create_scheduler: Callable[..., Any]
    is_local_process_zero: Callable[[], bool]
    is_world_process_zero: Callable[[], bool]
    _created_lr_scheduler: bool
    _data_begins: int
    _fixed: Mapping[str, Any]  # the settings that may not change, as they were when the trainer was made
    _rate: float
    _determine_best_metric: Callable[..., bool]
    _evaluate: Callable[..., dict[str, float]]
    _load_callback_state: Callable[[], None]
    _save_checkpoint: Callable[..., None]

    def _make_scheduler(self) -> None:
        """Make the schedule of the arguments, as it begins."""
        self.callback_handler.lr_scheduler = self.create_scheduler(self.args.num_total_batches, self.optimizer)

    def _renew_scheduler(self) -> None:
        """Begin the schedule of the arguments anew for a second training, as Trainer does. A scheduler of the user's
        goes on."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
            self.run.placed.setup.rates.restore()
            self._make_scheduler()

    def _start_state(self, checkpoint: Checkpoint | None) -> None:
        args = self.args
        if self.state.global_step:
            self._renew_scheduler()
        self.state = self._new_state()
        self._data_begins = 0
        if checkpoint is not None:
            self.state = OnlineTrainerState.load_from_json(str(checkpoint.folder / STATE))
            self._load_callback_state()
            self.run.checkpoints.load(checkpoint)
            self._data_begins = self.state.global_step if args.ignore_data_skip else checkpoint.data_begins
        self.state.compute_steps(args, args.num_total_batches)
        self.state.init_training_references(
            self, args.num_total_batches, math.ceil(args.total_episodes / len(self.train_dataset)), None
        )
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()

    def _new_state(self) -> OnlineTrainerState:
        return OnlineTrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=self.run.checkpoints.exportable(),
        )

    def _follow_settings(self) -> None:
        """Use the settings of PPO's arithmetic that `args` has now, as TRL does: a callback may have changed them.
        Those of the first process hold on all processes. All ranks together.

        Raises:
            ConfigError: a setting is not allowed, or the plan, the engines or the data were made from it.
        """
        refuse_changed(self._fixed, fixed_settings(self.args, self._fixed))
        placed = self.run.placed
        settings = placed.executor.exchange.spread(self.args.ppo_settings())
        if settings == placed.setup.algorithm.settings:
            return
        for name, value in vars(settings).items():
            setattr(self.args, name, value)
        check_settings(self.args)
        algorithm = replace(placed.setup.algorithm, settings=settings)
        placed.setup = replace(placed.setup, algorithm=algorithm)
        placed.executor.algorithm = algorithm

    def _log_metrics(self) -> None:
        if metrics := self.metrics.take():
            eps = self.metrics.episodes_per_second(self.state.episode)
            self.log({**metrics, "eps": eps, "lr": self._rate, "episode": self.state.episode})

    def _log_evaluate_save(self) -> None:
        """Log, evaluate and save where the callbacks asked for it. Called after an update and after a pass over the
        data."""
        self.run.checkpoints.finish(wait=False)
        if self.control.should_log:
            self._log_metrics()
        if self.control.should_evaluate:
            metrics = self._evaluate(None, None)
            is_best = self._determine_best_metric(metrics, trial=None)
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
        if self.control.should_save:
            self._save_checkpoint(self.model, trial=None)
            self.control.should_save = False
