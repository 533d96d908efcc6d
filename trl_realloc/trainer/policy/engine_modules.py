"""Modules that stand in TRL's and Trainer's code for models that are in engines."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from ..checks.config_checks import ConfigError


class ReferenceInEngine(nn.Module):
    """Stands for the reference where TRL asks for its log-probabilities. The model is in an engine."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `ConfigError`: only the plan's engine runs the reference."""
        raise ConfigError(
            "ref_model is in an engine of the plan; ask for its log-probabilities by "
            "trainer._get_per_token_logps_and_entropies(trainer.ref_model, ...)."
        )


class ModelInEngine(nn.Module):
    """Stands for the wrapped model in Trainer's loop. Forwards and missing attributes are passed on to the trainer's
    current module; gradients are computed by the engine."""

    _trainer: Any

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.__dict__["_trainer"] = trainer  # not a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the trainer's current module without gradients.

        Raises:
            ConfigError: gradients are enabled in a training. The engines would not see them.
        """
        if torch.is_grad_enabled() and self._trainer.model.training:
            raise ConfigError(
                "the loss calls the model itself, and the plan's engines train by the log-probabilities and entropies "
                "of self._get_per_token_logps_and_entropies(model, ...) alone; use these, or train with TRL's class."
            )
        return self._trainer.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._trainer.model, name)

    def train(self, mode: bool = True) -> ModelInEngine:
        self._trainer.model.train(mode)
        return self

    def eval(self) -> ModelInEngine:
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what has been collected for an optimizer step. Trainer calls this before the first and after each."""
        self._trainer.forget_step()

    def parameters(self, recurse: bool = True) -> Any:
        return self._trainer.model.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self._trainer.model.named_parameters(*args, **kwargs)
