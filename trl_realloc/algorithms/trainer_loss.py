"""The algorithm of a run whose samples, rewards and losses another library computes, such as TRL's GRPO
(`TrainerLoss`). That library gives the derivatives of its loss with respect to the log-probabilities and entropies of
the response tokens, the *token gradients* (`LinearLoss`). One training call is one optimizer step.

A loss L of a policy depends on its model only through the log-probability l_t and the entropy H_t of each token. By the
chain rule dL/dw = Σ dL/dl_t · dl_t/dw + Σ dL/dH_t · dH_t/dw, which is the gradient of the linear loss Σ a_t · l_t + Σ
b_t · H_t with the constants a_t = dL/dl_t and b_t = dL/dH_t at the current weights w. Code outside the engines, such as
TRL's `_compute_loss`, can therefore compute L and its token gradients on leaf tensors, while the engines compute the
gradient. Token gradients are those of the whole global mini-batch, so they do not depend on the plan. The auxiliary
loss of a mixture of experts depends on the model through sums of router probabilities, in the same way (`router_loss`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.dataflow import DataflowGraph
from .algorithm import TrainingLoss
from .rollout import Ragged, Rollouts
from .router_loss import ROUTER_GRADS, ROUTER_PROBS


LOGPROB_GRADS = "logprob_grads"  # column: dL/d log-probability of each response token, float32
ENTROPY_GRADS = "entropy_grads"  # column: dL/d entropy of each response token, float32; only if L has entropies
LINEAR_LOSS = "linear_loss"  # statistic of `LinearLoss`


@dataclass(frozen=True)
class LinearLoss:
    """Σ token gradient · log-probability + Σ token gradient · entropy over the response tokens, as a `base.TokenLoss`.

    Reads the column `logprob_grads` and, if the samples have it, `entropy_grads`: ragged, one float32 per response
    token. Without the second the engines compute no gradient of the entropies. With the column `router_grads` the loss
    also has Σ router gradient · sum of router probabilities over the experts. A token whose gradient is 0 is left out,
    even if its log-probability is infinite.

    Only the gradient of the loss is that of L, not its value. The statistics have each sample's part of the value
    (`linear_loss`), (n,). A pipeline stage before the last one has only the sums of router probabilities among its
    outputs: value and statistics are then its part, and those of all stages add up.

    Raises (when called):
        ValueError: a sample's number of token gradients differs from its number of response tokens.
    """

    def __call__(self, outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        of_tokens = {"logprobs": LOGPROB_GRADS, "entropy": ENTROPY_GRADS} if "logprobs" in outputs else {}
        per_sample = torch.zeros(len(samples), device=samples.ragged("responses").values.device)
        for output, grads in {**of_tokens, ROUTER_PROBS: ROUTER_GRADS}.items():
            if grads in samples:
                per_sample = per_sample + _weighted_sums(outputs[output], samples, grads)
        return per_sample.sum(), {LINEAR_LOSS: per_sample.detach()}


def _weighted_sums(column: Ragged, samples: Rollouts, name: str) -> Tensor:
    """(n,): the sum of token gradient times value over each sample's tokens."""
    grads = samples.ragged(name)
    if not torch.equal(grads.lengths, column.lengths):
        row = int((grads.lengths != column.lengths).nonzero()[0])
        raise ValueError(
            f"sample {int(samples.tensor('index')[row])} of the batch has {int(grads.lengths[row])} {name} and "
            f"{int(column.lengths[row])} response tokens; give one token gradient per response token"
        )
    products = torch.where(grads.values == 0, 0.0, grads.values * column.values)
    return column.like(products).sum()


def without_zero_grads(samples: Rollouts) -> Rollouts:
    """The samples of a mini-batch with a token gradient other than 0, in their order.

    The others add exactly 0 to the gradient, so the update is the same without their forward and backward. GRPO's
    groups of equal rewards are such samples, if the loss has no other term. To be called on the whole global
    mini-batch, before it is divided among the ranks. A model with dropout uses other random numbers than with all.

    If all token gradients are 0, one sample stays, the shortest: an optimizer step with a gradient of 0 still changes
    weights by momentum and weight decay, and it counts in the learning rate's schedule.

    Args:
        samples: samples with the columns `prompts`, `responses`, `logprob_grads` and perhaps `entropy_grads` and
            `router_grads`.
    """
    used = torch.zeros(len(samples), dtype=torch.bool)
    for name in (LOGPROB_GRADS, ENTROPY_GRADS, ROUTER_GRADS):
        if name in samples:
            grads = samples.ragged(name)
            used[grads.row_of[grads.values != 0].cpu()] = True
    if not used.any() and len(samples):
        responses = samples.ragged("responses").lengths
        # the forward of a sample without a response has no output to begin a backward at
        used[int(torch.where(responses > 0, samples.lengths, samples.lengths.max() + 1).argmin())] = True
    return samples.select(used.nonzero()[:, 0])


@dataclass(frozen=True)
class TrainerLoss:
    """An `Algorithm` without computations between the calls.

    Args:
        graph: dataflow graph of the run.
    """

    graph: DataflowGraph

    def prepare(self, samples: Rollouts) -> Rollouts:
        """The unchanged samples."""
        return samples

    def mini_batches(self, samples: Rollouts, step: int) -> Iterator[Rollouts]:
        """One mini-batch: the samples that have a gradient."""
        yield without_zero_grads(samples)

    def loss(self, call: str) -> TrainingLoss:
        """The linear loss."""
        return TrainingLoss("policy", LINEAR_LOSS, LinearLoss())

    def sample_metrics(self, samples: Rollouts) -> dict[str, float]:
        """Empty: the metrics are the other library's."""
        return {}

    def update_metrics(self, steps: Sequence[tuple[Rollouts, Mapping[str, Tensor]]]) -> dict[str, float]:
        """Empty: the metrics are the other library's."""
        return {}
