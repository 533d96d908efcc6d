"""`TrainerInputs`: the arguments of a trainer's constructor without the training arguments.

The checks of these values are in `checks`, the steps that use them in `ppo_setup` and `policy_setup`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..engines.training.deepspeed_compat import gathered


if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class TrainerInputs:
    """The constructor's arguments under the names that `PPOTrainer` documents.

    Args:
        reward_model: a model, a name, a function, or a list of these. For GRPO and RLOO, only the models among
            `reward_funcs`; TRL calls the functions.
        reward_argument: name of `reward_model` in the constructor, for messages.
        attention: attention implementation of a policy and reward models passed by name; `None` for the model's
            default.
        reward_dtype: dtype of reward models passed by name; `None` for their checkpoints' dtype.
        quantization_config: setting for loading a policy passed by name; `None` for the checkpoint's.
    """

    model: PreTrainedModel | str
    processing_class: PreTrainedTokenizerBase | None = None
    ref_model: PreTrainedModel | str | None = None
    reward_model: Any = ()
    value_model: PreTrainedModel | str | None = None
    train_dataset: Dataset | None = None
    eval_dataset: Dataset | None = None
    data_collator: Any = None
    optimizers: tuple[torch.optim.Optimizer | None, LRScheduler | None] = (None, None)
    peft_config: PeftConfig | None = None
    reward_processing_classes: Any = None
    reward_argument: str = "reward_model"
    attention: str | None = None
    reward_dtype: torch.dtype | None = None
    quantization_config: Any = None

    @property
    def rewards(self) -> list[Any]:
        """The reward models and functions as a list."""
        rewards = self.reward_model
        return [*map(path_as_text, rewards if isinstance(rewards, (list, tuple)) else [rewards])]

    @property
    def reward_models(self) -> list[Any]:
        """The reward models, loaded or by name, without the reward functions."""
        return [reward for reward in self.rewards if isinstance(reward, str) or hasattr(reward, "config")]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.optimizers[0]

    @property
    def scheduler(self) -> LRScheduler | None:
        return self.optimizers[1]

    def gathered(self) -> TrainerInputs:
        """The same inputs with model paths as text. Parameters of loaded models that `zero.Init` had partitioned are
        gathered in place."""
        model, ref_model, value_model = map(path_as_text, (self.model, self.ref_model, self.value_model))
        for loaded in (model, ref_model, value_model, *self.rewards):
            gathered(loaded)
        return replace(self, model=model, ref_model=ref_model, value_model=value_model, reward_model=self.rewards)


def path_as_text(model: Any) -> Any:
    """A model's path as text; anything else unchanged."""
    return os.fspath(model) if isinstance(model, os.PathLike) else model
