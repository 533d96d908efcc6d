"""Saving and resuming in `PPOTrainer`, in place of Trainer's methods of the same names.

The files of a checkpoint are written in `saving`, `models` and `training_state`, and read in `resuming` and
`training_state`.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...algorithms.nonfinite import NonFiniteError
from ...runtime.drawn_samples import DrawnSamples
from ...runtime.executor import Executor
from ...runtime.failures.alarm import Alarm, JobFailed, is_known_everywhere
from ...runtime.placement import Placement
from ...runtime.process_groups import from_every_rank
from .identity import Identity, data_checksum, trained_shapes
from .models import save_models
from .resuming import (
    SAMPLES,
    SCHEDULER,
    STATE,
    Checkpoint,
    CurrentRun,
    ResumeSetting,
    fetch,
    find_checkpoint,
    newest_whole,
)
from .saving import UnfinishedCheckpoint, check_writable, new_run
from .training_state import StateWrite, load_training_state
from .write_errors import WriteErrors


class CheckpointMixin:
    """Saves and resumes. The attributes are those of the trainer that the class is mixed into."""

    args: Any
    state: Any
    setup: Any
    plan: Any
    accelerator: Any
    lr_scheduler: Any
    callback_handler: Any
    control: Any
    processing_class: Any
    placement: Placement
    executor: Executor
    alarm: Alarm
    store_flos: Callable[[], None]
    create_model_card: Callable[..., None]
    push_to_hub: Callable[..., Any]
    _start: Callable[[], None]
    _failing_together: Callable[[], contextlib.AbstractContextManager[None]]
    _push_from_checkpoint: Callable[[str], None]
    _save_rng_state: Callable[[str], None]
    _load_rng_state: Callable[[str], None]

    _run: str | None = None  # name of the run in the manifests of its checkpoints
    _unfinished: UnfinishedCheckpoint | None = None  # the checkpoint that is being written
    _saved_state: Any = None  # the trainer's state when its first file was written
    _saved_step = 0  # number of updates before the last save
    _data_begins = 0  # the update at which this run started to read its data

    # --- saving -----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or its adapter) and the tokenizer to `output_dir`, and the critic to
        `output_dir/value_model`. Collective over the job.

        Raises:
            SaveError: on every rank, if one could not write.
        """
        folder = Path(output_dir or self.args.output_dir)
        with self._failing_together():
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
        """Save the files of Trainer's checkpoint and the critic, atomically."""
        args, name = self.args, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        final = Path(args.output_dir) / name
        self.store_flos()
        if self.state.best_global_step:
            best = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best.exists() or best == final:
                self.state.best_model_checkpoint = str(best)
        control = self.placement.control
        self._run = self._run or new_run(control)
        self._finish_save()
        self.alarm.at(f"saving {final}")
        self._unfinished = UnfinishedCheckpoint(
            final,
            self._run,
            self._write_checkpoint,
            {**self._identity.to_dict(), "data_begins": self._data_begins},
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
            under_way = self.executor.samples_under_way(self.state.global_step)
            if under_way:  # on rank 0
                with problems.writing(folder / SAMPLES):
                    torch.save(under_way.to_tensors(), folder / SAMPLES)
        if self.accelerator.process_index:
            return background if args.async_save else None
        if not args.save_only_model:
            with problems.writing(folder / SCHEDULER):
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)
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

    @cached_property
    def _identity(self) -> Identity:
        data, source = self.setup.train_dataset, self.setup.make_optimizer.args[0]  # the user's optimizer, or `args`
        kind: type = type(source)
        if not isinstance(source, torch.optim.Optimizer):
            kind, _ = Trainer.get_optimizer_cls_and_kwargs(self.args, self.setup.models_before_start[0])
        return Identity(kind.__name__, self.args.batch_size, len(data), data_checksum(data))

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
            policy, critic = self.setup.models_before_start
            roles = [("policy", "actor.train", policy), ("critic", "critic.train", critic)]
            shapes = {role: trained_shapes(model) for role, call, model in roles if rank in plan.mesh(call)}
        current_run = CurrentRun(self._identity, shapes, bool(self.args.ignore_data_skip))
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
        self.alarm.checkpoint(checkpoint.folder)
        self._load_training_state(checkpoint)
        self.lr_scheduler.load_state_dict(torch.load(checkpoint.folder / SCHEDULER, weights_only=True))
        self.setup.rates.restore(self.lr_scheduler.get_last_lr())
        self._load_rng_state(str(checkpoint.folder))
        under_way, file = None, checkpoint.folder / SAMPLES
        if self.accelerator.is_main_process and file.exists() and not self.args.ignore_data_skip:
            under_way = DrawnSamples.from_tensors(torch.load(file, weights_only=True))
        self.executor.go_on_with(under_way)

    def _load_best_model(self) -> None:
        """Load policy and critic of the best checkpoint, if `load_best_model_at_end` is set."""
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            current_run = CurrentRun(self._identity, {})
            folder, rank = Path(self.state.best_model_checkpoint), self.accelerator.process_index
            control = self.placement.control
            checkpoint = find_checkpoint(str(folder), folder.parent, current_run, rank=rank, control=control)
            assert checkpoint is not None, "a folder was asked for"
            self._load_training_state(checkpoint)

    def _load_training_state(self, checkpoint: Checkpoint) -> None:
        files = partial(fetch, checkpoint, rank=self.accelerator.process_index, control=self.placement.control)
        load_training_state(self.placement, checkpoint.folder, files)

    def _resume_hint(self) -> str:
        """Which checkpoint the run can be resumed from, for the message of a failure."""
        folder = Path(self.args.output_dir)
        checkpoint = newest_whole(folder) if folder.is_dir() else None
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
