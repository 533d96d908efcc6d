"""TRL's loss under a plan: its log-probabilities come from the plan's calls, and the engines train by its gradients.

TRL's loss reads a model through its log-probabilities and entropies alone, so it is computed on leaf tensors with their
values (`EngineLoss`), and their gradients, the slopes, are what the engines train with (`algorithms.linear_loss`).
`Window` is between TRL's padded tensors and the samples of the engines, and collects the slopes of an optimizer step.
`ModelInEngine` and `ReferenceInEngine` stand in TRL's and Trainer's code for models that are in engines.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ...algorithms.linear_loss import ENTROPY_SLOPES, LOGPROB_SLOPES
from ...algorithms.rollout import Ragged, Rollouts
from ...plan.dataflow import Role
from ...runtime.calls.training_calls import GRAD_NORM
from ...runtime.host_calls import HostCalls, KnownOutputs
from ..checks.config_checks import ConfigError


if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainingArguments


FORWARD, REFERENCE = "actor.forward", "reference.forward"


class EngineLoss:
    """TRL's loss and the training by it, from one executor on.

    Args:
        trainer: a `PlannedPolicyTrainer`.
        calls: runs the calls.

    Attributes:
        window: the micro-batches of the optimizer step that is being made.
        untrained: micro-batches of an optimizer step that has not been made yet, or has failed.
    """

    def __init__(self, trainer: Trainer, calls: HostCalls) -> None:
        self.trainer, self.calls = trainer, calls
        self.window = Window(calls, trainer.accelerator.device)
        self.untrained = 0
        self._leaves: Leaves | None = None  # of the micro-batch whose loss is being computed
        self._following: tuple[Rows, ...] = ()  # micro-batches of the same optimizer step after it

    @contextlib.contextmanager
    def of_micro_batch(self, inputs: Any) -> Iterator[None]:
        """Around TRL's loss of a micro-batch; of the training, where gradients are enabled."""
        if torch.is_grad_enabled():
            self._following = tuple(self._rows_after(inputs))
        try:
            yield
        finally:
            self._following = ()
            if not torch.is_grad_enabled() and not self.trainer.model.training:
                self.window.forget_logprobs()  # of an evaluation, which asks for each sample once

    def _rows_after(self, inputs: Any) -> Iterator[Rows]:
        """The micro-batches of the same optimizer step that have been generated already; none where a forward for an
        earlier one had them."""
        buffer = self.trainer._buffered_inputs or ()
        at = next((i for i, part in enumerate(buffer) if part is inputs), len(buffer))
        if at and len(self.window):
            return
        left = self.trainer.current_gradient_accumulation_steps - len(self.window) - 1
        for part in buffer[at + 1 : at + 1 + left]:
            ids, masks = (
                torch.cat([part[f"prompt_{name}"], part[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
            )
            yield Rows.of(ids, masks, part["completion_ids"].size(1))

    def logps_and_entropies(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *_: Any,
        compute_entropy: bool = False,
        **__: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """(rows, `logits_to_keep`) log-probabilities and, if asked for, entropies, by the plan's calls; where gradients
        are enabled, leaf tensors."""
        if not self.trainer.placement.started:  # outside of a training
            self.trainer.run.placed.start()
        rows = Rows.of(input_ids, attention_mask, logits_to_keep)
        if isinstance(model, ReferenceInEngine):
            return self.window.of_reference(rows), None, None
        logprobs, entropies = self.window.of_policy(rows, self._following)
        if torch.is_grad_enabled():
            if self._leaves is not None and self.trainer.is_in_train:
                raise ConfigError("the loss of a micro-batch asks for the policy's log-probabilities twice; ask once.")
            entropies.requires_grad_(getattr(self.trainer, "_entropy_bonus_enabled", False))
            self._leaves = Leaves(rows, logprobs.requires_grad_(), entropies)
        return logprobs, entropies if compute_entropy else None, None

    def backward(self, loss: Tensor) -> None:
        """In the place of Accelerate's backward: collect the slopes of a micro-batch."""
        leaves, self._leaves = self._leaves, None
        if leaves is None:
            raise ConfigError(
                "the loss has not asked for the policy's log-probabilities by _get_per_token_logps_and_entropies, so "
                "the plan's engines cannot train by it."
            )
        loss.backward()  # type: ignore[no-untyped-call]
        accelerator = self.trainer.accelerator
        self.window.add(leaves, 1 / accelerator.num_processes)
        if accelerator.sync_gradients:
            self.untrained = len(self.window)

    def train_step(self) -> None:
        """In the place of the optimizer's step, which Trainer asks for after the last micro-batch of one: train."""
        start, run, metrics = time.perf_counter(), self.trainer.run, self.trainer._metrics["train"]
        with run.checkpoints.saving_good_state():
            outputs = self.calls.train(self.window.take(), run.placed.setup.rates.role(Role.ACTOR))
        self.untrained = 0
        if self.trainer.args.skip_nonfinite_updates:
            metrics["skipped_updates/policy"].append(float(not len(outputs)))
        if len(outputs):
            self._grad_norm.fill_(float(outputs.tensor(GRAD_NORM)[0]))
        if times := metrics["step_time"]:
            times[-1] += time.perf_counter() - start  # TRL measures to the end of the last backward

    def grad_norm(self) -> Tensor:
        """The norm of the step's gradient before the engine clips it, a 0-dimensional float64 tensor on the CPU, which
        is set by the step: Trainer asks before it, and reads the number afterwards."""
        self._grad_norm = torch.zeros((), dtype=torch.float64)
        return self._grad_norm

    def forget_step(self) -> None:
        """Forget the slopes and log-probabilities of an optimizer step."""
        self._leaves = None
        self.window.forget()


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch, without padding.

    Args:
        samples: `prompts` and `responses` of the rows that have a response, int64 on the CPU.
        mask: (rows, width) bool on the CPU: the tokens of the responses in TRL's tensor.
        spare: the first row with one token of its response, whether it is left out or not.
    """

    samples: Rollouts
    mask: Tensor
    spare: Rollouts

    @staticmethod
    def of(input_ids: Tensor, attention_mask: Tensor, width: int) -> Rows:
        """The rows of TRL's tensors.

        Args:
            input_ids: (rows, length) prompts, padded on the left, and responses, padded on the right.
            attention_mask: of the same shape; 0 where there is padding, and on responses that are left out.
            width: of the responses.
        """
        ids, mask = input_ids.cpu(), attention_mask.cpu().bool()
        columns = {
            "prompts": (ids[:, :-width], mask[:, :-width]),
            "responses": (ids[:, -width:], mask[:, -width:]),
        }
        ragged = {name: Ragged(part[kept], kept.sum(1)) for name, (part, kept) in columns.items()}
        has_response = ragged["responses"].lengths.nonzero()[:, 0]
        one = Ragged(ids[:1, -width], torch.ones(1, dtype=torch.long))
        spare = Rollouts(prompts=ragged["prompts"].select([0]), responses=one)
        return Rows(Rollouts(**ragged).select(has_response), mask[:, -width:], spare)

    def padded(self, column: Ragged, device: torch.device) -> Tensor:
        """(rows, width): a value per response token, 0 elsewhere."""
        out = torch.zeros(self.mask.shape, dtype=column.values.dtype)
        out[self.mask] = column.values
        return out.to(device)

    def unpadded(self, tensor: Tensor) -> Ragged:
        """The inverse of `padded`."""
        lengths = self.mask.sum(1)
        return Ragged(tensor.detach().cpu()[self.mask], lengths[lengths > 0])


@dataclass
class Leaves:
    """The tensors that TRL's loss of one micro-batch reads in place of the policy's outputs.

    Args:
        logprobs: (rows, width) float32; a leaf that gets a gradient.
        entropies: (rows, width) float32; a leaf too where the loss has an entropy term.
    """

    rows: Rows
    logprobs: Tensor
    entropies: Tensor


class Window:
    """The micro-batches of one optimizer step.

    Args:
        calls: runs the forward of the policy.
        device: of TRL's tensors.
    """

    def __init__(self, calls: HostCalls, device: torch.device) -> None:
        self.calls, self.device = calls, device
        self._known = KnownOutputs()  # log-probabilities and entropies under the policy as it is
        self._slopes: list[Rollouts] = []
        self._spare = Rollouts()

    def __len__(self) -> int:
        """The number of micro-batches whose gradients have been collected."""
        return len(self._slopes)

    def of_policy(self, rows: Rows, following: Sequence[Rows] = ()) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the rows' responses under the policy as it is, (rows, width) float32 each.
        All ranks together.

        Args:
            following: micro-batches that will be asked for before the policy changes. They are computed in the same
                forward.
        """
        samples = Rollouts.cat([part.samples for part in (rows, *following)])
        known = self._known.complete(samples, lambda missing: self.calls.forward(FORWARD, missing))
        if not len(rows.samples):
            nothing = rows.padded(Ragged.of([], torch.float32), self.device)
            return nothing, nothing.clone()
        known = known.select(range(len(rows.samples)))
        columns = (known.ragged(name) for name in ("policy_logprobs", "entropies"))
        logprobs, entropies = (rows.padded(column, self.device) for column in columns)
        return logprobs, entropies

    def of_reference(self, rows: Rows) -> Tensor:
        """Log-probabilities of the rows' responses under the reference, (rows, width) float32. All ranks together."""
        outputs = self.calls.forward(REFERENCE, rows.samples)
        column = outputs.ragged("ref_logprobs") if len(outputs) else Ragged.of([], torch.float32)
        return rows.padded(column, self.device)

    def add(self, leaves: Leaves, scale: float) -> None:
        """Collect the gradients of a micro-batch.

        Args:
            scale: of the gradients; 1 / the number of processes where the losses of all are averaged.
        """
        rows, tensors = leaves.rows, {LOGPROB_SLOPES: leaves.logprobs}
        if leaves.entropies.requires_grad:
            tensors[ENTROPY_SLOPES] = leaves.entropies
        columns = {
            name: rows.unpadded(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad * scale)
            for name, leaf in tensors.items()
        }
        self._slopes.append(rows.samples.plus(**columns))
        zero = Ragged(torch.zeros(1), torch.ones(1, dtype=torch.long))
        self._spare = rows.spare.plus(**dict.fromkeys(tensors, zero))

    def take(self) -> Rollouts:
        """The samples of the optimizer step with their slopes. What is known of the policy is forgotten.

        If all responses are left out, there is one sample whose slopes are 0: the optimizer still makes its step, which
        changes weights by momentum and weight decay.
        """
        samples = Rollouts.cat(self._slopes)
        samples = samples if len(samples) else self._spare
        self.forget()
        return samples

    def forget(self) -> None:
        """Forget slopes and log-probabilities: the policy has changed, or a step was abandoned."""
        self._slopes = []
        self.forget_logprobs()

    def forget_logprobs(self) -> None:
        """Forget the policy's log-probabilities and entropies."""
        self._known.forget()


class ReferenceInEngine(nn.Module):
    """Stands for the reference where TRL asks for its log-probabilities. The model is in an engine."""

    def forward(self, *args: TrainingArguments, **kwargs: Any) -> NoReturn:
        """Raises `ConfigError`: only the plan's engine runs the reference."""
        raise ConfigError(
            "ref_model is in an engine of the plan; ask for its log-probabilities by "
            "trainer._get_per_token_logps_and_entropies(trainer.ref_model, ...)."
        )


class ModelInEngine(nn.Module):
    """Stands for the wrapped model in Trainer's loop. Forwards and missing attributes are passed on to the trainer's
    current module; gradients are computed by the engine."""

    _trainer: Trainer

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.__dict__["_trainer"] = trainer  # not a submodule

    def forward(self, *args: TrainingArguments, **kwargs: Any) -> Any:
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
        self._trainer.run.host.forget_step()

    def parameters(self, recurse: bool = True) -> Any:
        return self._trainer.model.parameters(recurse)

    def named_parameters(self, *args: TrainingArguments, **kwargs: Any) -> Any:
        return self._trainer.model.named_parameters(*args, **kwargs)
