"""`PPOAdapter`: adapts a PPO trainer, whose loop runs whole iterations, to a planned run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...plan.dataflow import Role
from ...runtime.executor import Executor
from ...runtime.samples.partial_rollouts import PartialRollouts
from ..checkpoint.identity import Identity, data_checksum
from ..checkpoint.write_errors import WriteErrors


if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


class PPOAdapter:
    """The trainer's side of a PPO run (`placed_plan.TrainerAdapter`).

    Args:
        trainer: a `PPOTrainer`.
    """

    iteration = "update"
    calls_on_save = True
    counters: tuple[str, ...] = ("global_step", "episode")

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def hold(self, models: Mapping[Role, PreTrainedModel]) -> None:
        self.trainer.model.hold(models[Role.ACTOR], models[Role.CRITIC])
        self.trainer._ref_model = None  # as the user passed it

    def follow(self, executor: Executor) -> None:
        """Does nothing: the loop asks the run for its executor."""

    def stop_early(self) -> None:
        self.trainer.executor.cancel_early()

    def samples_under_way(self) -> PartialRollouts | None:
        return self.trainer.executor.samples_under_way(self.trainer.state.global_step)

    def go_on_with(self, partial_samples: PartialRollouts | None) -> None:
        self.trainer.executor.go_on_with(partial_samples)

    def forget_step(self) -> None:
        """Does nothing: an iteration is trained whole."""

    def identity(self, optimizer: str) -> Identity:
        args, data = self.trainer.args, self.trainer.setup.train_dataset
        return Identity(
            optimizer, args.batch_size, len(data), data_checksum(data), {"data_seed": self.trainer.data_seed}
        )

    def about_checkpoint(self) -> dict[str, Any]:
        return {"data_begins": self.trainer._data_begins}

    def write_state(self, folder: Path, problems: WriteErrors) -> None:
        """Does nothing: PPO has no state beyond that of other trainers."""

    def random_states_to_save(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # a checkpoint is saved between iterations


__all__ = ["PPOAdapter"]
