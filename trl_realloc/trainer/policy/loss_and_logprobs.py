"""TRL's loss under a plan: its log-probabilities come from the plan's calls, and the engines train by its gradients.

TRL's loss reads a model through its log-probabilities and entropies alone, so it is computed on leaf tensors with their
values (`EngineLoss`), and their gradients, the slopes, are what the engines train with (`algorithms.linear_loss`).
`Window` is between TRL's padded tensors and the samples of the engines, and collects the slopes of an optimizer step.
`ModelInEngine` and `ReferenceInEngine` stand in TRL's and Trainer's code for models that are in engines.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ...algorithms.algorithm import TokenLoss
from ...algorithms.linear_loss import ENTROPY_SLOPES, LOGPROB_SLOPES
from ...algorithms.rollout import Ragged, Rollouts
from ...plan.algorithm_graphs import ENTROPIES, POLICY_LOGPROBS
from ...plan.dataflow import Role
from ...runtime.calls.training_calls import GRAD_NORM
from ...runtime.host_calls import HostCalls, KnownOutputs
from ...runtime.process_groups import from_every_rank
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
        # its inputs, and those of the micro-batches of the same optimizer step after it
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
                self.window.forget_logprobs()  # of an evaluation, which asks for each sample once

    def _inputs_after(self, inputs: Any) -> Sequence[Mapping[str, Any]]:
        """The inputs of the micro-batches of the same optimizer step that have been generated already; none where a
        forward for an earlier one had them."""
        buffer = self.trainer._buffered_inputs or ()
        at = next((i for i, part in enumerate(buffer) if part is inputs), len(buffer))
        if at and len(self.window):
            return ()
        left = self.trainer.current_gradient_accumulation_steps - len(self.window) - 1
        return tuple(buffer[at + 1 : at + 1 + left])

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
        if not torch.is_grad_enabled():
            logprobs, entropies = self.window.of_policy(rows)
            return logprobs, entropies if compute_entropy else None, None
        if self._leaves is not None and self.trainer.is_in_train:
            raise ConfigError("the loss of a micro-batch asks for the policy's log-probabilities twice; ask once.")
        all_rows = [rows, *map(Rows.of_inputs, self._inputs[1:])]
        used = Rollouts()
        if self.trainer.is_in_train and is_computed_in_engines(self.trainer):
            used = self.window.in_one_pass(self.trainer, self._inputs, all_rows)
            logprobs, entropies = self.window.padded(rows, used)
        else:
            logprobs, entropies = self.window.of_policy(rows, all_rows[1:])
        entropies.requires_grad_(has_entropy_term(self.trainer))
        self._leaves = Leaves(rows, logprobs.requires_grad_(), entropies, used)
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
        self.calls.forget_gradients()


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch, without padding.

    Args:
        samples: `prompts` and `responses` of the rows that have a response, int64 on the CPU.
        mask: (rows, width) bool on the CPU: the tokens of the responses in TRL's tensor.
        spare: a token of the first prompt and one of its response, whether it is left out or not.
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
        prompt = ragged["prompts"].select([0])
        spare = Rollouts(prompts=prompt.crop(prompt.lengths.clamp(max=1)), responses=one)
        return Rows(Rollouts(**ragged).select(has_response), mask[:, -width:], spare)

    @staticmethod
    def of_inputs(inputs: Mapping[str, Any]) -> Rows:
        """The rows of the inputs of TRL's loss."""
        ids, masks = (
            torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
        )
        return Rows.of(ids, masks, inputs["completion_ids"].size(1))

    @property
    def numbers(self) -> Tensor:
        """(samples,) int64: the row of each sample."""
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
class Leaves:
    """The tensors that TRL's loss of one micro-batch reads in place of the policy's outputs.

    Args:
        logprobs: (rows, width) float32; a leaf that gets a gradient.
        entropies: (rows, width) float32; a leaf too where the loss has an entropy term.
        used: the slopes by which the engines have added gradients already, if they have.
    """

    rows: Rows
    logprobs: Tensor
    entropies: Tensor
    used: Rollouts = field(default_factory=Rollouts)


class Window:
    """The micro-batches of one optimizer step.

    Args:
        calls: runs the forward of the policy.
        device: of TRL's tensors.
    """

    def __init__(self, calls: HostCalls, device: torch.device) -> None:
        self.calls, self.device = calls, device
        self._known = KnownOutputs()  # log-probabilities and entropies under the policy as it is
        # by the identity of a micro-batch's inputs: these, and the outputs of the pass that has added its gradients
        self._passed: dict[int, tuple[Mapping[str, Any], Rollouts]] = {}
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
        return self.padded(rows, known.select(range(len(rows.samples))))

    def padded(self, rows: Rows, outputs: Rollouts) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, (rows, width) float32 each, of the outputs for the rows' samples."""
        if not len(rows.samples):
            nothing = rows.padded(Ragged.of([], torch.float32), self.device)
            return nothing, nothing.clone()
        columns = (outputs.ragged(name) for name in (POLICY_LOGPROBS, ENTROPIES))
        logprobs, entropies = (rows.padded(column, self.device) for column in columns)
        return logprobs, entropies

    def in_one_pass(self, trainer: Trainer, inputs: Sequence[Mapping[str, Any]], rows: Sequence[Rows]) -> Rollouts:
        """Log-probabilities and entropies of the samples of a micro-batch of the training, and where these are not
        known, the slopes by which the engines have added its gradients in the same pass. All ranks together.

        There are no slopes if all ranks' micro-batches together exceed `MAX_SENT` bytes, or if the micro-batch occurs
        again in the optimizer step: its gradients are then computed with the step.

        Args:
            inputs: of TRL's loss: of the micro-batch, and of those that will be asked for before the policy changes,
                which are in the same pass.
            rows: of each of them.
        """
        samples = Rollouts.cat([each.samples for each in rows])
        is_known = id(inputs[0]) in self._passed or self._known.has(samples)
        own = [] if is_known else list(zip(inputs, rows, strict=True))
        control = self.calls.executor.placement.control
        sizes = from_every_rank(None if is_known else sum(map(size_of, inputs)), control)
        if control is not None and sum(size or 0 for size in sizes) > MAX_SENT:
            self._known.complete(samples, lambda missing: self.calls.forward(FORWARD, missing))
        elif any(size is not None for size in sizes):
            self._pass_all(trainer, own)
        if id(inputs[0]) not in self._passed:
            return self._known.complete(rows[0].samples, lambda nothing: Rollouts())
        given, outputs = self._passed[id(inputs[0])]
        names = (POLICY_LOGPROBS, ENTROPIES) if len(outputs) else ()
        self._passed[id(inputs[0])] = given, outputs.only(names)
        return outputs

    def _pass_all(self, trainer: Trainer, own: Sequence[tuple[Mapping[str, Any], Rows]]) -> None:
        """Compute the outputs of micro-batches of all ranks, and add their gradients.

        Args:
            own: of this rank: the inputs of TRL's loss, and the rows.
        """
        control = self.calls.executor.placement.control
        moving = [moving_rows(trainer, given)[each.numbers] for given, each in own]
        micro_batches = [
            MicroBatch.of(given, each.numbers[moves].tolist(), is_sent=control is not None)
            for (given, each), moves in zip(own, moving, strict=True)
        ]
        of_all = [micro for of_rank in from_every_rank(micro_batches, control) for micro in of_rank]
        self._pass(own, moving, LossInEngine(trainer, of_all), any(micro.rows for micro in of_all))

    def _pass(
        self, own: Sequence[tuple[Mapping[str, Any], Rows]], moving: Sequence[Tensor], loss: TokenLoss, moves_any: bool
    ) -> None:
        """Compute the outputs of micro-batches, and add the gradients of those of their samples that have some.

        Args:
            moving: of each micro-batch (samples,) bool: those that may have a gradient.
            moves_any: there is such a sample on some rank.
        """
        still, moved = (
            Rollouts.cat([rows.samples.select((moves == of_moving).nonzero()[:, 0]) for (_, rows), moves in parts])
            for of_moving in (False, True)
            for parts in [list(zip(own, moving, strict=True))]
        )
        outputs = self.calls.forward(FORWARD, still, trained=False)
        if len(outputs):
            column = outputs.ragged(POLICY_LOGPROBS)
            outputs = outputs.plus(**{LOGPROB_SLOPES: column.like(torch.zeros_like(column.values))})
        made = self.calls.add_gradients(moved, loss) if moves_any else Rollouts()
        outputs = Rollouts.cat([outputs, made])
        at = {True: len(still), False: 0}
        for (inputs, _), moves in zip(own, moving, strict=True):
            places = []
            for moved_one in moves.tolist():
                places.append(at[moved_one])
                at[moved_one] += 1
            self._passed[id(inputs)] = inputs, outputs.select(places)

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
        for name in columns.keys() & set(leaves.used):
            columns[name] = columns[name].like(columns[name].values - leaves.used.ragged(name).values)
        self._slopes.append(rows.samples.plus(**columns))
        zero = Ragged(torch.zeros(1), torch.ones(1, dtype=torch.long))
        self._spare = rows.spare.plus(**dict.fromkeys(tensors, zero))

    def take(self) -> Rollouts:
        """The samples of the optimizer step with their slopes, without those by which the engines have added gradients.
        What is known of the policy is forgotten.

        If no slope is left, there is one sample whose slopes are 0: the optimizer still makes its step, with the
        gradients that are there, and changes weights by momentum and weight decay.
        """
        samples = Rollouts.cat(self._slopes)
        names = [name for name in (LOGPROB_SLOPES, ENTROPY_SLOPES) if name in samples]
        has_slopes = any(bool((samples.ragged(name).values != 0).any()) for name in names)
        samples = samples if has_slopes else self._spare
        self.forget()
        return samples

    def forget(self) -> None:
        """Forget slopes and log-probabilities: the policy has changed, or a step was abandoned."""
        self._slopes, self._passed = [], {}
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
