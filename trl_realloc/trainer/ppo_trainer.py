"""`PPOTrainer`: the constructor and the training loop, with the arguments, logs and callbacks of TRL's class.

One update is done by `runtime.executor`. Saving and resuming are in `checkpoint`, evaluation in `evaluation`, the
change of a plan during the run and what a failure ends in `planned_run`, TRL's other attributes in `trl_attributes`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, TrainOutput, speed_metrics
from transformers.utils import logging

from ..algorithms.prompt_batches import PromptBatch, SeededOrder, batches_of, collate_prompts, prompt_loader
from ..common.notices import working
from ..engines.base import Sampling
from ..plan.execution_plan import ExecutionPlan
from ..plan.timeline import Timeline
from ..runtime.calls.training_calls import check_first_weights
from ..runtime.failures.alarm import Alarm
from ..runtime.failures.watchdog_client import watch
from ..runtime.process_groups import wait_for_all
from .accelerate_plugin import ReallocationPlugin
from .checkpoint.resuming import Checkpoint
from .checkpoint.saving import make_output_dir
from .checks.fixed_settings import OF_PPO, fixed_settings
from .checks.input_checks import check_config
from .checks.trainable import own_optimizer
from .config_checks import ConfigError
from .plan_settings import use_one_device
from .ppo.evaluation import EvaluationMixin
from .ppo.policy_and_value import PolicyAndValueWrapper
from .ppo.ppo_host import PPOHost
from .ppo.ppo_setup import Setup, prepare
from .ppo.ppo_state import TrainingStateMixin
from .ppo.trl_attributes import OnlineTrainerState, TrlAttributes
from .ppo_config import PPOConfig
from .report.run_record import save_record
from .run.metrics import SPANS, RunMetrics
from .run.optimizers import check_own_optimizer, follows_metrics
from .run.plan_request import read_plan_request
from .run.planned_run import PlannedRun
from .trainer_inputs import TrainerInputs
from .trl_compat import PPOTrainerBase


logger = logging.get_logger(__name__)


class PPOTrainer(
    EvaluationMixin,
    TrainingStateMixin,
    TrlAttributes,
    PPOTrainerBase,
):
    """Proximal Policy Optimization that runs every model function call on the devices that the execution plan gives it.

    Takes the arguments of TRL 1.12's `PPOTrainer` in the same order; several of them accept more kinds of values.

    Args:
        args ([`PPOConfig`]):
            Training arguments.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]):
            The policy's tokenizer; it needs a pad token.
        model ([`~transformers.PreTrainedModel`] or `str`):
            The policy. If it is given by name or path, only the ranks that the plan gives a part of it load it.
        ref_model ([`~transformers.PreTrainedModel`] or `str`, *optional*):
            The reference model; by default a copy of the policy, or the policy without its adapters.
        reward_model ([`~transformers.PreTrainedModel`], `str`, function, or a list of these):
            A sequence classifier with one output, or `(prompts, completions, **columns) -> scores`, sync or async.
        train_dataset ([`~datasets.Dataset`]):
            Prompts: a column `prompt` (text or conversations) or `input_ids`. Other columns go to reward functions.
        value_model ([`~transformers.PreTrainedModel`] or `str`):
            The critic: a sequence classifier with one output.
        data_collator (`callable`, *optional*):
            Makes `input_ids` from rows. Padding that it adds is removed again.
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Prompts to evaluate on.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            An optimizer over the parameters of policy and critic, and a scheduler; by default those that `args` name.
        callbacks (`list` of [`~transformers.TrainerCallback`], *optional*):
            Callbacks to add to the default ones.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adds an adapter to the policy, and trains the adapter alone.
        reward_processing_classes (tokenizer or list of them, *optional*):
            The tokenizer of each reward model; `None` for the policy's tokenizer.
        reallocation_plugin ([`ReallocationPlugin`], *optional*):
            Settings of reallocations and of the planner that `args` does not have; by default the environment's.
    """

    _tag_names = ["trl", "ppo", "trl-realloc"]
    _name = "PPO"
    _paper = {
        "title": "Fine-Tuning Language Models from Human Preferences",
        "id": "1909.08593",
        "citation": (
            "@article{ziegler2019finetuning,\n    title = {{Fine-Tuning Language Models from Human Preferences}},\n"
            "    author = {Daniel M. Ziegler and others},\n    year = 2019,\n    eprint = {arXiv:1909.08593}\n}"
        ),
    }

    _data_begins = 0  # the update at which this run started to read its data

    state: OnlineTrainerState
    control: Any
    model: Any

    def __init__(
        self,
        args: PPOConfig,
        processing_class: Any,
        model: PreTrainedModel | str,
        ref_model: PreTrainedModel | str | None,
        reward_model: Any,
        train_dataset: Dataset,
        value_model: PreTrainedModel | str,
        data_collator: Callable[..., Any] | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: list[TrainerCallback] | None = None,
        peft_config: Any = None,
        reward_processing_classes: Any = None,
        reallocation_plugin: ReallocationPlugin | None = None,
    ) -> None:
        check_config(args)
        if (method := own_optimizer(type(self))) is not None:
            raise ConfigError(
                f"{method} is not called, since each role's engine makes its part of the optimizer; give the optimizer "
                f"as optimizers=(optimizer, scheduler or None)."
            )
        make_output_dir(Path(args.output_dir))
        use_one_device(args)
        world = PartialState()
        self.plugin = (reallocation_plugin or ReallocationPlugin()).under(args)
        inputs = TrainerInputs(
            processing_class=processing_class,
            model=model,
            ref_model=ref_model,
            reward_model=reward_model,
            value_model=value_model,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
            optimizers=optimizers,
            peft_config=peft_config,
            reward_processing_classes=reward_processing_classes,
        )
        request = read_plan_request(args, self.plugin, world, model, args.ppo_settings().graph)
        alarm = Alarm(watch(self.plugin.heartbeat_timeout or 0.0) if world.num_processes > 1 else None)
        with alarm.covers():
            setup = prepare(args, self.plugin, request, world.process_index, inputs)
        self.run = PlannedRun(PPOHost(self), setup, self.plugin, world.process_index, alarm)
        self._ref_model, self.reward_model = ref_model, reward_model
        super().__init__(
            model=PolicyAndValueWrapper(*setup.models_before_start.values()),
            args=args,
            data_collator=data_collator,
            train_dataset=setup.train_dataset,
            eval_dataset=setup.eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=(setup.rates.scheduled, optimizers[1]),
        )
        self.run.follow_callbacks()
        self._fixed = fixed_settings(args, OF_PPO)
        self.state = self._new_state()
        self._make_scheduler()
        self.metrics = RunMetrics(SPANS if self.is_world_process_zero() else 0)  # rank 0 writes the timeline
        if hasattr(self.model, "add_model_tags"):
            self.model.add_model_tags(self._tag_names)

    run: PlannedRun[Setup, PPOHost]
    setup = property(attrgetter("run.placed.setup"))
    placement = property(attrgetter("run.placed.placement"))
    executor = property(attrgetter("run.placed.executor"))
    alarm = property(attrgetter("run.placed.alarm"))
    observer = property(attrgetter("run.change.observer"))
    replanner = property(attrgetter("run.change.replanner"))
    measuring = property(attrgetter("run.change.measuring"))

    @property
    def plan(self) -> ExecutionPlan:
        """The execution plan that this run follows."""
        return self.run.placed.plan

    @property
    def data_seed(self) -> int:
        """The seed of the order of the prompts."""
        seed: int = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return seed

    @property
    def timeline(self) -> Timeline:
        """The start and the end of the calls of the latest updates. Rank 0 keeps up to `metrics.SPANS` of them, the
        other ranks none."""
        return self.metrics.timeline

    # --- methods of Trainer that are replaced -------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.run.place()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or its adapter) and the tokenizer to `output_dir`, and the critic to
        `output_dir/value_model`. Collective over the job.

        Raises:
            SaveError: on every rank, if one could not write.
        """
        with self.run.failing_together():
            self.run.checkpoints.save_models(Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.run.checkpoints.save()

    def _load_best_model(self) -> None:
        self.run.checkpoints.load_best()

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Does nothing: each engine moves its model to its device."""

    def get_train_dataloader(self) -> DataLoader[PromptBatch]:
        """Global batches, the same on every rank, in the order of the current pass."""
        order = SeededOrder(len(self.train_dataset), self.data_seed)
        return prompt_loader(self.train_dataset, self.args.batch_size, self.setup.collate, order)

    # --- training ---------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train for `args.num_total_batches` updates.

        Args:
            resume_from_checkpoint: a checkpoint's folder; True for the newest complete checkpoint in
                `args.output_dir`; or "auto" for the same if there is one, and a new run if there is none. Policy,
                critic, both optimizers, the scheduler, random states and the position in the data are restored.

        Raises:
            CheckpointError: there is no checkpoint, it is not complete, or this run cannot continue its run.
            JobFailed: a call failed, here or on another rank. Nothing was trained on that batch.
            NonFiniteError: a number of a sample is not finite. Nothing was trained on that batch.
            SaveError: a checkpoint could not be written. Older checkpoints are unchanged.
        """
        self._memory_tracker.start()
        self.is_in_train = True
        with self.run.failing_together(), self.setup.rates.unstepped():
            check_own_optimizer(self.optimizer, self.setup.rates)
            checkpoint = self.run.checkpoints.find(resume_from_checkpoint)
            with working("loading models and starting engines"):
                self.run.start()
            output = self._train(checkpoint)
        self.is_in_train = False
        return output

    def _train(self, checkpoint: Checkpoint | None) -> TrainOutput:
        args = self.args
        self._start_state(checkpoint)
        source = "they were given" if checkpoint is None else f"loaded from {checkpoint.folder}"
        check_first_weights(self.placement, source)
        start_time, start_step = time.time(), self.state.global_step
        self.metrics.begin(self.state.episode)
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start:
            self._evaluate(None, None, skip_scheduler=True)
        data = self.get_train_dataloader(), start_step - self._data_begins, self.state.max_steps - self._data_begins
        for batch, is_first, is_last, following in batches_of(*data, ahead=args.max_staleness + 1):
            if is_first:
                self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
            self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
            self._follow_settings()
            update_start = time.time()
            rates = {role: self.setup.rates.role(role) for role in self.plan.graph.trained_roles}
            self._rate = self.setup.rates.first
            with self._working(self.state.global_step - start_step), self.run.checkpoints.saving_good_state():
                early = following if self._may_begin_early(is_last) else ()
                iteration = self.executor.run(batch, self.state.global_step, rates, following=early)
            self.setup.rates.scheduled.step()  # does nothing; the scheduler expects it
            if not follows_metrics(self.lr_scheduler):
                self.lr_scheduler.step()
            self.state.episode += len(batch)
            self.state.global_step += 1
            self.state.epoch = self.state.episode / len(self.train_dataset)
            update_seconds = time.time() - update_start
            self.metrics.add(iteration, update_seconds, self.setup.algorithm.settings.vf_coef)
            self.control = self.callback_handler.on_step_end(args, self.state, self.control)
            self._log_evaluate_save()
            self._show_completions()
            if is_last or self.control.should_training_stop:
                self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
                self._log_evaluate_save()
            if self.control.should_training_stop:
                break
            left = self.state.max_steps - self.state.global_step
            self.run.change.note(iteration.spans, iteration.lengths, update_seconds, left)
        self.executor.cancel_early()  # a callback has stopped the run
        self._log_metrics()
        self.run.checkpoints.finish()
        self._end_together()
        self._load_best_model()
        metrics = speed_metrics("train", start_time, num_steps=self.state.global_step - start_step)
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.control = self.callback_handler.on_train_end(args, self.state, self.control)
        if self.accelerator.is_main_process:  # after on_train_end, so that the progress bar has ended its line
            lengths, folder = list(self.metrics.lengths), Path(args.output_dir)
            expected, chosen = self.run.change.observer.end(lengths), self.run.change.observer.when_chosen(lengths)
            stages = self.metrics.stages
            save_record(self.plan, self.timeline, expected, folder, when_chosen=chosen, stages=stages)
        loss = self.metrics.mean_loss()
        return TrainOutput(self.state.global_step, loss, {**metrics, "train_loss": loss})

    def _may_begin_early(self, is_last: bool) -> bool:
        """True if generation for later updates may begin before this update has ended. With a staleness it always may.
        Otherwise it may not if an evaluation or the printing of completions, which need the engines, comes first, and
        not at the end of a pass over the data."""
        if self.plan.staleness.versions:
            return True
        args, done = self.args, self.state.global_step + 1
        evaluates = args.eval_strategy == IntervalStrategy.STEPS and done % self.state.eval_steps == 0
        return not is_last and not evaluates and not self._shows_completions(done)

    def _end_together(self) -> None:
        """Wait for all ranks. A process that exits closes connections from which others may still read."""
        self.executor.exchange.flush()
        wait_for_all(self.placement.control, self.args.device)

    def _working(self, done: int) -> contextlib.AbstractContextManager[None]:
        """Print notices while an update runs: soon in the first, which compiles kernels, each minute in later ones."""
        if not done:
            return working("the first update", "kernels are compiled and caches filled, later ones are faster")
        return working(f"update {self.state.global_step + 1}", after_s=60.0, every_s=60.0)

    def close(self) -> None:
        """Stop the engines. They are also stopped when the process exits."""
        self.run.placed.placement.close()


__all__ = ["OnlineTrainerState", "PPOTrainer", "Sampling", "collate_prompts"]
