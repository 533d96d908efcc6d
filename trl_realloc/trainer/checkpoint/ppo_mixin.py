"""Saving and resuming in `PPOTrainer`: what it saves beyond other trainers (`mixin`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import nn

from ...plan.dataflow import Role
from ..optimizers import LearningRates
from .identity import Identity, data_checksum
from .mixin import CheckpointMixin


class PPOCheckpointMixin(CheckpointMixin):
    """Saves and resumes a run of PPO, which has a loop of its own and counts episodes."""

    _calls_on_save = True
    _counters = ("global_step", "episode")
    _data_begins = 0  # the update at which this run started to read its data

    @property
    def rates(self) -> LearningRates:  # type: ignore[override]  # a property may take the place of an attribute
        rates: LearningRates = self.setup.rates
        return rates

    @property
    def models_before_start(self) -> Mapping[Role, nn.Module]:  # type: ignore[override]
        policy, critic = self.setup.models_before_start
        return {Role.ACTOR: policy, Role.CRITIC: critic}

    @cached_property
    def checkpoint_identity(self) -> Identity:  # type: ignore[override]
        data, order = self.setup.train_dataset, {"data_seed": self.data_seed}
        return Identity(self._optimizer_name, self.args.batch_size, len(data), data_checksum(data), order)

    @property
    def data_seed(self) -> int:
        """What the order of the prompts is drawn from."""
        seed: int = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return seed

    def _about_checkpoint(self) -> dict[str, Any]:
        return {**super()._about_checkpoint(), "data_begins": self._data_begins}


__all__ = ["PPOCheckpointMixin"]
