"""Adapts to the installed release of TRL: the base classes of trainers and configurations, the scaling of its loss, and
its Comet table. No other file depends on the release.

The trainers of GRPO and RLOO, which exist in every release, are in `trl_policy_trainers`.

TRL 1.12 is the last release with `trl.experimental.ppo`. With it our classes are subclasses of TRL's, so `isinstance`
works. On newer releases they are subclasses of TRL's `_BaseTrainer` and `_BaseConfig`.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch


os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL's notice that its PPO is experimental does not apply
if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed, if installed, searches for one and warns

HAS_TRL_PPO = importlib.util.find_spec("trl.experimental.ppo") is not None

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import Trainer as TrainerBase
    from transformers import TrainingArguments as ConfigBase
    from transformers import TrainingArguments as TRLGRPOConfig
    from transformers import TrainingArguments as TRLRLOOConfig
elif HAS_TRL_PPO:
    from trl.experimental.ppo import PPOConfig as ConfigBase
    from trl.experimental.ppo import PPOTrainer as TrainerBase
else:
    from trl.trainer.base_config import _BaseConfig as ConfigBase
    from trl.trainer.base_trainer import _BaseTrainer as TrainerBase

if not TYPE_CHECKING:
    from trl import GRPOConfig as TRLGRPOConfig
    from trl import RLOOConfig as TRLRLOOConfig


class PPOTrainerBase(TrainerBase):
    """The base class of `PPOTrainer`: TRL's trainer without the constructor of TRL's PPO."""

    def __init__(self, **trainer_arguments: Any) -> None:
        # TRL 1.12's PPOTrainer does not call Trainer.__init__; the next class in the MRO is TRL's base trainer
        if HAS_TRL_PPO:
            super(TrainerBase, self).__init__(**trainer_arguments)
        else:
            super().__init__(**trainer_arguments)


def is_scaled_for_accumulation(trainer: Any) -> bool:
    """True if a micro-batch's loss is already scaled as a part of the optimizer step's mean, and is not divided by the
    number of micro-batches. TRL 1.16 sets an attribute that Transformers 5.19 reads; older releases set a
    `compute_loss_func` that nobody calls."""
    scaled: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
    return trainer.compute_loss_func is not None if scaled is None else scaled


def log_table_to_comet(name: str, table: DataFrame) -> None:
    """Log a DataFrame to the running Comet experiment, if any."""
    from trl.trainer.utils import log_table_to_comet_experiment

    log_table_to_comet_experiment(name=name, table=table)


__all__ = [
    "HAS_TRL_PPO",
    "ConfigBase",
    "PPOTrainerBase",
    "TRLGRPOConfig",
    "TRLRLOOConfig",
    "is_scaled_for_accumulation",
    "log_table_to_comet",
]
