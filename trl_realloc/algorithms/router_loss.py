"""The auxiliary loss that balances the experts of a mixture, as Transformers and TRL compute it, from sums over tokens.

A router gives each token a probability per expert, and the token goes to the `top_k` most probable experts. Let C_e be
the number of tokens that go to expert e and P_e the sum of its probabilities, both over all layers and tokens, E the
number of experts and R the number of tokens times layers. The loss is E · Σ C_e/R · P_e/R. C has no gradient, so the
derivative with respect to P_e is the constant E · C_e/R². With C of the whole global mini-batch, the loss does not
depend on how the plan divides it: ranks with other samples, and pipeline stages with other layers, have parts of both
sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rollout import Ragged


ROUTER_COUNTS = "router_counts"  # column: C_e of each sample, float32, `E` values per sample
ROUTER_PROBS = "router_probs"  # column: P_e of each sample; differentiable in the outputs of an engine
ROUTER_GRADS = "router_grads"  # column: dL/dP_e, the same for all samples of an optimizer step


def over_samples(column: Ragged) -> Tensor:
    """(E,) float64: the sum of a column over the samples, which must be at least one."""
    return column.values.detach().double().view(len(column), -1).sum(0)


def balance_loss(counts: Tensor, probs: Tensor, top_k: int) -> Tensor:
    """The loss, a 0-dimensional float32 tensor.

    Args:
        counts, probs: (E,) C and P.
        top_k: experts per token.
    """
    return ((balance_grads(counts, top_k) * probs).sum()).float()


def balance_grads(counts: Tensor, top_k: int) -> Tensor:
    """(E,): the derivatives of the loss with respect to P."""
    return len(counts) * counts * (top_k / counts.sum()) ** 2


def with_router_grads(samples_counts: Ragged, grads: Tensor) -> Ragged:
    """A column of the same (E,) derivatives for each sample, float32."""
    return samples_counts.like(grads.float().cpu().repeat(len(samples_counts)))


def router_sums(
    logits: list[Tensor], places: Tensor, of_sample: Tensor, samples: int, top_k: int, experts: int
) -> dict[str, Ragged]:
    """The columns `ROUTER_COUNTS` and `ROUTER_PROBS` of the samples of a forward.

    Args:
        logits: of each layer, (…, E): the router's logits of the tokens that were computed. A pipeline stage may have
            no layer with a router: its sums are 0.
        places: (tokens,) int64: where each token of the samples is among those. A token that samples share is counted
            for each of them.
        of_sample: (tokens,) int64: the sample of each token.
        samples: number of samples.
        top_k: experts per token.
        experts: E.
    """
    lengths = torch.full((samples,), experts)
    if not logits:
        zeros = Ragged(torch.zeros(samples * experts, device=places.device), lengths)
        return {ROUTER_COUNTS: zeros, ROUTER_PROBS: zeros}
    layers = [layer.reshape(-1, experts) for layer in logits]
    counts = torch.zeros(layers[0].shape, device=places.device)
    for layer in layers:
        chosen = layer.detach().topk(top_k, dim=-1).indices
        counts.scatter_add_(1, chosen, torch.ones(chosen.shape, device=places.device))
    probs = sum((layer.softmax(-1, dtype=torch.float32) for layer in layers), torch.zeros_like(counts))

    def of_samples(of_tokens: Tensor) -> Ragged:
        sums = torch.zeros(samples, experts, device=places.device).index_add(0, of_sample, of_tokens[places])
        return Ragged(sums.flatten(), lengths)

    return {ROUTER_COUNTS: of_samples(counts), ROUTER_PROBS: of_samples(probs)}
