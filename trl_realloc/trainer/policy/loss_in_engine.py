"""`LossInEngine`: TRL's loss of an optimizer step's micro-batches, run inside the engines. They compute
log-probabilities and gradients in one pass.

TRL's loss of some rows of a micro-batch is computed on leaf tensors that are 0 in the other rows. The token gradients
equal those of the whole micro-batch if the loss is a sum over rows, weighted from the masks of all rows. All of TRL's
losses are. The trainer computes the loss again from the log-probabilities of all rows, and trains on the difference of
the token gradients (`loss_and_logprobs`). A loss that is not such a sum only costs time."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...algorithms.rollout import Ragged, Rollouts, on_device
from ...algorithms.trainer_loss import ENTROPY_GRADS, LOGPROB_GRADS, LinearLoss
from ...plan.algorithm_graphs import ENTROPIES, POLICY_LOGPROBS
from ..checks.trainable import users_method
from ..trl_compat import is_scaled_for_accumulation


if TYPE_CHECKING:
    from transformers import Trainer


MAX_SENT = 1 << 28  # maximum bytes of all ranks' micro-batches, which every rank receives
_METHODS = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies")


def is_computed_in_engines(trainer: Trainer) -> bool:
    """True if the engines compute the loss. Not for a user's loss, which would run more often than its author expects,
    nor with `top_entropy_quantile`, whose threshold needs the entropies of all processes."""
    return users_method(type(trainer), _METHODS) is None and getattr(trainer, "top_entropy_quantile", 1.0) == 1.0


def has_entropy_term(trainer: Trainer) -> bool:
    """True if the loss depends on the entropies."""
    return bool(getattr(trainer, "_entropy_bonus_enabled", False))


def moving_rows(trainer: Trainer, inputs: Mapping[str, Any]) -> Tensor:
    """(rows,) bool on the CPU: rows of a micro-batch that may have a gradient. The others have zero advantage, and the
    loss has no other term."""
    advantages = inputs["advantages"].cpu()
    if trainer.beta or has_entropy_term(trainer):
        return torch.ones(len(advantages), dtype=torch.bool)
    moves: Tensor = (advantages.reshape(len(advantages), -1) != 0).any(1)
    return moves


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of one rank, as the loss reads it.

    Args:
        inputs: TRL's tensors, with `completion_mask` in place of the token ids, which the loss does not read; empty
            without `rows`.
        mask: (rows, width) bool on the CPU; true for response tokens.
        rows: ascending indices of the rows whose samples the engines get.
    """

    inputs: Mapping[str, Tensor]
    mask: Tensor
    rows: Sequence[int]

    @staticmethod
    def of(inputs: Mapping[str, Any], rows: Sequence[int], *, is_sent: bool) -> MicroBatch:
        """The micro-batch of TRL's inputs.

        Args:
            is_sent: whether it is sent to other ranks, and so copied to host memory.
        """
        mask = inputs["completion_mask"]
        if not rows:
            return MicroBatch({}, mask[:0].cpu().bool(), rows)
        read = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        read |= {"prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0], "completion_ids": mask}
        if is_sent:  # copies, because a view is sent with all that it is a view of
            read = {name: value.detach().to("cpu", copy=True) for name, value in read.items()}
        return MicroBatch(read, mask.cpu().bool(), rows)


def size_of(inputs: Mapping[str, Any]) -> int:
    """Bytes of the tensors of a micro-batch."""
    return sum(value.nbytes for value in inputs.values() if isinstance(value, Tensor))


class LossInEngine:
    """A `TokenLoss` whose statistics are values of response tokens: log-probabilities, entropies and token gradients.

    Args:
        trainer: this rank's trainer; settings are the same on all ranks.
        micro_batches: micro-batches of all ranks in rank order. `index` counts their rows.
    """

    def __init__(self, trainer: Trainer, micro_batches: Sequence[MicroBatch]) -> None:
        self._trainer, self._micro_batches = _apart(trainer), micro_batches
        self._places = [(i, row) for i, micro in enumerate(micro_batches) for row in micro.rows]
        self._scale = 1 / trainer.accelerator.num_processes

    def __call__(self, outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        detached = {POLICY_LOGPROBS: outputs["logprobs"].values.detach(), ENTROPIES: outputs["entropy"].values.detach()}
        lengths = outputs["logprobs"].lengths
        columns = [Ragged(values, lengths) for values in detached.values()]
        positions = defaultdict[int, list[tuple[int, int]]](list)
        for position, number in enumerate(samples.tensor("index").tolist()):
            i, row = self._places[number]
            positions[i].append((row, position))
        grads = [[torch.empty(0)] * len(samples) for _ in self._names]
        for i, batch_positions in sorted(positions.items()):
            rows, places = zip(*sorted(batch_positions), strict=True)
            result = self._grads(self._micro_batches[i], rows, [column.select(places).values for column in columns])
            for parts, values in zip(grads, result, strict=True):
                for place, part in zip(places, values.split(lengths[list(places)].tolist()), strict=True):
                    parts[place] = part
        token_grads = {name: torch.cat(parts) for name, parts in zip(self._names, grads, strict=True)}
        linear = samples.plus(**{name: Ragged(values, lengths) for name, values in token_grads.items()})
        return LinearLoss()(outputs, linear)[0], detached | token_grads

    @property
    def _names(self) -> Sequence[str]:
        return (LOGPROB_GRADS, ENTROPY_GRADS) if has_entropy_term(self._trainer) else (LOGPROB_GRADS,)

    def _grads(self, micro: MicroBatch, rows: Iterable[int], values: Sequence[Tensor]) -> list[Tensor]:
        """The token gradients of the tokens of some rows, concatenated, (tokens,) for each of `_names`.

        Args:
            rows: ascending indices.
            values: log-probabilities and entropies of these tokens.
        """
        chosen = torch.zeros_like(micro.mask)
        chosen[list(rows)] = micro.mask[list(rows)]
        device = values[0].device
        places = on_device(chosen.flatten().nonzero()[:, 0], device)
        leaves = [torch.zeros(micro.mask.numel(), dtype=part.dtype, device=device) for part in values]
        for leaf, part in zip(leaves, values, strict=True):
            leaf[places] = part
        logprobs, entropies = (leaf.view(micro.mask.shape) for leaf in leaves)
        needed = [logprobs, entropies][: len(self._names)]
        inputs = {name: value.to(device) for name, value in micro.inputs.items()}
        forced = self._trainer.run.adapter.forced
        with torch.enable_grad(), forced.of_loss(inputs):
            for leaf in needed:
                leaf.requires_grad_()
            read = forced.zeroed(logprobs), forced.zeroed(entropies), None
            self._trainer._get_per_token_logps_and_entropies = lambda *_, **__: read
            loss = self._trainer._trl._compute_loss(self._trainer, self._trainer.model, inputs)
            if not is_scaled_for_accumulation(self._trainer):  # as Trainer does
                loss = loss / self._trainer.current_gradient_accumulation_steps
            gradients = torch.autograd.grad(loss, needed, allow_unused=True, materialize_grads=True)
        return [gradient.flatten()[places] * self._scale for gradient in gradients]


class _AloneAccelerator:
    """An accelerator for a loss that only this rank computes: `gather` adds no other rank's numbers, and the optimizer
    step goes on."""

    sync_gradients = False

    def __init__(self, accelerator: Any) -> None:
        self.num_processes, self.device = accelerator.num_processes, accelerator.device

    def gather(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    gather_for_metrics = reduce = pad_across_processes = gather


def _apart(trainer: Trainer) -> Any:
    """A view of the trainer with the same settings, whose loss changes nothing of the trainer and calls no
    collective."""
    apart: Any = copy.copy(trainer)
    apart.accelerator = _AloneAccelerator(trainer.accelerator)
    apart._metrics = defaultdict(lambda: defaultdict(list))
    apart.model = SimpleNamespace(training=True)
    return apart
