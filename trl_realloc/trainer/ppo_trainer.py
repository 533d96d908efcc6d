"""`PPOTrainer`: TRL's class by name, arguments, logs, callbacks and checkpoints, over an execution plan.

Owns the run (steps, logs, saves, resuming) and nothing of how a step is done: that is the executor's.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import TrainOutput, speed_metrics
from transformers.utils import logging

from ..algorithms.prompts import PromptBatch, SeededOrder, batches_of, collate_prompts, prompt_loader, tokenize_prompts
from ..common.notices import working
from ..engines.base import Sampling
from ..plan.dataflow import CallKind, Role
from ..plan.execution_plan import ExecutionPlan
from ..plan.timeline import Timeline
from ..profiling.auto_plan import at_lengths
from ..runtime.calls import check_first_weights
from ..runtime.executor import EVALUATION_STEP, Iteration, make_executor
from ..runtime.failures.alarm import Alarm, watch
from ..runtime.placement import Placement
from ..runtime.run_state import Cargo
from . import setup
from .accelerate_plugin import ReallocationPlugin
from .checkpoint import CheckpointError
from .checkpoint.mixin import CheckpointMixin
from .checkpoint.resuming import STATE, Found
from .checkpoint.saving import make_output_dir
from .completions import completion_rows, show_completions
from .input_checks import check_config
from .metrics import SPANS, RunMetrics
from .optimizers import follows_metrics
from .policy_and_value import PolicyAndValueWrapper
from .ppo_config import PPOConfig
from .report import leave_record
from .setup import Setup
from .trl_attributes import OnlineTrainerState, TrlAttributes
from .trl_compat import PPOTrainerBase


logger = logging.get_logger(__name__)


class PPOTrainer(CheckpointMixin, TrlAttributes, PPOTrainerBase):
    """Proximal Policy Optimization with every model function call where the execution plan puts it.

    Takes what TRL 1.12's `PPOTrainer` takes, in its order, and more kinds of it.

    Args:
        args ([`PPOConfig`]):
            Training arguments.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]):
            The policy's tokenizer; it needs a pad token.
        model ([`~transformers.PreTrainedModel`] or `str`):
            The policy, loaded, or by name or path: then a rank loads it only if the plan has it there.
        ref_model ([`~transformers.PreTrainedModel`] or `str`, *optional*):
            The reference; by default a copy of the policy, or the policy without its adapters.
        reward_model ([`~transformers.PreTrainedModel`], `str`, function, or a list of these):
            A sequence classifier with one output, or `(prompts, completions, **columns) -> scores`, sync or async.
        train_dataset ([`~datasets.Dataset`]):
            Prompts: a column `prompt` (text or conversations) or `input_ids`. Other columns go to reward functions.
        value_model ([`~transformers.PreTrainedModel`] or `str`):
            The critic: a sequence classifier with one output.
        data_collator (`callable`, *optional*):
            Makes `input_ids` of rows; its padding is taken off again.
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Prompts to evaluate on.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            An optimizer over the parameters of policy and critic, and a scheduler; by default as `args` says.
        callbacks (`list` of [`~transformers.TrainerCallback`], *optional*):
            Callbacks.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Put the policy under an adapter and train only that.
        reward_processing_classes (tokenizer or list of them, *optional*):
            The tokenizer of each reward model that has its own.
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
    ) -> None:
        check_config(args)
        make_output_dir(Path(args.output_dir))
        args.device  # noqa: B018 - makes the process group, so that the number of processes can be asked
        world = PartialState()
        self.plugin = ReallocationPlugin(args.plan, args.generation_engine, heartbeat_timeout=args.heartbeat_timeout)
        wanted = setup.resolve(args, self.plugin, world, model)
        self.alarm = Alarm(watch(self.plugin.heartbeat_timeout or 0.0) if world.num_processes > 1 else None)
        with self.alarm.covers():
            self.setup: Setup = setup.prepare(
                args,
                wanted,
                world.process_index,
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
        self.stop_token_id = self.setup.stop_token_id
        self._ref_model, self.reward_model = ref_model, reward_model
        super().__init__(
            model=PolicyAndValueWrapper(*self.setup.models_before_start),
            args=args,
            data_collator=data_collator,
            train_dataset=self.setup.train_dataset,
            eval_dataset=self.setup.eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=(self.setup.rates.scheduled, optimizers[1]),
        )
        self.state = self._new_state()
        self.create_scheduler(args.num_total_batches, self.optimizer)
        self.metrics = RunMetrics(SPANS if self.is_world_process_zero() else 0)  # rank 0 writes the timeline
        if hasattr(self.model, "add_model_tags"):
            self.model.add_model_tags(self._tag_names)

    @property
    def plan(self) -> ExecutionPlan:
        """The execution plan that this run follows."""
        return self.setup.plan

    @property
    def timeline(self) -> Timeline:
        """When this run's calls were executed, as far as this rank has heard."""
        return self.metrics.timeline

    # --- seams of Trainer -------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self._place()
        self.replanner = setup.replanner(self.setup, self.plugin)

    def _place(self) -> None:
        """The runtime of the plan: groups now, engines when they are first needed."""
        self.placement = Placement(
            self.setup.plan, self.accelerator.process_index, self.setup.roles, self.setup.engine_options
        )
        self.executor = make_executor(self.placement, self.setup.algorithm, self.setup.rules)
        self.alarm = self.executor.alarm

    def _start(self) -> None:
        """Models loaded and engines started, once for a plan; `model` holds what this rank has of them."""
        if self.placement.started:
            return
        self.placement.start()
        self.model.hold(*(self._module_of(role) for role in (Role.ACTOR, Role.CRITIC)))

    def _module_of(self, role: Role) -> Any:
        """This rank's module of a trained role; on a rank without a part of it the structure without weights."""
        engine, make_shell = self.placement.trained(role), self.setup.roles[role].shell
        if engine is not None:
            return engine.head.model
        assert make_shell is not None, "policy and critic have structures"
        return make_shell()

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Models move when their engine takes them, to where the plan has them."""

    def get_train_dataloader(self) -> DataLoader[PromptBatch]:
        """Global batches, the same on every rank, in the order of the current pass."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        order = SeededOrder(len(self.train_dataset), seed)
        return prompt_loader(self.train_dataset, self.args.batch_size, self.setup.collate, order)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[PromptBatch]:
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        size = self.args.per_device_eval_batch_size * self.args.world_size
        return prompt_loader(rows, size, self.setup.collate, None)

    # --- training ---------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> TrainOutput:
        """Train for `args.num_total_batches` updates.

        Args:
            resume_from_checkpoint: a checkpoint's folder, True for the newest whole one in `args.output_dir`, or "auto"
                for the same where there is one and the beginning where there is none: policy, critic, both optimizers,
                scheduler, random states and the place in the data go on from there.

        Raises:
            CheckpointError: there is none, it is not whole, or it is of a run with which this one cannot go on.
            JobFailed: a call failed, here or on another rank; nothing was trained on that batch.
            NonFiniteError: a number of a sample is not finite; nothing was trained on that batch.
            SaveError: a checkpoint could not be written; the older ones are as they were.
        """
        self._memory_tracker.start()
        self.is_in_train = True
        with self._failing_together():
            found = self._find_checkpoint(resume_from_checkpoint)
            begun = time.time()
            with working("loading models and starting engines"):
                self._start()
            self._start_seconds = time.time() - begun
            output = self._train(found)
        self.is_in_train = False
        return output

    def _train(self, found: Found | None) -> TrainOutput:
        args = self.args
        self._start_state(found)
        check_first_weights(self.placement, "they were given" if found is None else f"loaded from {found.folder}")
        start_time, start_step = time.time(), self.state.global_step
        self.metrics.begin(self.state.episode)
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start:
            self._evaluate(None, None, skip_scheduler=True)
        for batch, begins, ends in batches_of(
            self.get_train_dataloader(), start_step - self._data_begins, self.state.max_steps - self._data_begins
        ):
            if begins:
                self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
            self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
            begun = time.time()
            rates = {role: self.setup.rates.role(role) for role in self.plan.graph.trained_roles}
            self._rate = self.setup.rates.first
            with self._working(self.state.global_step - start_step), self._saving_good_state():
                iteration = self.executor.run(batch, self.state.global_step, rates)
            self.setup.rates.scheduled.step()  # it holds no gradient; the scheduler wants to have seen it step
            if not follows_metrics(self.lr_scheduler):
                self.lr_scheduler.step()
            self.state.episode += len(batch)
            self.state.global_step += 1
            self.state.epoch = self.state.episode / len(self.train_dataset)
            self.metrics.note(self.plan.order, iteration, time.time() - begun)
            self.control = self.callback_handler.on_step_end(args, self.state, self.control)
            self._log_evaluate_save()
            self._show_completions()
            if ends or self.control.should_training_stop:
                self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
                self._log_evaluate_save()
            if self.control.should_training_stop:
                break
            self._replan(iteration)
        self._log_metrics()
        self._end_together()
        self._load_best_model()
        metrics = speed_metrics("train", start_time, num_steps=self.state.global_step - start_step)
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.control = self.callback_handler.on_train_end(args, self.state, self.control)
        if self.accelerator.is_main_process:  # after the progress bar has ended its line
            expected = at_lengths(self.setup.job, self.setup.planned, list(self.metrics.lengths))
            leave_record(self.plan, self.timeline, expected, Path(args.output_dir))
        loss = self.metrics.mean_loss(args.vf_coef)
        return TrainOutput(self.state.global_step, loss, {**metrics, "train_loss": loss})

    def _end_together(self) -> None:
        """A process that ends takes down connections from which others may still be reading its last samples."""
        self.executor.exchange.flush()
        self.accelerator.wait_for_everyone()

    def _working(self, done: int) -> contextlib.AbstractContextManager[None]:
        """Notices while an update runs: soon in the first, which warms everything up, each minute in a later one."""
        if not done:
            return working("the first update", "kernels are compiled and caches filled, later ones are faster")
        return working(f"update {self.state.global_step + 1}", after_s=60.0, every_s=60.0)

    def _replan(self, iteration: Iteration) -> None:
        """Move to another plan where the lengths of the responses have made another faster: state for state what it
        was, on other devices or under other strategies."""
        if self.replanner is None:
            return
        self.replanner.note(iteration.samples.ragged("responses").lengths.tolist())
        planned = self.replanner.better(self.state.max_steps - self.state.global_step, self._start_seconds)
        if planned is None:
            return
        self.alarm.at(f"the move to another plan after update {self.state.global_step}")
        self.executor.exchange.flush()
        cargo = Cargo(self.placement)
        self.accelerator.wait_for_everyone()  # a group that one rank lets go is closed for those that still use it
        self.placement.close()
        roles = cargo.roles(self.setup.roles, planned.plan)
        self.setup = replace(self.setup, plan=planned.plan, planned=planned, policy=None, roles=roles)
        self._place()
        self._start()
        cargo.deliver(self.placement)
        if self.accelerator.is_main_process:
            found = planned.found
            expected = f", an estimated {found.seconds:.3g} s per iteration" if found else ""
            logger.warning(f"update {self.state.global_step}: the plan is now {planned.plan.name}{expected}.")

    def _start_state(self, found: Found | None) -> None:
        args = self.args
        self.state = self._new_state()
        self._data_begins = 0
        if found is not None:
            self.state = OnlineTrainerState.load_from_json(str(found.folder / STATE))
            self._load_callback_state()
            self._load_checkpoint(found)
            self._data_begins = self.state.global_step if args.ignore_data_skip else found.data_begins
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
            stateful_callbacks=self._exportable(),
        )

    def _log_metrics(self) -> None:
        if metrics := self.metrics.take():
            eps = self.metrics.episodes_per_second(self.state.episode)
            self.log({**metrics, "eps": eps, "lr": self._rate, "episode": self.state.episode})

    def _log_evaluate_save(self) -> None:
        """What the callbacks have asked for, after an update or a pass over the data."""
        if self.control.should_log:
            self._log_metrics()
        if self.control.should_evaluate:
            metrics = self._evaluate(None, None)
            is_best = self._determine_best_metric(metrics, trial=None)
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
        if self.control.should_save:
            self._save_checkpoint(self.model, trial=None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _show_completions(self) -> None:
        shows = self.args.num_sample_generations > 0
        if shows and (self.state.global_step - 1) % self.sample_generations_freq == 0:
            self.generate_completions(sampling=True)

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """A failure here is told to every rank, and ends this one's engines."""
        with self.alarm.covers(lambda: self.placement.close()):  # of the placement that is current then
            try:
                yield
            except BaseException as error:
                if self.is_in_train and isinstance(error, Exception) and not isinstance(error, CheckpointError):
                    error.add_note(self._what_is_left())
                self.is_in_train = False
                raise

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Generate for and score the evaluation prompts: `{prefix}_objective/*` means over them, trained on by nobody.

        Args:
            eval_dataset: prompts as in the constructor, or a dict of such; by default the constructor's.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, dict):
            metrics: dict[str, float] = {}
            for name, part in rows.items():
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        if rows is None:
            raise ValueError("evaluate needs an eval_dataset; none was given to the trainer nor to this call.")
        rows = tokenize_prompts(rows, self.processing_class, "eval_dataset", self.args.dataset_num_proc)
        start, sums, count = time.time(), defaultdict[str, float](float), 0
        with self._failing_together():
            self._start()
            graph = self.plan.graph
            scoring = [call for call in graph.order if not graph.call(call).trains]
            for at, batch in enumerate(self.get_eval_dataloader(rows)):
                iteration = self.executor.run(batch, EVALUATION_STEP + at, {}, only=scoring)
                for name, value in iteration.metrics.items():
                    sums[name] += value * len(batch)
                count += len(batch)
            self._end_together()
        metrics = {f"{metric_key_prefix}_{name}": total / count for name, total in sums.items()}
        metrics |= speed_metrics(metric_key_prefix, start, num_samples=count)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def generate_completions(self, sampling: bool = False) -> list[dict[str, Any]]:
        """Near-greedy completions of the evaluation prompts with their scores, five of them shown as a table.

        Args:
            sampling (`bool`, *optional*, defaults to `False`):
                Only the first batch of prompts.

        Returns:
            `list[dict]`: `query`, `model response` and `score` of each prompt; empty without an evaluation dataset.
        """
        if self.eval_dataset is None:
            return []
        rows = next(iter(self.eval_dataset.values())) if isinstance(self.eval_dataset, dict) else self.eval_dataset
        table: list[dict[str, Any]] = []
        near_greedy = replace(self.setup.rules.sampling, temperature=0.01 + 1e-7)
        with self._failing_together():
            self._start()
            graph = self.plan.graph
            only = (*graph.calls_of(CallKind.GENERATE), *graph.calls_of(CallKind.FORWARD, Role.REWARD))
            for at, batch in enumerate(self.get_eval_dataloader(rows)):
                made = self.executor.run(batch, EVALUATION_STEP + at, {}, only=only, sampling=near_greedy).samples
                table += completion_rows(made, self.processing_class)
                if sampling:
                    break
            self._end_together()
        if self.accelerator.is_main_process:
            show_completions(table, self.args.report_to, self.state.global_step)
        return table

    def close(self) -> None:
        """End the engines. Leaving the process does it too."""
        self.placement.close()


__all__ = ["OnlineTrainerState", "PPOTrainer", "Sampling", "collate_prompts"]
