"""Modules that stand in TRL's and Trainer's code for models that are in engines."""

from __future__ import annotations

from typing import Any

from torch import nn


class ReferenceInEngine(nn.Module):
    """Stands for the reference where TRL asks for its log-probabilities. The model is in an engine."""


class ModelInEngine(nn.Module):
    """What Trainer's loop has for a wrapped model: the trainer's current module, whose gradients are its engine's."""

    _trainer: Any

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.__dict__["_trainer"] = trainer  # not a submodule

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
