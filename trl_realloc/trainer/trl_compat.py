"""Which TRL is installed: the base of our trainer and config, and nothing else knows the difference.

TRL 1.12 is the last release with `trl.experimental.ppo`; there our classes are subclasses of its, so `isinstance`
holds. On newer ones they stand on TRL's `_BaseTrainer` and `_BaseConfig`.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch


os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # the notice that PPO is experimental is TRL's, not ours
if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, where installed, looks for one and warns

HAS_TRL_PPO = importlib.util.find_spec("trl.experimental.ppo") is not None

if TYPE_CHECKING:
    from transformers import Trainer as TrainerBase
    from transformers import TrainingArguments as ConfigBase
elif HAS_TRL_PPO:
    from trl.experimental.ppo import PPOConfig as ConfigBase
    from trl.experimental.ppo import PPOTrainer as TrainerBase
else:
    from trl.trainer.base_config import _BaseConfig as ConfigBase
    from trl.trainer.base_trainer import _BaseTrainer as TrainerBase


class PPOTrainerBase(TrainerBase):
    """What our trainer inherits: TRL's, minus its PPO."""

    def __init__(self, **trainer_arguments: Any) -> None:
        # TRL 1.12's PPOTrainer never ran Trainer.__init__; past it in the order of classes lies TRL's base trainer
        if HAS_TRL_PPO:
            super(TrainerBase, self).__init__(**trainer_arguments)
        else:
            super().__init__(**trainer_arguments)


__all__ = ["HAS_TRL_PPO", "ConfigBase", "PPOTrainerBase"]
