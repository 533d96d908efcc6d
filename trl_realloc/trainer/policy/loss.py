"""`PolicyLossMixin`: TRL's loss with its log-probabilities from the plan's calls, and the training by its gradients.

TRL's loss reads a model through its log-probabilities and entropies alone, so it is computed on leaf tensors with their
values, and their gradients are what the engines train with (`algorithms.linear_loss`). The micro-batches of an
optimizer step are collected in `window`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from ...plan.dataflow import Role
from ...runtime.calls.training_calls import GRAD_NORM
from ...runtime.host_calls import HostCalls
from ..checks.config_checks import ConfigError
from ..checks.fixed_settings import fixed_attributes, refuse_changed
from ..run.planned_run import PlannedRun
from .engine_modules import ReferenceInEngine
from .policy_host import PolicyHost
from .policy_setup import PolicySetup
from .window import Leaves, Rows


class PolicyLossMixin:
    """The methods between TRL's rows and its optimizer step. To be mixed in before TRL's class."""

    args: Any
    state: Any
    model: Any
    accelerator: Any
    current_gradient_accumulation_steps: int
    is_in_train: bool
    plan: Any
    calls: HostCalls
    run: PlannedRun[PolicySetup, PolicyHost] | None
    _metrics: Any  # TRL's

    _fixed: dict[str, Any]  # the settings that may not change, as they were when the trainer was made
    _leaves: Leaves | None = None  # of the micro-batch whose loss is being computed
    _following: tuple[Rows, ...] = ()  # micro-batches of the same optimizer step after it
    _grad_norm: torch.Tensor  # of the latest step
    _buffered_inputs: Any = None  # TRL's

    @property
    def _host(self) -> PolicyHost:
        assert self.run is not None, "Accelerate trains by TRL's methods"
        return self.run.host

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if self.run is not None:
            refuse_changed(self._fixed, fixed_attributes(self))
            self.calls.at(self.state.global_step, evaluates=not self.model.training)
        return super()._prepare_inputs(generation_batch)  # type: ignore[misc]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, without log-probabilities where TRL's generation by Transformers would have none."""
        made = super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        if self.run is None:
            return made
        by_vllm = self.plan["actor.generate"].engine == "vllm"
        return (made[0], None) if isinstance(made, tuple) and not by_vllm else made

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss, of a micro-batch of the training on leaf tensors."""
        if self.run is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        if torch.is_grad_enabled():
            self._following = tuple(self._rows_after(inputs))
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        finally:
            self._following = ()
            if not torch.is_grad_enabled() and not self.model.training:
                self._host.window.forget_logprobs()  # of an evaluation, which asks for each sample once

    def _rows_after(self, inputs: Any) -> Iterator[Rows]:
        """The micro-batches of the same optimizer step that have been generated already; none where a forward for an
        earlier one had them."""
        buffer = self._buffered_inputs or ()
        at = next((i for i, part in enumerate(buffer) if part is inputs), len(buffer))
        if at and len(self._host.window):
            return
        left = self.current_gradient_accumulation_steps - len(self._host.window) - 1
        for part in buffer[at + 1 : at + 1 + left]:
            ids, masks = (
                torch.cat([part[f"prompt_{name}"], part[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
            )
            yield Rows.of(ids, masks, part["completion_ids"].size(1))

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """(rows, `logits_to_keep`) log-probabilities and, if asked for, entropies, by the plan's calls; where gradients
        are enabled, leaf tensors."""
        if self.run is None:
            return super()._get_per_token_logps_and_entropies(  # type: ignore[misc, no-any-return]
                model, input_ids, attention_mask, logits_to_keep, *args, compute_entropy=compute_entropy, **kwargs
            )
        if not self.run.placed.placement.started:  # outside of a training
            self.run.placed.start()
        rows = Rows.of(input_ids, attention_mask, logits_to_keep)
        if isinstance(model, ReferenceInEngine):
            return self._host.window.of_reference(rows), None, None
        logprobs, entropies = self._host.window.of_policy(rows, self._following)
        if torch.is_grad_enabled():
            if self._leaves is not None and self.is_in_train:
                raise ConfigError("the loss of a micro-batch asks for the policy's log-probabilities twice; ask once.")
            entropies.requires_grad_(getattr(self, "_entropy_bonus_enabled", False))
            self._leaves = Leaves(rows, logprobs.requires_grad_(), entropies)
        return logprobs, entropies if compute_entropy else None, None

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """In the place of Accelerate's backward: collect the slopes of a micro-batch."""
        leaves, self._leaves = self._leaves, None
        if leaves is None:
            raise ConfigError(
                "the loss has not asked for the policy's log-probabilities by _get_per_token_logps_and_entropies, so "
                "the plan's engines cannot train by it."
            )
        loss.backward()
        host = self._host
        host.window.add(leaves, 1 / self.accelerator.num_processes)
        if self.accelerator.sync_gradients:
            host.untrained = len(host.window)

    def _train_step(self) -> None:
        """In the place of the optimizer's step, which Trainer asks for after the last micro-batch of one: train."""
        start, host = time.perf_counter(), self._host
        assert self.run is not None
        with self.run.checkpoints.saving_good_state():
            outputs = host.calls.train(host.window.take(), self.run.placed.setup.rates.role(Role.ACTOR))
        host.untrained = 0
        if self.args.skip_nonfinite_updates:
            self._metrics["train"]["skipped_updates/policy"].append(float(not len(outputs)))
        if len(outputs):
            self._grad_norm.fill_(float(outputs.tensor(GRAD_NORM)[0]))
        if times := self._metrics["train"]["step_time"]:
            times[-1] += time.perf_counter() - start  # TRL measures to the end of the last backward

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        """The norm of the step's gradient before the engine clips it, a 0-dimensional float64 tensor on the CPU, which
        is set by the step: Trainer asks before it, and reads the number afterwards."""
        return super()._clip_grad_norm(model) if self.run is None else self._get_grad_norm(model)  # type: ignore[misc]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self.run is None:
            return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]
        self._grad_norm = torch.zeros((), dtype=torch.float64)
        return self._grad_norm

    def forget_step(self) -> None:
        """Forget the slopes and log-probabilities of an optimizer step."""
        self._leaves = None
        self._host.window.forget()


__all__ = ["PolicyLossMixin"]
