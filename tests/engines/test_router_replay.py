"""A mixture of experts computes with the experts that it is given, and sums what its auxiliary loss needs, however its
samples lie in rows."""

from __future__ import annotations

from typing import Any

import mixtures
import pytest
import torch
from torch import Tensor

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.algorithms.router_loss import ROUTER_COUNTS, ROUTER_PROBS
from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.training.expert_routing import BALANCED_FAMILIES, experts_per_token
from trl_realloc.engines.training.heads import PolicyHead
from trl_realloc.engines.training.replicated import ReplicatedEngine
from trl_realloc.engines.training.router_replay import REPLAYED_FAMILIES
from trl_realloc.engines.transformers_compat import recompute_activations
from trl_realloc.plan.algorithm_graphs import ROUTES


EXPERTS = 8
LENGTHS = (5, 1, 8)
ALONE, CPU = MeshGroup(ranks=(0,), rank=0), torch.device("cpu")


def samples() -> Rollouts:
    """Three responses to a prompt that is long enough to be shared."""
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(2, 100, (20,), generator=draw)
    responses = [torch.randint(2, 100, (length,), generator=draw) for length in LENGTHS]
    columns = {"prompts": Ragged.of([prompt] * 3, torch.long), "responses": Ragged.of(responses, torch.long)}
    return Rollouts(index=torch.arange(3), **columns)


def chosen_by(model: Any, given: Rollouts) -> list[Tensor]:
    """The experts that the routers choose for each token of each sample but its last, as an engine records them."""
    rows = zip(given.ragged("prompts").rows(), given.ragged("responses").rows(), strict=True)
    return [mixtures.chosen(model, torch.cat(row)).flatten(1)[:-1].to(torch.uint8) for row in rows]


def trained(model: Any, given: Rollouts, **head: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and the gradients of a weighted sum of them."""
    made = PolicyHead(model, 1.0, **head)
    engine = ReplicatedEngine(made, ALONE, CPU, make_optimizer=lambda module: torch.optim.SGD(module.parameters()))
    logprobs = engine.forward(given, 1000)["logprobs"].values

    def loss(outputs: Any, micro: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        column = outputs["logprobs"]
        return (column.values * torch.linspace(-1, 2, len(column.values))).sum(), {"all": column.sum().detach()}

    model.zero_grad()
    engine.add_gradients(given, loss, 1000)
    return logprobs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["sdpa", "eager"], ids=["packed", "padded"])
@pytest.mark.parametrize("family", sorted(REPLAYED_FAMILIES))
def test_a_model_computes_with_the_experts_it_is_given(family: str, attention: str) -> None:
    model, given = mixtures.mixture(family, attn_implementation=attention), samples()
    chosen = chosen_by(model, given)
    logprobs, gradients = trained(model, given)
    # with the experts that it chooses itself nothing changes, the gradients of its routers included
    same, of_same = trained(model, given.plus(**{ROUTES: Ragged.of(chosen, torch.uint8)}), replays_routes=True)
    torch.testing.assert_close(same, logprobs, rtol=0, atol=1e-6)
    torch.testing.assert_close(of_same, gradients, rtol=1e-5, atol=1e-6)
    # with others the answer is another one, and the same if the layers are computed again for the backward
    others = given.plus(**{ROUTES: Ragged.of([(rows.int() + 1) % EXPERTS for rows in chosen], torch.uint8)})
    other, of_other = trained(model, others, replays_routes=True)
    assert (other - logprobs).abs().max() > 1e-3
    recompute_activations(model)
    again, of_again = trained(model, others, replays_routes=True)
    assert torch.equal(again, other)
    torch.testing.assert_close(of_again, of_other)
    # a sample without routes is computed with the experts that the model chooses
    none = others.plus(**{ROUTES: Ragged.of([rows[:0] for rows in chosen], torch.uint8)})
    assert torch.equal(trained(model, none, replays_routes=True)[0], logprobs)


@pytest.mark.parametrize("attention", ["sdpa", "eager"], ids=["packed", "padded"])
@pytest.mark.parametrize("family", sorted(REPLAYED_FAMILIES))
def test_a_model_records_the_experts_of_its_forward(family: str, attention: str) -> None:
    """Its own, or those that it is given."""
    model, given = mixtures.mixture(family, attn_implementation=attention), samples()
    head = PolicyHead(model, 1.0, replays_routes=True, records_routes=True)
    engine, chosen = ReplicatedEngine(head, ALONE, CPU), chosen_by(model, given)
    others = [(rows.int() + 1) % EXPERTS for rows in chosen]
    for expected, columns in ((chosen, {}), (others, {ROUTES: Ragged.of(others, torch.uint8)})):
        rows = engine.forward(given.plus(**columns), 1000)[ROUTES].rows()
        assert [len(row) for row in rows] == given.lengths.tolist()
        for row, wanted in zip(rows, expected, strict=True):
            pairs = [part[: len(wanted)].int().unflatten(1, (-1, 2)).sort(-1).values for part in (row, wanted)]
            assert torch.equal(*pairs)


@pytest.mark.parametrize("attention", ["sdpa", "eager"], ids=["packed", "padded"])
@pytest.mark.parametrize("family", sorted(BALANCED_FAMILIES))
def test_a_token_that_samples_share_counts_for_each_of_them(family: str, attention: str) -> None:
    given = samples()
    head = PolicyHead(mixtures.mixture(family, attn_implementation=attention), 1.0, router_sums=True)
    engine = ReplicatedEngine(head, ALONE, CPU)
    together = engine.forward(given, 1000)
    assert bool(head.shared_tokens) == head.packed, "packed rows share the prompt"
    alone = [engine.forward(given.select([row]), 1000) for row in range(3)]
    for name in (ROUTER_COUNTS, ROUTER_PROBS):
        torch.testing.assert_close(together[name].values, torch.cat([part[name].values for part in alone]))
    layers = engine.head.model.config.num_hidden_layers
    sums = together[ROUTER_COUNTS].sum() / experts_per_token(engine.head.model.config)
    assert sums.tolist() == [(20 + length) * layers for length in LENGTHS]
