"""`Window`: between TRL's padded tensors and the samples of the engines. It gives TRL's loss the log-probabilities of a
micro-batch as leaf tensors, and collects their gradients, the slopes, until the optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...algorithms.linear_loss import ENTROPY_SLOPES, LOGPROB_SLOPES
from ...algorithms.rollout import Ragged, Rollouts
from ...runtime.host_calls import HostCalls
from ...runtime.samples.known_outputs import KnownOutputs


FORWARD, REFERENCE = "actor.forward", "reference.forward"


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
