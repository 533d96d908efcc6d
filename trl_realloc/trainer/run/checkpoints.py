"""`Checkpoints`: saves the checkpoints of a run, and resumes a run from one.

Checkpoint files are written and read in `checkpoint`.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ...algorithms.nonfinite import NonFiniteError
from ...engines.training.optimizer_state import RATE
from ...plan.dataflow import Role
from ...runtime.failures.alarm import JobFailed, is_known_everywhere
from ...runtime.process_groups import all_gather_object
from ...runtime.samples.partial_rollouts import PartialRollouts
from ..checkpoint.chunk_plans import ROLES
from ..checkpoint.identity import Identity, Shapes, trained_shapes
from ..checkpoint.manifest import is_of_run
from ..checkpoint.model_files import save_models
from ..checkpoint.resuming import (
    SAMPLES,
    SAVED_SETTINGS,
    SCHEDULER,
    STATE,
    Checkpoint,
    CurrentRun,
    ResumeSetting,
    fetch,
    find_checkpoint,
    newest_whole,
    read_settings,
)
from ..checkpoint.saving import UnfinishedCheckpoint, check_writable, new_run
from ..checkpoint.state_files import StateWrite, load_training_state
from ..checkpoint.write_errors import WriteErrors
from .mismatch_gate import MismatchError
from .placed_plan import PlacedPlan


logger = logging.get_logger(__name__)


class Checkpoints:
    """Saves and resumes a trainer's run.

    A trainer calls `find` and `load` when training begins, `finish` when it ends, and `load_best` last. Its loop calls
    `save`, then the callbacks' `on_save`, unless the adapter leaves that to `finish`. With `async_save` the callbacks
    are called when the checkpoint is complete, in all loops.

    Args:
        placed: the plan of the run, with its adapter.

    Attributes:
        unfinished: checkpoint that is still being written, or `None`.
    """

    def __init__(self, placed: PlacedPlan) -> None:
        self.placed, self.adapter, self.trainer = placed, placed.adapter, placed.adapter.trainer
        self.unfinished: UnfinishedCheckpoint | None = None
        self._run: str | None = None  # name of the run in the manifests of its checkpoints
        self._saved_state: TrainerState | None = None  # the trainer's state when its first file was written
        self._saved_step = 0  # number of updates before the last save

    # --- saving -----------------------------------------------------------------------------------------------------

    def save_models(self, folder: Path) -> None:
        """Save the trained models and the tokenizer to a folder. Collective over the job.

        Raises:
            SaveError: a rank could not write. Raised on every rank.
        """
        if not self.placed.placement.started:  # a failure may have ended generation engines, which saving does not need
            self.placed.start()
        problems = self._problems()
        save_models(self.placed.placement, folder, self._save_beside_policy, problems)
        problems.settle("the model")

    def _problems(self) -> WriteErrors:
        return WriteErrors(self.placed.rank, self.placed.placement.control)

    def _save_beside_policy(self, folder: Path) -> None:
        if self.trainer.processing_class is not None:
            self.trainer.processing_class.save_pretrained(folder)
        torch.save(self.trainer.args, folder / "training_args.bin")

    def save(self) -> None:
        """Save Trainer's checkpoint files and all trained models atomically."""
        args, name = self.trainer.args, f"{PREFIX_CHECKPOINT_DIR}-{self.trainer.state.global_step}"
        final = Path(args.output_dir) / name
        self.trainer.store_flos()
        self.finish()  # the state must not name a new best checkpoint while an incomplete one is being written
        control = self.placed.placement.control
        self._run = self._run or new_run(control)
        if self.trainer.state.best_global_step:
            best = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.trainer.state.best_global_step}"
            has_best = best == final or is_of_run(best, self._run)
            if any(all_gather_object(has_best, control)) if args.load_best_model_at_end else has_best:
                self.trainer.state.best_model_checkpoint = str(best)
        self.placed.alarm.set_activity(f"saving {final}")
        self.unfinished = UnfinishedCheckpoint(
            final,
            self._run,
            self._write_checkpoint,
            {**self.identity.to_dict(), **self.adapter.about_checkpoint()},
            rank=self.placed.rank,
            control=control,
        )
        self._saved_step = self.trainer.state.global_step
        self._saved_state = copy.copy(self.trainer.state) if args.async_save else self.trainer.state
        if not args.async_save:
            self.finish()

    def finish(self, wait: bool = True) -> None:
        """Complete the checkpoint that is being written, if any. Collective over the job.

        Args:
            wait: whether to wait for ranks that are still writing. If false, nothing is done while any is.
        """
        unfinished, args = self.unfinished, self.trainer.args
        if unfinished is None or (
            not wait and not all(all_gather_object(unfinished.done, self.placed.placement.control))
        ):
            return
        self.unfinished = None
        self.placed.alarm.set_activity(f"saving {unfinished.final}")
        best = self.trainer.state.best_model_checkpoint
        unfinished.finish(limit=args.save_total_limit, best=Path(best) if best else None)
        self.placed.alarm.checkpoint(unfinished.final)
        should_save, state = self.trainer.control.should_save, self.trainer.state
        self.trainer.state = self._saved_state  # callbacks derive the checkpoint's folder from `global_step`
        try:
            if args.push_to_hub:
                self.trainer._push_from_checkpoint(str(unfinished.final))
            if self.adapter.calls_on_save or args.async_save:
                self.trainer.control = self.trainer.callback_handler.on_save(
                    args, self.trainer.state, self.trainer.control
                )
        finally:
            self.trainer.state = state
        self.trainer.control.should_save = should_save  # `on_save` resets it, but it may request the next checkpoint

    def _write_checkpoint(self, folder: Path, problems: WriteErrors) -> StateWrite | None:
        """Write this rank's part of a checkpoint. Returns the write that is still running (`async_save`), if any."""
        args = self.trainer.args
        self.adapter.write_state(folder, problems)
        background: StateWrite | None = None
        save_models(self.placed.placement, folder, self._save_beside_policy, problems)
        if not args.save_only_model:
            background = StateWrite(self.placed.placement, folder, problems, in_background=args.async_save)
            if not args.async_save:
                background.finish()
            random_state = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
            with problems.writing(folder / random_state), self.adapter.random_states_to_save():
                self.trainer._save_rng_state(str(folder))
            under_way = self.adapter.samples_under_way()
            if under_way is not None:  # on rank 0
                with problems.writing(folder / SAMPLES):
                    torch.save(under_way.to_tensors(), folder / SAMPLES)
        if self.placed.rank:
            return background if args.async_save else None
        if not args.save_only_model:
            with problems.writing(folder / SCHEDULER):
                torch.save(self.trainer.lr_scheduler.state_dict(), folder / SCHEDULER)
            with problems.writing(folder / SAVED_SETTINGS):
                torch.save(self.placed.setup.rates.changed(), folder / SAVED_SETTINGS)
        with problems.writing(folder / "plan.yaml"):
            self.placed.plan.save(folder / "plan.yaml")
        with problems.writing(folder / STATE):
            states = defaultdict(list)
            for callback in self.exportable():
                states[type(callback).__name__].append(callback.state())
            self.trainer.state.stateful_callbacks |= {
                name: of_class[0] if len(of_class) == 1 else of_class for name, of_class in states.items()
            }
            self.trainer.state.save_to_json(str(folder / STATE))
        with problems.trying(Path(args.output_dir) / "README.md"):
            self.trainer.create_model_card(model_name=Path(args.hub_model_id or args.output_dir).name)
        return background if args.async_save else None

    @contextlib.contextmanager
    def saving_good_state(self) -> Iterator[None]:
        """Context of an update. If its samples or scores are refused, which happens on every rank before any role is
        trained, the state before the update is saved, and the error is raised."""
        try:
            yield
        except (NonFiniteError, JobFailed, MismatchError) as error:
            is_unchanged = not isinstance(error, JobFailed) or error.is_recoverable
            if is_unchanged:
                self.save_unsaved()
            # an older checkpoint may still be written
            if isinstance(error, MismatchError) or is_known_everywhere(error):
                self.finish()
            raise

    def save_unsaved(self) -> None:
        """In a run that saves, save the state between two updates, unless the last checkpoint has it. Collective over
        the job."""
        if self.trainer.args.save_strategy != "no" and self.trainer.state.global_step > self._saved_step:
            self.trainer._save_checkpoint(None, None)

    def exportable(self) -> list[Any]:
        """The control and the callbacks whose state a checkpoint saves."""
        return [
            c
            for c in [*self.trainer.callback_handler.callbacks, self.trainer.control]
            if isinstance(c, ExportableState)
        ]

    # --- resuming ---------------------------------------------------------------------------------------------------

    @property
    def _optimizer_name(self) -> str:
        """The class name of the roles' optimizers: the user's, or the one that the arguments name."""
        source = self.placed.setup.make_optimizer.args[0]  # the user's optimizer, or `args`
        if isinstance(source, torch.optim.Optimizer):
            return type(source).__name__
        kind, _ = Trainer.get_optimizer_cls_and_kwargs(
            self.trainer.args, self.placed.setup.models_before_start[Role.ACTOR]
        )
        return str(kind.__name__)

    @cached_property
    def identity(self) -> Identity:
        """The properties of this run that must match those of a checkpoint it resumes from."""
        return self.adapter.identity(self._optimizer_name)

    def _current_run(self, shapes: Mapping[str, Shapes] | None = None, *, ignores_data: bool = False) -> CurrentRun:
        roles = [ROLES[role] for role in self.placed.plan.graph.trained_roles]
        return CurrentRun(self.identity, roles, shapes or {}, ignores_data, self.adapter.counters)

    def find(self, setting: ResumeSetting) -> Checkpoint | None:
        """The checkpoint that `train` resumes from, or `None`. Called before any engine starts.

        Args:
            setting: argument of `train`; `None` for the setting of the training arguments.

        Raises:
            CheckpointError: see `find_checkpoint`.
        """
        setting = self.trainer.args.resume_from_checkpoint if setting is None else setting
        rank, plan = self.placed.rank, self.placed.plan
        shapes = {}
        if not self.placed.placement.started:  # engines shard parameters, and their shapes with them
            for role, model in self.placed.setup.models_before_start.items():
                home = plan.graph.train_call(role)
                if home is not None and rank in plan.mesh(home):
                    shapes[ROLES[role]] = trained_shapes(model)
        current_run = self._current_run(shapes, ignores_data=bool(self.trainer.args.ignore_data_skip))
        if self.trainer.args.save_strategy != "no":
            check_writable(Path(self.trainer.args.output_dir), self._problems())
        checkpoint = find_checkpoint(
            setting, Path(self.trainer.args.output_dir), current_run, rank=rank, control=self.placed.placement.control
        )
        self._run = checkpoint.manifest.run if checkpoint is not None else None
        self._saved_step, self.unfinished = 0, None
        return checkpoint

    def load(self, checkpoint: Checkpoint) -> None:
        """Load everything but the trainer's state. The engines must have been started."""
        self._saved_step = self.trainer.state.global_step
        if self.trainer.args.load_best_model_at_end:
            self._agree_on_best()
        self.placed.alarm.checkpoint(checkpoint.folder)
        self.load_models(checkpoint)
        self.trainer.lr_scheduler.load_state_dict(torch.load(checkpoint.folder / SCHEDULER, weights_only=True))
        changed = read_settings(checkpoint.folder / SAVED_SETTINGS)
        self.placed.setup.rates.restore(changed or [{RATE: rate} for rate in self.trainer.lr_scheduler.get_last_lr()])
        self.trainer._load_rng_state(str(checkpoint.folder))
        under_way, file = None, checkpoint.folder / SAMPLES
        if self.placed.rank == 0 and file.exists() and not self.trainer.args.ignore_data_skip:
            under_way = PartialRollouts.from_tensors(torch.load(file, weights_only=True))
        self.adapter.go_on_with(under_way)

    def _agree_on_best(self) -> None:
        """Keep the state's best checkpoint on all ranks if any host has it, and forget it otherwise. Trainer forgets it
        on hosts without it, but all ranks load it together, and fetch its files from each other."""
        best: str | None = self.trainer.state.best_model_checkpoint
        folders = all_gather_object(
            best if best is not None and Path(best).is_dir() else None, self.placed.placement.control
        )
        self.trainer.state.best_model_checkpoint = next((folder for folder in folders if folder is not None), None)
        if best is not None and self.trainer.state.best_model_checkpoint is None and not self.placed.rank:
            logger.warning(f"the best checkpoint so far, {best}, does not exist any more; the run goes on without it.")

    def load_best(self) -> None:
        """Load the trained models of the best checkpoint, if `load_best_model_at_end` is set."""
        self.finish()  # the best checkpoint may still be incomplete
        if self.trainer.args.load_best_model_at_end and self.trainer.state.best_model_checkpoint is not None:
            current_run = self._current_run(ignores_data=True)  # only weights are loaded
            folder, rank = Path(self.trainer.state.best_model_checkpoint), self.placed.rank
            control = self.placed.placement.control
            checkpoint = find_checkpoint(str(folder), folder.parent, current_run, rank=rank, control=control)
            assert checkpoint is not None, "a folder was asked for"
            self.load_models(checkpoint)

    def load_models(self, checkpoint: Checkpoint) -> None:
        """Load the trained models and their optimizers' states."""
        files = partial(fetch, checkpoint, rank=self.placed.rank, control=self.placed.placement.control)
        load_training_state(self.placed.placement, checkpoint.folder, files)
        self.placed.placement.forget_copies()
        self.adapter.forget_step()

    def resume_hint(self) -> str:
        """A sentence for the message of a failure: the checkpoint to resume from, or why there is none."""
        folder = Path(self.trainer.args.output_dir)
        try:
            checkpoint = newest_whole(folder) if folder.is_dir() else None
        except OSError as error:  # must not hide the run's failure
            return f"The checkpoints in {folder} cannot be read: {error}."
        if checkpoint is None:
            return (
                "No checkpoint of this run has been saved."
                if self.trainer.args.save_strategy != "no"
                else ("Nothing of this run has been saved, because save_strategy is 'no'.")
            )
        return (
            f"The newest whole checkpoint is {checkpoint}: train(resume_from_checkpoint=True), or "
            f"resume_from_checkpoint: auto in the recipe, goes on from it."
        )


__all__ = ["Checkpoints"]
