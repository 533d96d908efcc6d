"""`StepBuffer`: the micro-batches of one optimizer step, as samples with outputs and token gradients.

`Rows` converts between TRL's padded tensors and the engines' samples. The loss itself is in `loss`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...algorithms.algorithm import TokenLoss
from ...algorithms.rollout import Ragged, Rollouts
from ...algorithms.router_loss import ROUTER_COUNTS, ROUTER_GRADS, balance_grads, over_samples, with_router_grads
from ...algorithms.trainer_loss import ENTROPY_GRADS, LOGPROB_GRADS
from ...plan.algorithm_graphs import ENTROPIES, POLICY_LOGPROBS
from ...runtime.call_server import CallServer
from ...runtime.process_groups import all_gather_object
from ...runtime.samples.known_outputs import KnownOutputs


FORWARD = "actor.forward"
MAX_SENT = 1 << 28  # maximum bytes of all ranks' micro-batches, which every rank receives


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch, without padding.

    Args:
        samples: `prompts` and `responses` of the kept rows, int64 on the CPU.
        kept: (rows,) bool on the CPU; the rows that have a response, or all.
        mask: (rows, width) bool on the CPU; true for response tokens in TRL's tensor.
        spare: one token of the first prompt and one of its response, even if that response is masked.
    """

    samples: Rollouts
    kept: Tensor
    mask: Tensor
    spare: Rollouts

    @staticmethod
    def of(input_ids: Tensor, attention_mask: Tensor, width: int, *, all_rows: bool = False) -> Rows:
        """The rows of TRL's tensors, without padding.

        Args:
            input_ids: (rows, length) prompts, padded on the left, and responses, padded on the right.
            attention_mask: (rows, length); 0 for padding and for masked responses.
            width: number of response columns.
            all_rows: keep also the rows without a response, whose prompts count in the auxiliary loss.
        """
        ids, mask = input_ids.cpu(), attention_mask.cpu().bool()
        parts = {"prompts": slice(None, -width), "responses": slice(-width, None)}
        ragged = {name: Ragged(ids[:, part][mask[:, part]], mask[:, part].sum(1)) for name, part in parts.items()}
        kept = (ragged["responses"].lengths > 0) | all_rows
        first_token = Ragged(ids[:1, -width], torch.ones(1, dtype=torch.long))
        prompt = ragged["prompts"].select([0])
        spare = Rollouts(prompts=prompt.crop(prompt.lengths.clamp(max=1)), responses=first_token)
        return Rows(Rollouts(**ragged).select(kept.nonzero()[:, 0]), kept, mask[:, -width:], spare)

    @staticmethod
    def of_inputs(inputs: Mapping[str, Any], *, all_rows: bool = False) -> Rows:
        """The rows of the inputs of TRL's loss, without padding."""
        ids, masks = (
            torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
        )
        return Rows.of(ids, masks, inputs["completion_ids"].size(1), all_rows=all_rows)

    @property
    def numbers(self) -> Tensor:
        """(samples,) int64: the row index of each sample."""
        return self.kept.nonzero()[:, 0]

    def padded(self, outputs: Rollouts, name: str, device: torch.device) -> Tensor:
        """(rows, width): the column `name` of the samples' outputs, 0 where there is no response token."""
        column = outputs.ragged(name) if len(outputs) else Ragged.of([], torch.float32)
        out = torch.zeros(self.mask.shape, dtype=column.values.dtype)
        out[self.mask] = column.values
        return out.to(device)

    def unpadded(self, tensor: Tensor) -> Ragged:
        """The values of the response tokens in a (rows, width) tensor, a row per sample."""
        return Ragged(tensor.detach().cpu()[self.mask], self.mask.sum(1)[self.kept])


@dataclass
class MicroBatch:
    """A training micro-batch of this rank.

    Args:
        inputs: inputs of TRL's loss.
        rows: its rows, without padding.
        may_have_grad: (samples,) bool on the CPU; false for samples whose gradient is certainly 0.
        outputs: log-probabilities and entropies, if computed with the gradients; until first used, also the token
            gradients.
    """

    inputs: Mapping[str, Any]
    rows: Rows
    may_have_grad: Tensor
    outputs: Rollouts = field(default_factory=Rollouts)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors among the inputs."""
        return sum(value.nbytes for value in self.inputs.values() if isinstance(value, Tensor))


@dataclass(frozen=True)
class LossBatch:
    """The part of one rank's micro-batch that the loss in an engine reads.

    Args:
        inputs: TRL's tensors, with `completion_mask` in place of the token ids, which the loss does not read; empty
            without `rows`.
        mask: (rows, width) bool on the CPU; true for response tokens; empty without `rows`.
        rows: ascending indices of the rows whose samples the engines get.
    """

    inputs: Mapping[str, Tensor]
    mask: Tensor
    rows: Sequence[int]

    @staticmethod
    def of(micro_batch: MicroBatch, *, is_sent: bool) -> LossBatch:
        """The micro-batch's tensors and its samples that may have a gradient; in host memory if it `is_sent`."""
        rows = micro_batch.rows.numbers[micro_batch.may_have_grad].tolist()
        if not rows:
            return LossBatch({}, torch.empty(0, 0, dtype=torch.bool), rows)
        mask = micro_batch.inputs["completion_mask"]
        inputs = {name: value for name, value in micro_batch.inputs.items() if isinstance(value, Tensor)}
        inputs |= {"prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0], "completion_ids": mask}
        # copies of what is sent, because a view is sent with all that it is a view of
        if is_sent:
            inputs = {name: value.detach().to("cpu", copy=True) for name, value in inputs.items()}
        return LossBatch(inputs, micro_batch.rows.mask.clone(), rows)


MakeLoss = Callable[[Sequence[LossBatch]], TokenLoss]  # from the micro-batches of all ranks, in rank order


class StepBuffer:
    """The micro-batches of one optimizer step: the policy's outputs for their samples, and their token gradients.

    Args:
        calls: runs the calls of the policy.
    """

    def __init__(self, calls: CallServer) -> None:
        self.calls = calls
        self._known = KnownOutputs()  # outputs of forwards under the current policy
        self._computed: list[MicroBatch] = []  # those whose gradients the engines have added
        self._grads: list[Rollouts] = []
        self._spare = Rollouts()
        self._router_weight: float | None = None
        self._top_k = 0

    def __len__(self) -> int:
        """The number of micro-batches whose token gradients have been collected."""
        return len(self._grads)

    def forward(self, rows: Sequence[Rows]) -> Rollouts:
        """Log-probabilities and entropies of the first micro-batch's samples under the current policy. The same forward
        computes later ones, which will be needed before the policy changes. All ranks together."""
        samples = Rollouts.cat([part.samples for part in rows])
        outputs = self._known.complete(samples, partial(self.calls.forward, FORWARD))
        return outputs.select(range(len(rows[0].samples)))

    def forward_backward(self, micro_batches: Sequence[MicroBatch], make_loss: MakeLoss) -> Rollouts:
        """Log-probabilities and entropies of the first micro-batch's samples. If they are not cached, the same pass
        also adds the gradients of the micro-batches, and the outputs include the token gradients that it used. All
        ranks together.

        There are no token gradients if all ranks' micro-batches together exceed `MAX_SENT` bytes, or if the micro-batch
        occurs again in the optimizer step: its gradients are then computed with the step.

        Args:
            micro_batches: the micro-batch, and later ones that will be needed before the policy changes.
            make_loss: makes the loss; its samples' `index` counts the `rows` of all `LossBatch`.
        """
        first = micro_batches[0]
        is_cached = self._computed_one(first) is not None
        is_cached = is_cached or all(self._known.has(micro_batch.rows.samples) for micro_batch in micro_batches)
        control = self.calls.executor.placement.control
        sizes = all_gather_object(0 if is_cached else sum(part.nbytes for part in micro_batches), control)
        if control is not None and sum(sizes) > MAX_SENT:
            self.forward([micro_batch.rows for micro_batch in micro_batches])
        elif any(sizes):
            self._add_gradients([] if is_cached else micro_batches, make_loss)
        computed = self._computed_one(first)
        if computed is None:
            return self._known.get(first.rows.samples)
        outputs = computed.outputs
        computed.outputs = outputs.only([name for name in (POLICY_LOGPROBS, ENTROPIES) if name in outputs])
        return outputs

    def _computed_one(self, micro_batch: MicroBatch) -> MicroBatch | None:
        return next((part for part in self._computed if part.inputs is micro_batch.inputs), None)

    def _add_gradients(self, micro_batches: Sequence[MicroBatch], make_loss: MakeLoss) -> None:
        """Compute the outputs of this rank's micro-batches, and add the gradients of samples that may have one. All
        ranks together."""
        control = self.calls.executor.placement.control
        local = [LossBatch.of(micro_batch, is_sent=control is not None) for micro_batch in micro_batches]
        batches = [batch for rank_batches in all_gather_object(local, control) for batch in rank_batches]
        samples = Rollouts.cat([micro_batch.rows.samples for micro_batch in micro_batches])
        may_have_grad = [flag for micro_batch in micro_batches for flag in micro_batch.may_have_grad.tolist()]
        without_grad = [i for i, flag in enumerate(may_have_grad) if not flag]
        with_grad = [i for i, flag in enumerate(may_have_grad) if flag]

        outputs = self.calls.forward(FORWARD, samples.select(without_grad), trained=False)
        if len(outputs):
            column = outputs.ragged(POLICY_LOGPROBS)
            outputs = outputs.plus(**{LOGPROB_GRADS: column.like(torch.zeros_like(column.values))})
        if any(batch.rows for batch in batches):  # on any rank
            added = self.calls.add_gradients(samples.select(with_grad), make_loss(batches))
            outputs = Rollouts.cat([outputs, added])

        outputs = outputs.select(torch.tensor(without_grad + with_grad).argsort())  # in the order of `samples`
        start = 0
        for micro_batch in micro_batches:
            end = start + len(micro_batch.rows.samples)
            micro_batch.outputs, start = outputs.select(range(start, end)), end
        self._computed += micro_batches

    def add(self, samples: Rollouts, spare: Rollouts) -> None:
        """Collect a micro-batch: its samples with token gradients, and its `Rows.spare`."""
        self._grads.append(samples)
        self._spare = spare

    def add_router_loss(self, weight: float, top_k: int) -> None:
        """Add to the weight of the auxiliary loss in the optimizer step. The collected samples then have the column
        `ROUTER_COUNTS`.

        Args:
            weight: derivative of this rank's micro-batch's part of the loss with respect to the auxiliary loss.
            top_k: experts per token.
        """
        self._router_weight, self._top_k = (self._router_weight or 0.0) + weight, top_k

    def take(self) -> Rollouts:
        """The samples of the optimizer step with their token gradients; cached outputs are forgotten. If all token
        gradients are 0, it is one sample, so that the optimizer still steps on gradients that were already added,
        momentum and weight decay. All ranks together."""
        samples, spare = Rollouts.cat(self._grads), self._spare
        if self._router_weight is not None:
            samples = self._with_router_grads(samples, self._router_weight)
        self.forget()
        names = [name for name in (LOGPROB_GRADS, ENTROPY_GRADS) if name in samples]
        if ROUTER_GRADS in samples or any(bool((samples.ragged(name).values != 0).any()) for name in names):
            return samples
        zero = Ragged(torch.zeros(1), torch.ones(1, dtype=torch.long))
        return spare.plus(**dict.fromkeys(names, zero))

    def _with_router_grads(self, samples: Rollouts, weight: float) -> Rollouts:
        """The samples with the derivatives of the auxiliary loss over all ranks' samples of the step."""
        counts, control = samples.ragged(ROUTER_COUNTS), self.calls.executor.placement.control
        ranks = all_gather_object((over_samples(counts), weight), control)
        total, weights = (sum(parts[1:], parts[0]) for parts in zip(*ranks, strict=True))
        grads = weights * balance_grads(total, self._top_k)
        names = [name for name in samples if name != ROUTER_COUNTS]
        return samples.only(names).plus(**{ROUTER_GRADS: with_router_grads(counts, grads)})

    def forget(self) -> None:
        """Forget token gradients and log-probabilities: the policy has changed, or a step was abandoned."""
        self._grads, self._computed, self._router_weight = [], [], None
        self.forget_logprobs()

    def forget_logprobs(self) -> None:
        """Forget the policy's log-probabilities and entropies."""
        self._known.forget()
