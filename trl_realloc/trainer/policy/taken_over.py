"""`TakenOver`: the state in which a plan puts a trainer of TRL's class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn


if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


@dataclass(frozen=True, kw_only=True)
class TakenOver:
    """The attributes of TRL's trainer that a plan overwrites after the constructor of TRL's class, by their names.

    `PolicyAdapter` sets others again during a run: `vllm_generation`, `_step` and `_buffered_inputs` with each
    executor, `model` with each placement, and `model_wrapped` and `lr_scheduler` with each training.
    `PlannedRun.follow_callbacks` wraps the callback handler.

    Args:
        model: the policy, maybe without weights until the engines start.
        model_wrapped: the same.
        ref_model: the model with which TRL asks for the reference's log-probabilities; `None` without a reference.
        beta: weight of the reference's penalty. The constructor saw 0, so that it loaded no reference.
        use_vllm: True, so that TRL generates through `vllm_generation`.
        vllm_mode: "colocate", so that TRL asks `vllm_generation` how long a context may be.
        vllm_importance_sampling_correction: whether TRL corrects its loss with the engine's log-probabilities.
        is_deepspeed_enabled: False: the engines do what the launcher asked of Accelerate.
        is_fsdp_enabled: the same.
        async_loop: loop of async functions. Not every release of TRL has one for async objects.
        turns: the methods that take several turns, wrapped, by name (`turns.Turns.methods`).
        _compute_loss: the same method with what the engine drew in its context (`PolicyAdapter`).
        backward: replaces Accelerate's backward: collects the token gradients of a loss.
        clip_grad_norm_: replaces Accelerate's, which would read the gradients of a module: does nothing.
        _wrap_model: makes the model that Trainer evaluates. Trainer's would move the policy to this rank's device.
        _load_from_checkpoint: does nothing: weights are loaded with the training state (`prepare_for_training`).
        _last_loaded_step: the update of which the engine has the weights, for TRL's loop; -1, as in a new trainer.
    """

    model: PreTrainedModel
    model_wrapped: PreTrainedModel
    ref_model: nn.Module | None
    beta: float
    use_vllm: bool = True
    vllm_mode: str = "colocate"
    vllm_importance_sampling_correction: bool
    is_deepspeed_enabled: bool = False
    is_fsdp_enabled: bool = False
    async_loop: Any
    turns: Mapping[str, Callable[..., Any]]
    _compute_loss: Callable[..., Any]
    backward: Callable[..., None]
    clip_grad_norm_: Callable[..., None] = lambda *_, **__: None
    _wrap_model: Callable[..., nn.Module]
    _load_from_checkpoint: Callable[..., None] = lambda *_, **__: None
    _last_loaded_step: int = -1

    def put_on(self, trainer: Trainer) -> None:
        """Overwrite the attributes of this trainer and of its accelerator."""
        attributes = dict(vars(self))
        for name in ("backward", "clip_grad_norm_"):
            setattr(trainer.accelerator, name, attributes.pop(name))
        for name, value in {**attributes.pop("turns"), **attributes}.items():
            setattr(trainer, name, value)
