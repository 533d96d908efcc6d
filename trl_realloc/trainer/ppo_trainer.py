"""`PPOTrainer`: the constructor and the training loop, with the arguments, logs and callbacks of TRL's class.

`runtime.executor` runs one update. Checkpoints are in `checkpoint`, the calls of an evaluation in `evaluation`, plan
changes and failures in `planned_run`, TRL's other attributes and methods in `trl_surface`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from accelerate import PartialState
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, TrainOutput, speed_metrics
from transformers.utils import logging

from ..algorithms.corrections import MISMATCH
from ..algorithms.prompt_batches import PromptBatch, SeededOrder, batches_of, collate_prompts, prompt_loader
from ..common.notices import working
from ..engines.requests import Sampling
from ..plan.dataflow import Role
from ..plan.timeline import Timeline
from ..runtime.calls.training_calls import check_first_weights
from ..runtime.failures.alarm import Alarm
from ..runtime.failures.watchdog_client import watch
from .accelerate_plugin import ReallocationPlugin
from .checkpoint.resuming import STATE, Checkpoint
from .checkpoint.saving import make_output_dir
from .checks.config_checks import ConfigError, check_settings
from .checks.fixed_settings import OF_PPO, fixed_settings, refuse_changed
from .checks.trainable import own_optimizer
from .plan_settings import use_one_device
from .ppo.evaluation import completions, dataset_of, mean_metrics
from .ppo.ppo_adapter import PPOAdapter
from .ppo.ppo_setup import prepare
from .ppo.trl_surface import OnlineTrainerState, PolicyAndValueWrapper, TrlSurface
from .ppo_config import PPOConfig, check_config
from .report.completions import CompletionRow, show_completions
from .run.metrics import SPANS, RunMetrics
from .run.mismatch_gate import MismatchGate
from .run.optimizers import check_own_optimizer, follows_metrics
from .run.plan_request import read_plan_request
from .run.planned_run import PlannedRun
from .trainer_inputs import TrainerInputs


if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig


logger = logging.get_logger(__name__)


class PPOTrainer(TrlSurface):
    """Proximal Policy Optimization with every model call on the devices of the execution plan.

    Takes the arguments of TRL 1.12's `PPOTrainer` in the same order; several of them accept more kinds of values.

    Args:
        args ([`PPOConfig`]):
            Training arguments.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]):
            The policy's tokenizer; it needs a pad token.
        model ([`~transformers.PreTrainedModel`] or `str`):
            The policy. If it is a name or path, only the ranks that hold a part of it in the plan load it.
        ref_model ([`~transformers.PreTrainedModel`] or `str`, *optional*):
            The reference model; by default a copy of the policy, or the policy without its adapters.
        reward_model ([`~transformers.PreTrainedModel`], `str`, function, or a list of these):
            A sequence classifier with one output, or `(prompts, completions, **columns) -> scores`, sync or async.
        train_dataset ([`~datasets.Dataset`]):
            Prompts: a column `prompt` (text or conversations) or `input_ids`. Other columns are passed to reward
            functions.
        value_model ([`~transformers.PreTrainedModel`] or `str`):
            The critic: a sequence classifier with one output.
        data_collator (`callable`, *optional*):
            Creates `input_ids` from rows. Its padding is removed again.
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Prompts to evaluate on.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            An optimizer over the parameters of policy and critic, and a scheduler; by default those of `args`.
        callbacks (`list` of [`~transformers.TrainerCallback`], *optional*):
            Callbacks to add to the default ones.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adds an adapter to the policy; only the adapter is trained.
        reward_processing_classes (tokenizer or list of them, *optional*):
            The tokenizer of each reward model; `None` for the policy's tokenizer.
        reallocation_plugin ([`ReallocationPlugin`], *optional*):
            Settings of reallocations and of the planner that `args` does not have; by default the environment's.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantizes a policy passed by name, for training with a `peft_config` (QLoRA). TRL's `GRPOTrainer` has it.
    """

    _data_begins = 0  # update at which this run started to read its data

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
        peft_config: PeftConfig | None = None,
        reward_processing_classes: Any = None,
        reallocation_plugin: ReallocationPlugin | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
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
            quantization_config=quantization_config,
        )
        request = read_plan_request(args, self.plugin, world, model, args.ppo_settings().graph)
        alarm = Alarm(watch(self.plugin.heartbeat_timeout or 0.0) if world.num_processes > 1 else None)
        with alarm.guard():
            setup, self.prompts = prepare(args, self.plugin, request, world.process_index, inputs)
        self.run = PlannedRun(PPOAdapter(self), setup, self.plugin, world.process_index, alarm)
        self._ref_model, self.reward_model = ref_model, reward_model
        models = setup.models_before_start
        super().__init__(
            model=PolicyAndValueWrapper(models[Role.ACTOR], models[Role.CRITIC]),
            args=args,
            data_collator=data_collator,
            train_dataset=setup.train_dataset,
            eval_dataset=self.prompts.evaluation,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=(setup.rates.scheduled, optimizers[1]),
        )
        self.run.follow_callbacks()
        self._fixed = fixed_settings(args, OF_PPO)
        self._gate = MismatchGate(args, reports=self.is_world_process_zero())
        self.state = self._new_state()
        self._make_scheduler()
        self.metrics = RunMetrics(SPANS if self.is_world_process_zero() else 0)  # rank 0 writes the timeline
        if hasattr(self.model, "add_model_tags"):
            self.model.add_model_tags(self._tag_names)

    @property
    def timeline(self) -> Timeline:
        """The start and end of the calls of the latest updates. Rank 0 keeps up to `metrics.SPANS` of them, other ranks
        none."""
        return self.metrics.timeline

    def get_train_dataloader(self) -> DataLoader[PromptBatch]:
        """Global batches, the same on every rank, in the order of the current pass."""
        order = SeededOrder(len(self.train_dataset), self.data_seed)
        return prompt_loader(self.train_dataset, self.args.batch_size, self.prompts.collate, order)

    @property
    def dataloader(self) -> DataLoader[PromptBatch]:
        """A new loader of the global batches of the first pass over the data, the same on every rank. Its length is the
        number of updates in a pass."""
        return self.get_train_dataloader()

    @dataloader.setter
    def dataloader(self, loader: Any) -> NoReturn:
        raise AttributeError(
            "dataloader cannot be replaced; give the constructor another train_dataset or data_collator, or override "
            "get_train_dataloader."
        )

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
            update_end = time.time()
            self.metrics.add(iteration, update_start, update_end, self.setup.algorithm.settings.vf_coef)
            self.control = self.callback_handler.on_step_end(args, self.state, self.control)
            self._log_evaluate_save()
            self._judge_mismatch(iteration.metrics.get(MISMATCH))
            if self._shows_completions(self.state.global_step):
                self.generate_completions(sampling=True)
            if is_last or self.control.should_training_stop:
                self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
                self._log_evaluate_save()
            if self.control.should_training_stop:
                break
            left = self.state.max_steps - self.state.global_step
            self.run.change.note(iteration.spans, iteration.lengths, update_end - update_start, left)
        self.executor.cancel_early()  # a callback has stopped the run
        self._log_metrics()
        self.run.checkpoints.finish()
        self.run.placed.end_together()
        self._load_best_model()
        metrics = speed_metrics("train", start_time, num_steps=self.state.global_step - start_step)
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.control = self.callback_handler.on_train_end(args, self.state, self.control)
        if self.accelerator.is_main_process:  # after on_train_end, so that the progress bar has ended its line
            self.run.save_record("PPO", self.timeline, list(self.metrics.lengths))
        loss = self.metrics.mean_loss()
        return TrainOutput(self.state.global_step, loss, {**metrics, "train_loss": loss})

    def _judge_mismatch(self, mismatch: float | None) -> None:
        """Warn of a mismatch between engine and trainer, or end the run after saving the state after this update."""
        how = "the loss is weighted by trainer over engine"
        if not self.args.vllm_importance_sampling_correction:
            how = (
                "PPO's ratio is relative to the engine's probabilities, and so are clip range and KL, unless "
                "vllm_importance_sampling_correction is set"
            )
        with self.run.checkpoints.saving_good_state():
            self._gate.must_correct(mismatch, self.state.global_step, how)

    def _may_begin_early(self, is_last: bool) -> bool:
        """True if generation for later updates may begin during this update: always with a staleness; otherwise not at
        the end of a pass over the data, nor before an evaluation or printed completions, which need the engines."""
        if self.plan.staleness.versions:
            return True
        args, done = self.args, self.state.global_step + 1
        evaluates = args.eval_strategy == IntervalStrategy.STEPS and done % self.state.eval_steps == 0
        return not is_last and not evaluates and not self._shows_completions(done)

    def _working(self, done: int) -> contextlib.AbstractContextManager[None]:
        """Print notices while an update runs: soon in the first, which compiles kernels, and once a minute later."""
        if not done:
            return working("the first update", "kernels are compiled and caches filled, later ones are faster")
        return working(f"update {self.state.global_step + 1}", after_s=60.0, every_s=60.0)

    # --- state, learning rates, settings and logs ---------------------------------------------------------------------

    def _make_scheduler(self) -> None:
        self.callback_handler.lr_scheduler = self.create_scheduler(self.args.num_total_batches, self.optimizer)

    def _renew_scheduler(self) -> None:
        """Restart the schedule of the arguments for a second training, as Trainer does. A user's scheduler
        continues."""
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
        """Use the current PPO settings of `args`, as TRL does, because a callback may have changed them. The first
        process's values hold on all processes. All ranks together.

        Raises:
            ConfigError: a setting is not allowed, or has already determined the plan, the engines or the data.
        """
        refuse_changed(self._fixed, fixed_settings(self.args, self._fixed))
        placed = self.run.placed
        settings = placed.executor.channels.broadcast(self.args.ppo_settings())
        if settings == placed.setup.algorithm.settings:
            return
        for name, value in vars(settings).items():
            setattr(self.args, name, value)
        check_settings(self.args)
        algorithm = replace(placed.setup.algorithm, settings=settings)
        placed.setup = replace(placed.setup, algorithm=algorithm)
        placed.executor.runner.algorithm = algorithm

    def _log_metrics(self) -> None:
        if metrics := self.metrics.take():
            eps = self.metrics.episodes_per_second(self.state.episode)
            self.log({**metrics, "eps": eps, "lr": self._rate, "episode": self.state.episode})

    def _log_evaluate_save(self) -> None:
        """Log, evaluate and save as the callbacks requested, after an update or a pass over the data."""
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

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Generate responses to the evaluation prompts and score them. Nothing is trained.

        Args:
            eval_dataset: prompts as in the constructor, a dict of several datasets, or the name of one in the
                constructor's dict; by default the constructor's.

        Returns:
            `{prefix}_objective/*`: the means over the prompts. `{prefix}_val/num_eos_tokens`: the sum over the prompts.

        Raises:
            DataError: a dataset without prompts, or prompts that the policy cannot respond to.
        """
        rows = dataset_of(eval_dataset, self.eval_dataset)
        if isinstance(rows, dict):
            parts = [self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}") for name, part in rows.items()]
            return {name: value for metrics in parts for name, value in metrics.items()}
        if rows is None:
            raise ValueError("evaluate needs an eval_dataset; neither the trainer nor this call has one.")
        by_vllm = self.plan["actor.generate"].engine == "vllm"
        rows = self.prompts.tokenized(rows, self.eval_dataset, by_vllm=by_vllm)
        start = time.time()
        with self.run.failing_together():
            self.run.placed.start()
            self._follow_settings()
            means, count = mean_metrics(self.executor, self.get_eval_dataloader(rows))
            self.run.placed.end_together()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        metrics |= speed_metrics(metric_key_prefix, start, num_samples=count)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def generate_completions(self, sampling: bool = False) -> list[CompletionRow]:
        """Near-greedy completions of the evaluation prompts with their scores. Five of them are printed as a table.

        Args:
            sampling (`bool`, *optional*, defaults to `False`):
                Only the first batch of prompts.

        Returns:
            `list[dict]`: `query`, `model response` and `score` of each prompt; empty without an evaluation dataset, and
            on ranks other than 0.
        """
        if self.eval_dataset is None:
            return []
        rows = next(iter(self.eval_dataset.values())) if isinstance(self.eval_dataset, dict) else self.eval_dataset
        with self.run.failing_together():
            self.run.placed.start()
            batches = self.get_eval_dataloader(rows)
            table = completions(self.executor, islice(batches, 1) if sampling else batches)
            self.run.placed.end_together()
        if self.accelerator.is_main_process:
            show_completions(table, self.args.report_to, self.state.global_step)
        return table

    def _shows_completions(self, done: int) -> bool:
        """True if completions are shown after `done` updates."""
        is_due = self.args.num_sample_generations > 0 and (done - 1) % self.sample_generations_freq == 0
        return is_due and self.eval_dataset is not None


__all__ = ["OnlineTrainerState", "PPOTrainer", "Sampling", "collate_prompts"]
