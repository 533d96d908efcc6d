"""`Trainer`'s seams for saving and resuming: what `PPOTrainer` does where Trainer would write or read a checkpoint."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...algorithms.nonfinite import NonFiniteError
from ...runtime.failures.alarm import Alarm, JobFailed
from ...runtime.placement import Placement
from .identity import Identity, data_checksum, trained_shapes
from .problems import Problems
from .resuming import SCHEDULER, STATE, Found, Here, Wanted, find_checkpoint, newest_whole
from .saving import check_writable, new_run, save_checkpoint
from .state import load_training_state, save_models, save_training_state


class CheckpointMixin:
    """Saves and resumes. The attributes are those of the trainer that it is mixed into."""

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
    alarm: Alarm
    store_flos: Callable[[], None]
    create_model_card: Callable[..., None]
    push_to_hub: Callable[..., Any]
    _start: Callable[[], None]
    _failing_together: Callable[[], contextlib.AbstractContextManager[None]]
    _push_from_checkpoint: Callable[[str], None]
    _save_rng_state: Callable[[str], None]
    _load_rng_state: Callable[[str], None]

    _run: str | None = None  # the name of the run in its checkpoints' manifests
    _saved_step = 0  # updates that had been made at the last save
    _data_begins = 0  # the update at which this run began with its data

    # --- saving -----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The policy (or its adapter) with the tokenizer into `output_dir`, and the critic into its `value_model`.
        Every rank calls this.

        Raises:
            SaveError: on every rank, where one could not write.
        """
        folder = Path(output_dir or self.args.output_dir)
        with self._failing_together():
            self._start()
            problems = self._problems()
            save_models(self.placement, folder, self._write_policy, problems)
            problems.settle("the model")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _problems(self) -> Problems:
        return Problems(self.accelerator.process_index, self.placement.control)

    def _write_policy(self, model: Any, state: dict[str, torch.Tensor], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder, state_dict=state)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """What Trainer's of this name leaves in a checkpoint, and the critic; whole, or not there at all."""
        args, name = self.args, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        final = Path(args.output_dir) / name
        self.store_flos()
        if self.state.best_global_step:
            best = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best.exists() or best == final:
                self.state.best_model_checkpoint = str(best)
        control = self.placement.control
        self._run = self._run or new_run(control)
        self.alarm.at(f"saving {final}")
        save_checkpoint(
            final,
            self._run,
            self._write_checkpoint,
            {**self._identity.to_dict(), "data_begins": self._data_begins},
            rank=self.accelerator.process_index,
            control=control,
            limit=args.save_total_limit,
            best=Path(self.state.best_model_checkpoint) if self.state.best_model_checkpoint else None,
        )
        self._saved_step = self.state.global_step
        self.alarm.checkpoint(final)
        if args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _write_checkpoint(self, folder: Path, problems: Problems) -> None:
        """This rank's part of a checkpoint."""
        args = self.args
        save_models(self.placement, folder, self._write_policy, problems)
        if not args.save_only_model:
            save_training_state(self.placement, folder, problems)
            random_state = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
            with problems.writing(folder / random_state):
                self._save_rng_state(str(folder))
        if self.accelerator.process_index:
            return
        if not args.save_only_model:
            with problems.writing(folder / SCHEDULER):
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)
        with problems.writing(folder / "plan.yaml"):
            self.plan.save(folder / "plan.yaml")
        with problems.writing(folder / STATE):
            states = defaultdict(list)
            for callback in self._exportable():
                states[type(callback).__name__].append(callback.state())
            self.state.stateful_callbacks |= {n: own[0] if len(own) == 1 else own for n, own in states.items()}
            self.state.save_to_json(str(folder / STATE))
        with problems.trying(Path(args.output_dir) / "README.md"):
            self.create_model_card(model_name=Path(args.hub_model_id or args.output_dir).name)

    @contextlib.contextmanager
    def _saving_good_state(self) -> Iterator[None]:
        """Around an update: where it is refused for its samples or their scores, on every rank and before any role was
        trained, the state from before it is saved, and the run ends."""
        try:
            yield
        except (NonFiniteError, JobFailed) as error:
            unharmed = isinstance(error, NonFiniteError) or error.is_unharmed
            if unharmed and self.args.save_strategy != "no" and self.state.global_step > self._saved_step:
                self._save_checkpoint(None, None)
            raise

    def _exportable(self) -> list[Any]:
        return [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]

    # --- resuming ---------------------------------------------------------------------------------------------------

    @cached_property
    def _identity(self) -> Identity:
        data, given = self.setup.train_dataset, self.setup.make_optimizer.args[0]
        kind: type = type(given)
        if not isinstance(given, torch.optim.Optimizer):
            kind, _ = Trainer.get_optimizer_cls_and_kwargs(self.args, self.setup.models_before_start[0])
        return Identity(kind.__name__, self.args.batch_size, len(data), data_checksum(data))

    def _find_checkpoint(self, given: Wanted) -> Found | None:
        """The checkpoint that `train` goes on from, if any.

        Raises:
            CheckpointError: before any engine starts; see `find_checkpoint`.
        """
        given = self.args.resume_from_checkpoint if given is None else given
        rank, plan = self.accelerator.process_index, self.plan
        shapes = {}
        if not self.placement.started:  # engines cut what they hold
            policy, critic = self.setup.models_before_start
            roles = [("policy", "actor.train", policy), ("critic", "critic.train", critic)]
            shapes = {role: trained_shapes(model) for role, call, model in roles if rank in plan.mesh(call)}
        here = Here(self._identity, shapes, bool(self.args.ignore_data_skip))
        if self.args.save_strategy != "no":
            check_writable(Path(self.args.output_dir), self._problems())
        found = find_checkpoint(given, Path(self.args.output_dir), here, rank=rank, control=self.placement.control)
        self._run = found.manifest.run if found is not None and found.manifest is not None else None
        self._saved_step = 0
        return found

    def _load_checkpoint(self, found: Found) -> None:
        """Everything but the trainer's state, into engines that have been started."""
        self._saved_step = self.state.global_step
        self.alarm.checkpoint(found.folder)
        load_training_state(self.placement, found.folder)
        self.lr_scheduler.load_state_dict(torch.load(found.folder / SCHEDULER, weights_only=True))
        self.setup.rates.restore(self.lr_scheduler.get_last_lr())
        self._load_rng_state(str(found.folder))

    def _load_best_model(self) -> None:
        """`load_best_model_at_end`: policy and critic as they were in the best checkpoint."""
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            here = Here(self._identity, {})
            folder, rank = Path(self.state.best_model_checkpoint), self.accelerator.process_index
            # hands hosts with a disk of their own what they lack of it
            find_checkpoint(str(folder), folder.parent, here, rank=rank, control=self.placement.control)
            load_training_state(self.placement, folder)

    def _what_is_left(self) -> str:
        """For the message of a failure: where the run can go on from."""
        folder = Path(self.args.output_dir)
        whole = newest_whole(folder) if folder.is_dir() else None
        if whole is None:
            return (
                "No checkpoint of this run has been saved."
                if self.args.save_strategy != "no"
                else ("Nothing of this run has been saved, because save_strategy is 'no'.")
            )
        return (
            f"The newest whole checkpoint is {whole}: train(resume_from_checkpoint=True), or resume_from_checkpoint: "
            f"auto in the recipe, goes on from it."
        )


__all__ = ["CheckpointMixin"]
