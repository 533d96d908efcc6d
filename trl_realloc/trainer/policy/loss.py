"""TRL's loss under a plan, on leaf tensors with the log-probabilities and entropies that the plan's calls compute.

The gradients of the leaves, the token gradients, are what the engines train with (`algorithms.trainer_loss`).
`EngineLoss` runs for TRL's loop. `LossInEngine` is the same loss inside the engines, which then compute
log-probabilities and gradients in one pass. `step_buffer` has the micro-batches of an optimizer step."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ...algorithms.rollout import Ragged, Rollouts, on_device
from ...algorithms.router_loss import ROUTER_COUNTS, ROUTER_PROBS, balance_loss, over_samples
from ...algorithms.trainer_loss import ENTROPY_GRADS, LOGPROB_GRADS, LinearLoss
from ...engines.training.expert_routing import experts_per_token
from ...plan.algorithm_graphs import ENTROPIES, POLICY_LOGPROBS
from ...plan.dataflow import Role
from ...runtime.call_server import CallServer
from ...runtime.calls.training_calls import GRAD_NORM
from ..checks.config_checks import ConfigError
from ..checks.trainable import users_method
from ..trl_compat import is_scaled_for_accumulation
from .sampled_routes import SampledRoutes
from .step_buffer import LossBatch, MicroBatch, Rows, StepBuffer


if TYPE_CHECKING:
    from transformers import Trainer


REFERENCE = "reference.forward"
_METHODS = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies")


class EngineLoss:
    """TRL's loss and its training, under one executor.

    Args:
        trainer: a `PlannedPolicyTrainer`.
        calls: runs the calls.
        routes: experts of the completions.

    Attributes:
        step_buffer: micro-batches of the current optimizer step.
        untrained: number of micro-batches whose optimizer step is still to come, or has failed.
    """

    def __init__(self, trainer: Trainer, calls: CallServer, routes: SampledRoutes) -> None:
        self.trainer, self.calls, self._routes = trainer, calls, routes
        self.step_buffer = StepBuffer(calls)
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
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *_: Any,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **__: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(rows, `logits_to_keep`) log-probabilities and, if requested, entropies and the auxiliary loss of a mixture
        of experts over these rows, computed by the plan's calls; leaf tensors if gradients are enabled."""
        if not self.trainer.placement.started:  # outside of a training
            self.trainer.run.placed.start()
        keeps_all = has_router_loss(self.trainer) and not isinstance(model, ReferenceInEngine)
        rows = Rows.of(input_ids, attention_mask, logits_to_keep, all_rows=keeps_all)
        device = self.trainer.accelerator.device
        if isinstance(model, ReferenceInEngine):
            outputs = self.calls.forward(REFERENCE, rows.samples)
            return rows.padded(outputs, "ref_logprobs", device), None, None
        trains = torch.is_grad_enabled()
        if trains and self._leaves is not None and self.trainer.is_in_train:
            raise ConfigError("compute_loss called _get_per_token_logps_and_entropies twice; call it once.")
        later = self._inputs[1:] if trains else ()
        all_rows = [rows, *(Rows.of_inputs(inputs, all_rows=keeps_all) for inputs in later)]
        all_rows = [replace(part, samples=self._routes.attach(part.samples)) for part in all_rows]
        rows = all_rows[0]
        if trains and self.trainer.is_in_train and is_computed_in_engines(self.trainer):
            micro_batches = [
                MicroBatch(inputs, part, rows_with_grad(self.trainer, inputs)[part.numbers])
                for inputs, part in zip(self._inputs, all_rows, strict=True)
            ]
            outputs = self.step_buffer.forward_backward(micro_batches, partial(LossInEngine, self.trainer))
        else:
            outputs = self.step_buffer.forward(all_rows)
        self._routes.record(rows.samples, outputs)
        logprobs, entropies = (rows.padded(outputs, name, device) for name in (POLICY_LOGPROBS, ENTROPIES))
        router_loss = None
        if compute_aux_loss:
            counts, probs = (over_samples(outputs.ragged(name)) for name in (ROUTER_COUNTS, ROUTER_PROBS))
            router_loss = balance_loss(counts, probs, self._top_k).to(device)
        if trains:
            entropies.requires_grad_(has_entropy_term(self.trainer))
            router_loss = router_loss if router_loss is None else router_loss.requires_grad_()
            self._leaves = LossInputs(rows, logprobs.requires_grad_(), entropies, outputs, router_loss)
        return logprobs, entropies if compute_entropy else None, router_loss

    @property
    def _top_k(self) -> int:
        return experts_per_token(self.trainer.model.config)

    def backward(self, loss: Tensor) -> None:
        """Collect the token gradients of a micro-batch. Replaces Accelerate's backward."""
        leaves, self._leaves = self._leaves, None
        if leaves is None:
            raise ConfigError(
                "compute_loss did not call _get_per_token_logps_and_entropies, so the plan's engines cannot train."
            )
        loss.backward()  # type: ignore[no-untyped-call]
        accelerator = self.trainer.accelerator
        scale = 1 / accelerator.num_processes  # losses are averaged over processes
        self.step_buffer.add(leaves.token_grads(scale), leaves.rows.spare)
        if leaves.router_loss is not None and leaves.router_loss.grad is not None:
            self.step_buffer.add_router_loss(float(leaves.router_loss.grad) * scale, self._top_k)
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
class LossInputs:
    """The tensors that TRL's loss of one micro-batch reads in place of the policy's outputs.

    Args:
        logprobs: (rows, width) float32 leaf that gets a gradient.
        entropies: (rows, width) float32; also a leaf if the loss has an entropy term.
        outputs: outputs for the samples of the rows, with the token gradients whose parameter gradients the engines
            have already added, if any.
        router_loss: the auxiliary loss of the rows, a leaf; `None` without one.
    """

    rows: Rows
    logprobs: Tensor
    entropies: Tensor
    outputs: Rollouts
    router_loss: Tensor | None = None

    def token_grads(self, scale: float) -> Rollouts:
        """The samples of the rows with the gradients of the leaves times `scale`, minus the token gradients of
        `outputs`; with an auxiliary loss also the counts of their experts."""
        columns: dict[str, Ragged] = {}
        if self.router_loss is not None:
            columns[ROUTER_COUNTS] = self.outputs.ragged(ROUTER_COUNTS)
        for name, leaf in ((LOGPROB_GRADS, self.logprobs), (ENTROPY_GRADS, self.entropies)):
            if not leaf.requires_grad:
                continue
            column = self.rows.unpadded(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad * scale)
            if name in self.outputs:
                column = column.like(column.values - self.outputs.ragged(name).values)
            columns[name] = column
        return self.rows.samples.plus(**columns)


def is_computed_in_engines(trainer: Trainer) -> bool:
    """True if the engines compute the loss. Not for a user's loss, which would run more often than its author expects,
    nor with `top_entropy_quantile`, whose threshold needs the entropies of all processes, nor with an auxiliary loss,
    whose gradient needs the experts of all tokens of the optimizer step."""
    needs_all = getattr(trainer, "top_entropy_quantile", 1.0) != 1.0 or has_router_loss(trainer)
    return users_method(type(trainer), _METHODS) is None and not needs_all


def has_router_loss(trainer: Trainer) -> bool:
    """True if the loss has the auxiliary loss of a mixture of experts."""
    return bool(getattr(trainer, "aux_loss_enabled", False))


def has_entropy_term(trainer: Trainer) -> bool:
    """True if the loss depends on the entropies."""
    return bool(getattr(trainer, "_entropy_bonus_enabled", False))


def rows_with_grad(trainer: Trainer, inputs: Mapping[str, Any]) -> Tensor:
    """(rows,) bool on the CPU: rows of a micro-batch that may have a gradient. The others have zero advantage, and the
    loss has no other term."""
    advantages = inputs["advantages"].cpu()
    if trainer.beta or has_entropy_term(trainer):
        return torch.ones(len(advantages), dtype=torch.bool)
    has_grad: Tensor = (advantages.reshape(len(advantages), -1) != 0).any(1)
    return has_grad


class LossInEngine:
    """TRL's loss of an optimizer step's micro-batches as a `TokenLoss`. Its statistics are values of response tokens:
    log-probabilities, entropies and token gradients.

    The loss of some rows of a micro-batch is computed on leaf tensors that are 0 in the other rows. The token gradients
    equal those of the whole micro-batch if the loss is a sum over rows, weighted from the masks of all rows. All of
    TRL's losses are. `EngineLoss` computes the loss again from the log-probabilities of all rows, and trains on the
    difference of the token gradients. A loss that is not such a sum only costs time.

    Args:
        trainer: this rank's trainer; settings are the same on all ranks.
        batches: micro-batches of all ranks in rank order. The samples' `index` counts their `rows`.
    """

    def __init__(self, trainer: Trainer, batches: Sequence[LossBatch]) -> None:
        self._trainer, self._batches = trainer, batches
        self._places = [(i, row) for i, batch in enumerate(batches) for row in batch.rows]
        self._scale = 1 / trainer.accelerator.num_processes
        self._names = (LOGPROB_GRADS, ENTROPY_GRADS) if has_entropy_term(trainer) else (LOGPROB_GRADS,)

    def __call__(self, outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        lengths = outputs["logprobs"].lengths
        detached = {POLICY_LOGPROBS: outputs["logprobs"].values.detach(), ENTROPIES: outputs["entropy"].values.detach()}
        # (micro-batch, row, position in `samples`) of each sample
        numbers = samples.tensor("index").tolist()
        places = sorted((*self._places[number], position) for position, number in enumerate(numbers))
        order = [position for _, _, position in places]
        grads: list[list[Tensor]] = []  # of each micro-batch, for each of `_names`
        for i, batch_places in groupby(places, key=itemgetter(0)):
            _, rows, positions = zip(*batch_places, strict=True)
            values = [Ragged(column, lengths).select(positions).values for column in detached.values()]
            grads.append(self._grads(self._batches[i], rows, values))
        columns = {
            name: Ragged(torch.cat(parts), lengths[order]).select(torch.tensor(order).argsort())
            for name, parts in zip(self._names, zip(*grads, strict=True), strict=True)
        }
        token_grads = {name: column.values for name, column in columns.items()}
        return LinearLoss()(outputs, samples.plus(**columns))[0], detached | token_grads

    def _grads(self, batch: LossBatch, rows: Sequence[int], values: Sequence[Tensor]) -> list[Tensor]:
        """The token gradients of the tokens of some rows, concatenated, (tokens,) for each of `_names`.

        Args:
            rows: ascending indices.
            values: log-probabilities and entropies of these tokens.
        """
        chosen = torch.zeros_like(batch.mask)
        chosen[list(rows)] = batch.mask[list(rows)]
        device = values[0].device
        places = on_device(chosen.flatten().nonzero()[:, 0], device)
        logprobs, entropies = (
            torch.zeros(chosen.numel(), dtype=part.dtype, device=device).index_put((places,), part).view(chosen.shape)
            for part in values
        )
        needed = [logprobs, entropies][: len(self._names)]
        inputs = {name: value.to(device) for name, value in batch.inputs.items()}
        forced = self._trainer.run.adapter.forced
        with torch.enable_grad(), forced.of_loss(inputs):
            for leaf in needed:
                leaf.requires_grad_()
            outputs = forced.zeroed(logprobs), forced.zeroed(entropies), None
            trainer: Any = _TrainerInEngine(self._trainer, outputs)
            loss = trainer._trl._compute_loss(trainer, trainer.model, inputs)
            if not is_scaled_for_accumulation(trainer):  # as Trainer does
                loss = loss / trainer.current_gradient_accumulation_steps
            gradients = torch.autograd.grad(loss, needed, allow_unused=True, materialize_grads=True)
        return [gradient.flatten()[places] * self._scale for gradient in gradients]


class _TrainerInEngine:
    """The `self` of TRL's `_compute_loss` inside an engine. The loss reads the trainer's settings through it, and gets
    `outputs` as the policy's. The metrics and attributes that it sets stay here, and it calls no collective."""

    def __init__(self, trainer: Trainer, outputs: tuple[Tensor, Tensor, None]) -> None:
        self._real_trainer, self._outputs = trainer, outputs
        self.accelerator, self.model = _LocalAccelerator(trainer.accelerator), SimpleNamespace(training=True)
        self._metrics = defaultdict[str, defaultdict[str, list[float]]](lambda: defaultdict(list))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real_trainer, name)

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self._outputs


class _LocalAccelerator:
    """An accelerator for a loss that only this rank computes: `gather` adds no other rank's numbers, and the optimizer
    step goes on."""

    sync_gradients = False

    def __init__(self, accelerator: Any) -> None:
        self.num_processes, self.device = accelerator.num_processes, accelerator.device

    def gather(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    gather_for_metrics = reduce = pad_across_processes = gather


class ReferenceInEngine(nn.Module):
    """Placeholder for the reference model in TRL's code. The model is in an engine."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the collected token gradients of an optimizer step. Trainer calls this before the first step and after
        each."""
        self._trainer.run.adapter.forget_step()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self._trainer.model.named_parameters(*args, **kwargs)
