"""Saving and resuming in a trainer of one policy whose loop is Trainer's: what it saves beyond other trainers
(`mixin`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from torch import nn

from ...plan.dataflow import Role
from ...runtime.drawn_samples import DrawnSamples
from ...runtime.host_calls import HostCalls
from ..optimizers import LearningRates
from .identity import Identity, prompts_checksum
from .mixin import CheckpointMixin
from .resuming import ENTROPY_STATE, Checkpoint
from .training_state import StateWrite
from .write_errors import WriteErrors


class PolicyCheckpointMixin(CheckpointMixin):
    """Saves and resumes a run of GRPO or RLOO."""

    calls: HostCalls
    entropy_coef: float
    num_iterations: int  # TRL's
    _step: int  # TRL's: micro-batches that were trained on
    forget_step: Callable[[], None]
    _last_world_entropy: float
    _untrained = 0  # micro-batches of an optimizer step that has not been made yet, or has failed

    @property
    def rates(self) -> LearningRates:  # type: ignore[override]  # a property may take the place of an attribute
        return self.setup.rates

    @property
    def models_before_start(self) -> Mapping[Role, nn.Module]:  # type: ignore[override]
        return {Role.ACTOR: self.setup.model_before_start}

    @cached_property
    def checkpoint_identity(self) -> Identity:  # type: ignore[override]
        data = self.setup.train_dataset
        readable = hasattr(data, "__len__") and "prompt" in (data.column_names or ())
        size = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        # of TRL's RepeatSampler
        names = ("seed", "num_generations", "generation_batch_size", "num_iterations", "shuffle_dataset")
        order = {name: getattr(self.args, name) for name in names}
        rows, checksum = (len(data), prompts_checksum(data)) if readable else (None, None)
        return Identity(self._optimizer_name, size, rows, checksum, order)

    def _samples_under_way(self) -> DrawnSamples | None:
        # TRL's loop generates again where a run goes on in the middle of a generation, or before an optimizer step that
        # has not been made, whose micro-batches it has counted
        given = self._step
        begun, trained = -(-given // self._micro_batches), (given - self._untrained) // self._micro_batches
        return self.calls.samples_under_way(again=begun - trained)

    @property
    def _micro_batches(self) -> int:
        """Number of micro-batches that are trained on one generation."""
        count: int = self.args.steps_per_generation * self.num_iterations
        return count

    @property
    def _is_within_generation(self) -> bool:
        """Whether the training goes on with responses that have been generated."""
        return self._step % self._micro_batches != 0

    def _go_on_with(self, drawn: DrawnSamples | None) -> None:
        self.calls.go_on_with(drawn)

    def _load_training_state(self, checkpoint: Checkpoint) -> None:
        super()._load_training_state(checkpoint)
        self.forget_step()  # of other weights

    def _write_checkpoint(self, folder: Path, problems: WriteErrors) -> StateWrite | None:
        """Write this rank's part of a checkpoint, with the state that TRL keeps in a file of its own."""
        if getattr(self, "use_adaptive_entropy", False) and not self.accelerator.process_index:
            state = {"entropy_coef": self.entropy_coef, "last_world_entropy": self._last_world_entropy}
            with problems.writing(folder / ENTROPY_STATE):
                (folder / ENTROPY_STATE).write_text(json.dumps(state), encoding="utf-8")
        return super()._write_checkpoint(folder, problems)


__all__ = ["PolicyCheckpointMixin"]
