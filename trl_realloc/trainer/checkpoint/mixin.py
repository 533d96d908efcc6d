"""Saving and resuming in a trainer, in place of Trainer's methods of the same names.

What only `PPOTrainer` saves is in `ppo_mixin`. The files of a checkpoint are written in `saving`, `models` and
`training_state`, and read in `resuming` and `training_state`.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ...algorithms.nonfinite import NonFiniteError
from ...engines.training.group_settings import RATE
from ...plan.dataflow import Role
from ...runtime.drawn_samples import DrawnSamples
from ...runtime.executor import Executor
from ...runtime.failures.alarm import Alarm, JobFailed, is_known_everywhere
from ...runtime.placement import Placement
from ...runtime.process_groups import from_every_rank
from ..optimizers import LearningRates
from .identity import Identity, Shapes, trained_shapes
from .manifest import is_of_run
from .models import save_models
from .resuming import (
    SAMPLES,
    SCHEDULER,
    SETTINGS,
    STATE,
    Checkpoint,
    CurrentRun,
    ResumeSetting,
    fetch,
    find_checkpoint,
    newest_whole,
    read_settings,
)
from .saving import UnfinishedCheckpoint, check_writable, new_run
from .state_plans import ROLES
from .training_state import StateWrite, load_training_state
from .write_errors import WriteErrors


logger = logging.get_logger(__name__)


class CheckpointMixin:
    """Saves and resumes any trainer whose calls run under a plan. It is mixed into a subclass of Trainer, before it.

    It needs Trainer's attributes and these of the subclass:
        plan: the execution plan.
        placement, executor, alarm: of the plan.
        rates: the learning rates of the trained roles.
        setup: what is known of the run, with `make_optimizer`.
        models_before_start: by trained role, the model or its structure as this rank has it before the engines start.
        checkpoint_identity: what a checkpoint of this run must have in common with one that it resumes from.
        _start: loads the models and starts the engines, unless it has been done.
        _failing_together: a context around what all ranks do together; it tells the others of a failure.

    The subclass calls `_find_checkpoint` and `_load_checkpoint` where it begins to train, `_finish_save` where it ends
    or changes its plan, and `_load_best_model` at last. Trainer's loop calls `_save_checkpoint` and, after it, the
    callbacks' `on_save`; a trainer with a loop of its own sets `_calls_on_save`. With `async_save` the callbacks are
    called when the checkpoint is complete, in both loops.
    """

    args: Any
    state: Any
    accelerator: Any
    lr_scheduler: Any
    callback_handler: Any
    control: Any
    processing_class: Any
    store_flos: Callable[[], None]
    create_model_card: Callable[..., None]
    push_to_hub: Callable[..., Any]
    _push_from_checkpoint: Callable[[str], None]
    _save_rng_state: Callable[[str], None]
    _load_rng_state: Callable[[str], None]

    plan: Any
    placement: Placement
    executor: Executor
    alarm: Alarm
    rates: LearningRates
    setup: Any
    models_before_start: Mapping[Role, nn.Module]
    checkpoint_identity: Identity
    _start: Callable[[], None]
    _failing_together: Callable[[], contextlib.AbstractContextManager[None]]

    _calls_on_save = False  # the callbacks' `on_save`, when a checkpoint is complete
    _counters: tuple[str, ...] = ("global_step",)  # whole numbers that the trainer's state has
    _run: str | None = None  # name of the run in the manifests of its checkpoints
    _unfinished: UnfinishedCheckpoint | None = None  # the checkpoint that is being written
    _saved_state: Any = None  # the trainer's state when its first file was written
    _saved_step = 0  # number of updates before the last save

    # --- saving -----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or its adapter) and the tokenizer to `output_dir`, and the critic, if the run has one, to
        `output_dir/value_model`. Collective over the job.

        Raises:
            SaveError: on every rank, if one could not write.
        """
        folder = Path(output_dir or self.args.output_dir)
        with self._failing_together():
            if not self.placement.started:  # saving needs no generation engine, which a failure may have ended
                self._start()
            problems = self._problems()
            save_models(self.placement, folder, self._save_beside_policy, problems)
            problems.settle("the model")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _problems(self) -> WriteErrors:
        return WriteErrors(self.accelerator.process_index, self.placement.control)

    def _save_beside_policy(self, folder: Path) -> None:
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the files of Trainer's checkpoint and all trained models, atomically."""
        args, name = self.args, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        final = Path(args.output_dir) / name
        self.store_flos()
        self._finish_save()  # before another best one, which is not complete yet, takes the place of the best one
        control = self.placement.control
        self._run = self._run or new_run(control)
        if self.state.best_global_step:
            best = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            has_best = best == final or is_of_run(best, self._run)
            if any(from_every_rank(has_best, control)) if args.load_best_model_at_end else has_best:
                self.state.best_model_checkpoint = str(best)
        self.alarm.at(f"saving {final}")
        self._unfinished = UnfinishedCheckpoint(
            final,
            self._run,
            self._write_checkpoint,
            self._about_checkpoint(),
            rank=self.accelerator.process_index,
            control=control,
        )
        self._saved_step = self.state.global_step
        self._saved_state = copy.copy(self.state) if args.async_save else self.state
        if not args.async_save:
            self._finish_save()

    def _finish_save(self, wait: bool = True) -> None:
        """Complete the checkpoint that is being written, if there is one. Collective over the job.

        Args:
            wait: for the ranks that are still writing. Otherwise nothing is done if there are any.
        """
        unfinished, args = self._unfinished, self.args
        if unfinished is None or (not wait and not all(from_every_rank(unfinished.done, self.placement.control))):
            return
        self._unfinished = None
        self.alarm.at(f"saving {unfinished.final}")
        best = self.state.best_model_checkpoint
        unfinished.finish(limit=args.save_total_limit, best=Path(best) if best else None)
        self.alarm.checkpoint(unfinished.final)
        should_save, state = self.control.should_save, self.state
        self.state = self._saved_state  # callbacks find the checkpoint's folder by `global_step`
        try:
            if args.push_to_hub:
                self._push_from_checkpoint(str(unfinished.final))
            if self._calls_on_save or args.async_save:
                self.control = self.callback_handler.on_save(args, self.state, self.control)
        finally:
            self.state = state
        self.control.should_save = should_save  # `on_save` resets it, but it may ask for the next checkpoint

    def _write_checkpoint(self, folder: Path, problems: WriteErrors) -> StateWrite | None:
        """Write this rank's part of a checkpoint. Returns what is still being written (`async_save`)."""
        args = self.args
        background: StateWrite | None = None
        save_models(self.placement, folder, self._save_beside_policy, problems)
        if not args.save_only_model:
            background = StateWrite(self.placement, folder, problems, in_background=args.async_save)
            if not args.async_save:
                background.finish()
            random_state = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
            with problems.writing(folder / random_state):
                self._save_rng_state(str(folder))
            under_way = self._samples_under_way()
            if under_way is not None:  # on rank 0
                with problems.writing(folder / SAMPLES):
                    torch.save(under_way.to_tensors(), folder / SAMPLES)
        if self.accelerator.process_index:
            return background if args.async_save else None
        if not args.save_only_model:
            with problems.writing(folder / SCHEDULER):
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)
            with problems.writing(folder / SETTINGS):
                torch.save(self.rates.changed(), folder / SETTINGS)
        with problems.writing(folder / "plan.yaml"):
            self.plan.save(folder / "plan.yaml")
        with problems.writing(folder / STATE):
            states = defaultdict(list)
            for callback in self._exportable():
                states[type(callback).__name__].append(callback.state())
            self.state.stateful_callbacks |= {
                name: of_class[0] if len(of_class) == 1 else of_class for name, of_class in states.items()
            }
            self.state.save_to_json(str(folder / STATE))
        with problems.trying(Path(args.output_dir) / "README.md"):
            self.create_model_card(model_name=Path(args.hub_model_id or args.output_dir).name)
        return background if args.async_save else None

    @contextlib.contextmanager
    def _saving_good_state(self) -> Iterator[None]:
        """Around an update. If its samples or scores are refused, which happens on every rank before any role is
        trained, the state before the update is saved, and the error is raised."""
        try:
            yield
        except (NonFiniteError, JobFailed) as error:
            is_unchanged = isinstance(error, NonFiniteError) or error.is_unharmed
            if is_unchanged:
                self._save_unsaved()
            if is_known_everywhere(error):  # an older checkpoint may still be written
                self._finish_save()
            raise

    def _save_unsaved(self) -> None:
        """Save the state between two updates, in a run that saves, unless the last checkpoint has it. Collective over
        the job."""
        if self.args.save_strategy != "no" and self.state.global_step > self._saved_step:
            self._save_checkpoint(None, None)

    def _exportable(self) -> list[Any]:
        return [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]

    # --- resuming ---------------------------------------------------------------------------------------------------

    @property
    def _optimizer_name(self) -> str:
        """The class of the roles' optimizers: that of the user's, or the one that the arguments name."""
        source = self.setup.make_optimizer.args[0]  # the user's optimizer, or `args`
        if isinstance(source, torch.optim.Optimizer):
            return type(source).__name__
        kind, _ = Trainer.get_optimizer_cls_and_kwargs(self.args, self.models_before_start[Role.ACTOR])
        return str(kind.__name__)

    def _about_checkpoint(self) -> dict[str, Any]:
        """What the manifest says of the run."""
        return self.checkpoint_identity.to_dict()

    def _current_run(self, shapes: Mapping[str, Shapes] | None = None, *, ignores_data: bool = False) -> CurrentRun:
        roles = [ROLES[role] for role in self.plan.graph.trained_roles]
        return CurrentRun(self.checkpoint_identity, roles, shapes or {}, ignores_data, self._counters)

    def _find_checkpoint(self, setting: ResumeSetting) -> Checkpoint | None:
        """The checkpoint that `train` resumes from, if any. Called before any engine starts.

        Args:
            setting: the argument of `train`; `None` for that of the training arguments.

        Raises:
            CheckpointError: see `find_checkpoint`.
        """
        setting = self.args.resume_from_checkpoint if setting is None else setting
        rank, plan = self.accelerator.process_index, self.plan
        shapes = {}
        if not self.placement.started:  # engines shard parameters, and their shapes with them
            for role, model in self.models_before_start.items():
                home = plan.graph.train_call(role)
                if home is not None and rank in plan.mesh(home):
                    shapes[ROLES[role]] = trained_shapes(model)
        current_run = self._current_run(shapes, ignores_data=bool(self.args.ignore_data_skip))
        if self.args.save_strategy != "no":
            check_writable(Path(self.args.output_dir), self._problems())
        checkpoint = find_checkpoint(
            setting, Path(self.args.output_dir), current_run, rank=rank, control=self.placement.control
        )
        self._run = checkpoint.manifest.run if checkpoint is not None else None
        self._saved_step, self._unfinished = 0, None
        return checkpoint

    def _load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load everything but the trainer's state. The engines must have been started."""
        self._saved_step = self.state.global_step
        if self.args.load_best_model_at_end:
            self._agree_on_best()
        self.alarm.checkpoint(checkpoint.folder)
        self._load_training_state(checkpoint)
        self.lr_scheduler.load_state_dict(torch.load(checkpoint.folder / SCHEDULER, weights_only=True))
        changed = read_settings(checkpoint.folder / SETTINGS)
        self.rates.restore(changed or [{RATE: rate} for rate in self.lr_scheduler.get_last_lr()])
        self._load_rng_state(str(checkpoint.folder))
        under_way, file = None, checkpoint.folder / SAMPLES
        if self.accelerator.is_main_process and file.exists() and not self.args.ignore_data_skip:
            under_way = DrawnSamples.from_tensors(torch.load(file, weights_only=True))
        self._go_on_with(under_way)

    def _agree_on_best(self) -> None:
        """Keep the best checkpoint of the state on all ranks if any host has it, and forget it otherwise. Trainer
        forgets it where the host lacks it; but all ranks load it together, and get its files from each other."""
        best: str | None = self.state.best_model_checkpoint
        found = from_every_rank(best if best is not None and Path(best).is_dir() else None, self.placement.control)
        self.state.best_model_checkpoint = next((folder for folder in found if folder is not None), None)
        if best is not None and self.state.best_model_checkpoint is None and not self.accelerator.process_index:
            logger.warning(f"the best checkpoint so far, {best}, does not exist any more; the run goes on without it.")

    def _samples_under_way(self) -> DrawnSamples | None:
        """What has been drawn for later updates, on rank 0; `None` where nothing has. All ranks together."""
        return self.executor.samples_under_way(self.state.global_step)

    def _go_on_with(self, drawn: DrawnSamples | None) -> None:
        """Use the samples that were under way, on rank 0 those of the checkpoint. All ranks together."""
        self.executor.go_on_with(drawn)

    def _load_best_model(self) -> None:
        """Load the trained models of the best checkpoint, if `load_best_model_at_end` is set."""
        self._finish_save()  # the best one may still be being written
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            current_run = self._current_run(ignores_data=True)  # its weights alone are taken
            folder, rank = Path(self.state.best_model_checkpoint), self.accelerator.process_index
            control = self.placement.control
            checkpoint = find_checkpoint(str(folder), folder.parent, current_run, rank=rank, control=control)
            assert checkpoint is not None, "a folder was asked for"
            self._load_training_state(checkpoint)

    def _load_training_state(self, checkpoint: Checkpoint) -> None:
        files = partial(fetch, checkpoint, rank=self.accelerator.process_index, control=self.placement.control)
        load_training_state(self.placement, checkpoint.folder, files)
        self.placement.forget_copies()

    def _resume_hint(self) -> str:
        """Which checkpoint the run can be resumed from, for the message of a failure."""
        folder = Path(self.args.output_dir)
        try:
            checkpoint = newest_whole(folder) if folder.is_dir() else None
        except OSError as error:  # the run's own failure is what counts
            return f"The checkpoints in {folder} cannot be read: {error}."
        if checkpoint is None:
            return (
                "No checkpoint of this run has been saved."
                if self.args.save_strategy != "no"
                else ("Nothing of this run has been saved, because save_strategy is 'no'.")
            )
        return (
            f"The newest whole checkpoint is {checkpoint}: train(resume_from_checkpoint=True), or "
            f"resume_from_checkpoint: auto in the recipe, goes on from it."
        )


__all__ = ["CheckpointMixin"]
