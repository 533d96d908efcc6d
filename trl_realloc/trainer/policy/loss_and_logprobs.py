"""TRL's loss under a plan: the plan's calls compute its log-probabilities, and the engines train with its gradients.

TRL's loss reads a model only through log-probabilities and entropies. It is computed on leaf tensors with their values
(`EngineLoss`). The gradients of these leaves, the token gradients, are what the engines train with
(`algorithms.trainer_loss`). `StepBuffer` converts between TRL's padded tensors and the engines' samples, and collects
the token gradients of an optimizer step. `ModelInEngine` and `ReferenceInEngine` stand in for the models that are in
engines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ...algorithms.algorithm import TokenLoss
from ...algorithms.rollout import Ragged, Rollouts
from ...algorithms.trainer_loss import ENTROPY_GRADS, LOGPROB_GRADS
from ...plan.algorithm_graphs import ENTROPIES, POLICY_LOGPROBS
from ...plan.dataflow import Role
from ...runtime.call_server import CallServer, KnownOutputs
from ...runtime.calls.training_calls import GRAD_NORM
from ...runtime.process_groups import all_gather_object
from ..checks.config_checks import ConfigError
from .loss_in_engine import (
    MAX_SENT,
    LossInEngine,
    MicroBatch,
    has_entropy_term,
    is_computed_in_engines,
    moving_rows,
    size_of,
)


if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainingArguments


FORWARD, REFERENCE = "actor.forward", "reference.forward"


class EngineLoss:
    """TRL's loss and its training, under one executor.

    Args:
        trainer: a `PlannedPolicyTrainer`.
        calls: runs the calls.

    Attributes:
        step_buffer: micro-batches of the current optimizer step.
        untrained: number of micro-batches whose optimizer step is still to come, or has failed.
    """

    def __init__(self, trainer: Trainer, calls: CallServer) -> None:
        self.trainer, self.calls = trainer, calls
        self.step_buffer = StepBuffer(calls, trainer.accelerator.device)
        self.untrained = 0
        self._leaves: LossInputs | None = None  # leaves of the current micro-batch
        # inputs of the current micro-batch and of the later ones of the same optimizer step
        self._inputs: tuple[Mapping[str, Any], ...] = ()

    @contextlib.contextmanager
    def of_micro_batch(self, inputs: Any) -> Iterator[None]:
        """Context of one TRL loss. With gradients enabled it is the loss of a training micro-batch."""
        if torch.is_grad_enabled():
            self._inputs = (inputs, *self._inputs_after(inputs))
        try:
            yield
        finally:
            self._inputs = ()
            if not torch.is_grad_enabled() and not self.trainer.model.training:
                self.step_buffer.forget_logprobs()  # an evaluation asks for each sample once

    def _inputs_after(self, inputs: Any) -> Sequence[Mapping[str, Any]]:
        """Inputs of the later micro-batches of this optimizer step that are already generated; empty if an earlier
        forward included them."""
        buffer = self.trainer._buffered_inputs or ()
        index = next((i for i, part in enumerate(buffer) if part is inputs), len(buffer))
        if index and len(self.step_buffer):
            return ()
        left = self.trainer.current_gradient_accumulation_steps - len(self.step_buffer) - 1
        return tuple(buffer[index + 1 : index + 1 + left])

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
        """(rows, `logits_to_keep`) log-probabilities and, if requested, entropies, computed by the plan's calls; leaf
        tensors if gradients are enabled."""
        if not self.trainer.placement.started:  # outside of a training
            self.trainer.run.placed.start()
        rows = Rows.of(input_ids, attention_mask, logits_to_keep)
        if isinstance(model, ReferenceInEngine):
            return self.step_buffer.of_reference(rows), None, None
        if not torch.is_grad_enabled():
            logprobs, entropies = self.step_buffer.of_policy(rows)
            return logprobs, entropies if compute_entropy else None, None
        if self._leaves is not None and self.trainer.is_in_train:
            raise ConfigError("compute_loss called _get_per_token_logps_and_entropies twice; call it once.")
        all_rows = [rows, *map(Rows.of_inputs, self._inputs[1:])]
        used = Rollouts()
        if self.trainer.is_in_train and is_computed_in_engines(self.trainer):
            used = self.step_buffer.in_one_pass(self.trainer, self._inputs, all_rows)
            logprobs, entropies = self.step_buffer.padded(rows, used)
        else:
            logprobs, entropies = self.step_buffer.of_policy(rows, all_rows[1:])
        entropies.requires_grad_(has_entropy_term(self.trainer))
        self._leaves = LossInputs(rows, logprobs.requires_grad_(), entropies, used)
        return logprobs, entropies if compute_entropy else None, None

    def backward(self, loss: Tensor) -> None:
        """Collect the token gradients of a micro-batch. Replaces Accelerate's backward."""
        leaves, self._leaves = self._leaves, None
        if leaves is None:
            raise ConfigError(
                "compute_loss did not call _get_per_token_logps_and_entropies, so the plan's engines cannot train."
            )
        loss.backward()  # type: ignore[no-untyped-call]
        accelerator = self.trainer.accelerator
        self.step_buffer.add(leaves, 1 / accelerator.num_processes)
        if accelerator.sync_gradients:
            self.untrained = len(self.step_buffer)

    def train_step(self) -> None:
        """Train on the collected micro-batches. Replaces the optimizer's step, which Trainer calls after the last
        one."""
        start, run, metrics = time.perf_counter(), self.trainer.run, self.trainer._metrics["train"]
        with run.checkpoints.saving_good_state():
            outputs = self.calls.train(self.step_buffer.take(), run.placed.setup.rates.role(Role.ACTOR))
        self.untrained = 0
        if self.trainer.args.skip_nonfinite_updates:
            metrics["skipped_updates/policy"].append(float(not len(outputs)))
        if len(outputs):
            self._grad_norm.fill_(float(outputs.tensor(GRAD_NORM)[0]))
        if times := metrics["step_time"]:
            times[-1] += time.perf_counter() - start  # TRL measures to the end of the last backward

    def grad_norm(self) -> Tensor:
        """The norm of the step's gradient before clipping: a 0-dimensional float64 tensor on the CPU. Trainer asks for
        it before the step, which fills it, and reads it afterwards."""
        self._grad_norm = torch.zeros((), dtype=torch.float64)
        return self._grad_norm

    def forget_step(self) -> None:
        """Forget the token gradients and log-probabilities of an optimizer step."""
        self._leaves = None
        self.step_buffer.forget()
        self.calls.forget_gradients()


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch, without padding.

    Args:
        samples: `prompts` and `responses` of the rows that have a response, int64 on the CPU.
        mask: (rows, width) bool on the CPU; true for response tokens in TRL's tensor.
        spare: one token of the first prompt and one of its response, even if that response is masked.
    """

    samples: Rollouts
    mask: Tensor
    spare: Rollouts

    @staticmethod
    def of(input_ids: Tensor, attention_mask: Tensor, width: int) -> Rows:
        """The rows of TRL's tensors, without padding.

        Args:
            input_ids: (rows, length) prompts, padded on the left, and responses, padded on the right.
            attention_mask: (rows, length); 0 for padding and for masked responses.
            width: number of response columns.
        """
        ids, mask = input_ids.cpu(), attention_mask.cpu().bool()
        columns = {
            "prompts": (ids[:, :-width], mask[:, :-width]),
            "responses": (ids[:, -width:], mask[:, -width:]),
        }
        ragged = {name: Ragged(part[part_mask], part_mask.sum(1)) for name, (part, part_mask) in columns.items()}
        has_response = ragged["responses"].lengths.nonzero()[:, 0]
        first_token = Ragged(ids[:1, -width], torch.ones(1, dtype=torch.long))
        prompt = ragged["prompts"].select([0])
        spare = Rollouts(prompts=prompt.crop(prompt.lengths.clamp(max=1)), responses=first_token)
        return Rows(Rollouts(**ragged).select(has_response), mask[:, -width:], spare)

    @staticmethod
    def of_inputs(inputs: Mapping[str, Any]) -> Rows:
        """The rows of the inputs of TRL's loss, without padding."""
        ids, masks = (
            torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
        )
        return Rows.of(ids, masks, inputs["completion_ids"].size(1))

    @property
    def numbers(self) -> Tensor:
        """(samples,) int64: the row index of each sample."""
        return self.mask.any(1).nonzero()[:, 0]

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
class LossInputs:
    """The tensors that TRL's loss of one micro-batch reads in place of the policy's outputs.

    Args:
        logprobs: (rows, width) float32 leaf that gets a gradient.
        entropies: (rows, width) float32; also a leaf if the loss has an entropy term.
        used: token gradients whose parameter gradients the engines have already added, if any.
    """

    rows: Rows
    logprobs: Tensor
    entropies: Tensor
    used: Rollouts = field(default_factory=Rollouts)


class StepBuffer:
    """The micro-batches of one optimizer step.

    Args:
        calls: runs the policy's forward.
        device: device of TRL's tensors.
    """

    def __init__(self, calls: CallServer, device: torch.device) -> None:
        self.calls, self.device = calls, device
        self._known = KnownOutputs()  # log-probabilities and entropies under the current policy
        # id of a micro-batch's inputs -> the inputs, and the outputs of the pass that added their gradients
        self._passed: dict[int, tuple[Mapping[str, Any], Rollouts]] = {}
        self._grads: list[Rollouts] = []
        self._spare = Rollouts()

    def __len__(self) -> int:
        """The number of micro-batches whose gradients have been collected."""
        return len(self._grads)

    def of_policy(self, rows: Rows, following: Sequence[Rows] = ()) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the rows' responses under the current policy, (rows, width) float32 each.
        All ranks together.

        Args:
            following: micro-batches that will be needed before the policy changes; computed in the same forward.
        """
        samples = Rollouts.cat([part.samples for part in (rows, *following)])
        outputs = self._known.complete(samples, lambda missing: self.calls.forward(FORWARD, missing))
        return self.padded(rows, outputs.select(range(len(rows.samples))))

    def padded(self, rows: Rows, outputs: Rollouts) -> tuple[Tensor, Tensor]:
        """The outputs for the rows' samples as (rows, width) float32 log-probabilities and entropies."""
        if not len(rows.samples):
            nothing = rows.padded(Ragged.of([], torch.float32), self.device)
            return nothing, nothing.clone()
        columns = (outputs.ragged(name) for name in (POLICY_LOGPROBS, ENTROPIES))
        logprobs, entropies = (rows.padded(column, self.device) for column in columns)
        return logprobs, entropies

    def in_one_pass(self, trainer: Trainer, inputs: Sequence[Mapping[str, Any]], rows: Sequence[Rows]) -> Rollouts:
        """Log-probabilities and entropies of a training micro-batch's samples. If they are not cached, the same pass
        also adds the micro-batch's gradients, and the token gradients it used are returned too. All ranks together.

        There are no token gradients if all ranks' micro-batches together exceed `MAX_SENT` bytes, or if the micro-batch
        occurs again in the optimizer step: its gradients are then computed with the step.

        Args:
            inputs: inputs of TRL's loss for the micro-batch, and for later ones that will be needed before the policy
                changes and share the pass.
            rows: rows of each micro-batch in `inputs`.
        """
        samples = Rollouts.cat([part.samples for part in rows])
        is_known = id(inputs[0]) in self._passed or self._known.has(samples)
        local_batches = [] if is_known else list(zip(inputs, rows, strict=True))
        control = self.calls.executor.placement.control
        sizes = all_gather_object(None if is_known else sum(map(size_of, inputs)), control)
        if control is not None and sum(size or 0 for size in sizes) > MAX_SENT:
            self._known.complete(samples, lambda missing: self.calls.forward(FORWARD, missing))
        elif any(size is not None for size in sizes):
            self._pass_all(trainer, local_batches)
        if id(inputs[0]) not in self._passed:
            return self._known.complete(rows[0].samples, lambda nothing: Rollouts())
        cached_inputs, outputs = self._passed[id(inputs[0])]
        names = (POLICY_LOGPROBS, ENTROPIES) if len(outputs) else ()
        self._passed[id(inputs[0])] = cached_inputs, outputs.only(names)
        return outputs

    def _pass_all(self, trainer: Trainer, local_batches: Sequence[tuple[Mapping[str, Any], Rows]]) -> None:
        """Compute the outputs of all ranks' micro-batches, and add their gradients."""
        control = self.calls.executor.placement.control
        moving = [moving_rows(trainer, inputs)[rows.numbers] for inputs, rows in local_batches]
        micro_batches = [
            MicroBatch.of(inputs, rows.numbers[moves].tolist(), is_sent=control is not None)
            for (inputs, rows), moves in zip(local_batches, moving, strict=True)
        ]
        of_all = [micro for rank_values in all_gather_object(micro_batches, control) for micro in rank_values]
        self._pass(local_batches, moving, LossInEngine(trainer, of_all), any(micro.rows for micro in of_all))

    def _pass(
        self,
        local_batches: Sequence[tuple[Mapping[str, Any], Rows]],
        moving: Sequence[Tensor],
        loss: TokenLoss,
        moves_any: bool,
    ) -> None:
        """Compute the outputs of this rank's micro-batches, and add the gradients of samples that may have one.

        Args:
            moving: (samples,) bool for each micro-batch; true for samples that may have a gradient.
            moves_any: whether any rank has such a sample.
        """
        still, moved = (
            Rollouts.cat([rows.samples.select((moves == of_moving).nonzero()[:, 0]) for (_, rows), moves in parts])
            for of_moving in (False, True)
            for parts in [list(zip(local_batches, moving, strict=True))]
        )
        outputs = self.calls.forward(FORWARD, still, trained=False)
        if len(outputs):
            column = outputs.ragged(POLICY_LOGPROBS)
            outputs = outputs.plus(**{LOGPROB_GRADS: column.like(torch.zeros_like(column.values))})
        moved_outputs = self.calls.add_gradients(moved, loss) if moves_any else Rollouts()
        outputs = Rollouts.cat([outputs, moved_outputs])
        next_place = {True: len(still), False: 0}
        for (inputs, _), moves in zip(local_batches, moving, strict=True):
            places = []
            for moved_one in moves.tolist():
                places.append(next_place[moved_one])
                next_place[moved_one] += 1
            self._passed[id(inputs)] = inputs, outputs.select(places)

    def of_reference(self, rows: Rows) -> Tensor:
        """Log-probabilities of the rows' responses under the reference, (rows, width) float32. All ranks together."""
        outputs = self.calls.forward(REFERENCE, rows.samples)
        column = outputs.ragged("ref_logprobs") if len(outputs) else Ragged.of([], torch.float32)
        return rows.padded(column, self.device)

    def add(self, leaves: LossInputs, scale: float) -> None:
        """Collect the gradients of a micro-batch.

        Args:
            scale: factor of the gradients; 1 / number of processes, because losses are averaged over processes.
        """
        rows, tensors = leaves.rows, {LOGPROB_GRADS: leaves.logprobs}
        if leaves.entropies.requires_grad:
            tensors[ENTROPY_GRADS] = leaves.entropies
        columns = {
            name: rows.unpadded(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad * scale)
            for name, leaf in tensors.items()
        }
        for name in columns.keys() & set(leaves.used):
            columns[name] = columns[name].like(columns[name].values - leaves.used.ragged(name).values)
        self._grads.append(rows.samples.plus(**columns))
        zero = Ragged(torch.zeros(1), torch.ones(1, dtype=torch.long))
        self._spare = rows.spare.plus(**dict.fromkeys(tensors, zero))

    def take(self) -> Rollouts:
        """The samples of the optimizer step with their token gradients, minus those whose parameter gradients the
        engines have already added. Cached outputs of the policy are forgotten.

        If no token gradient is left, returns one sample whose token gradients are 0, so that the optimizer still steps
        on gradients that were already added, momentum and weight decay."""
        samples = Rollouts.cat(self._grads)
        names = [name for name in (LOGPROB_GRADS, ENTROPY_GRADS) if name in samples]
        has_grads = any(bool((samples.ragged(name).values != 0).any()) for name in names)
        samples = samples if has_grads else self._spare
        self.forget()
        return samples

    def forget(self) -> None:
        """Forget token gradients and log-probabilities: the policy has changed, or a step was abandoned."""
        self._grads, self._passed = [], {}
        self.forget_logprobs()

    def forget_logprobs(self) -> None:
        """Forget the policy's log-probabilities and entropies."""
        self._known.forget()


class ReferenceInEngine(nn.Module):
    """Placeholder for the reference model in TRL's code. The model is in an engine."""

    def forward(self, *args: TrainingArguments, **kwargs: Any) -> NoReturn:
        """Raises `ConfigError`: only the plan's engine runs the reference."""
        raise ConfigError(
            "ref_model is in an engine of the plan; get its log-probabilities from "
            "trainer._get_per_token_logps_and_entropies(trainer.ref_model, ...)."
        )


class ModelInEngine(nn.Module):
    """Placeholder for the wrapped model in Trainer's loop. Forwards and missing attributes go to the trainer's current
    module; the engine computes gradients."""

    _trainer: Trainer

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.__dict__["_trainer"] = trainer  # not a submodule

    def forward(self, *args: TrainingArguments, **kwargs: Any) -> Any:
        """Run the trainer's current module without gradients.

        Raises:
            ConfigError: gradients are enabled in training, where the engines would not see them.
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
        """Forget the collected token gradients of an optimizer step. Trainer calls this before the first step and after
        each."""
        self._trainer.run.adapter.forget_step()

    def parameters(self, recurse: bool = True) -> Any:
        return self._trainer.model.parameters(recurse)

    def named_parameters(self, *args: TrainingArguments, **kwargs: Any) -> Any:
        return self._trainer.model.named_parameters(*args, **kwargs)
