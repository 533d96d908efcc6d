"""A loss given by its token gradients: its gradient is that of the loss the token gradients are of, and samples without
token gradients may go."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trl_realloc.algorithms.nonfinite import problem_of
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.algorithms.trainer_loss import LinearLoss, without_zero_grads


LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=8)
LOSS = LinearLoss()


def rollouts(lengths: list[int], grads: Tensor, entropy_grads: Tensor | None = None) -> Rollouts:
    sizes = torch.tensor(lengths)
    responses = Ragged(torch.ones(int(sizes.sum()), dtype=torch.long), sizes)
    samples = Rollouts(
        index=torch.arange(len(lengths)) + 10,
        prompts=Ragged(torch.ones(3 * len(lengths), dtype=torch.long), torch.full((len(lengths),), 3)),
        responses=responses,
        logprob_grads=responses.like(grads),
    )
    return samples if entropy_grads is None else samples.plus(entropy_grads=responses.like(entropy_grads))


def leaves(samples: Rollouts) -> dict[str, Ragged]:
    responses = samples.ragged("responses")
    generator = torch.Generator().manual_seed(len(responses.values))
    values = torch.randn(2, len(responses.values), generator=generator, dtype=torch.float64)
    return {
        "logprobs": responses.like(values[0].requires_grad_()),
        "entropy": responses.like(values[1].clone().requires_grad_()),
    }


def test_its_gradient_is_the_slopes_and_its_statistics_are_each_samples_part() -> None:
    grads, entropy_grads = torch.arange(6.0) - 2, torch.linspace(1, 2, 6)
    samples = rollouts([3, 0, 2, 1], grads, entropy_grads)
    outputs = leaves(samples)
    value, statistics = LOSS(outputs, samples)
    value.backward()
    assert torch.equal(outputs["logprobs"].values.grad, grads.double())
    assert torch.equal(outputs["entropy"].values.grad, entropy_grads.double())
    assert set(statistics) == {"linear_loss"} and not statistics["linear_loss"].requires_grad
    torch.testing.assert_close(statistics["linear_loss"].sum(), value.detach())
    assert float(statistics["linear_loss"][1]) == 0.0


def test_without_entropy_slopes_entropies_have_no_part_in_it() -> None:
    samples = rollouts([2, 1], torch.ones(3))
    outputs = leaves(samples)
    value, _ = LOSS({"logprobs": outputs["logprobs"]}, samples)
    value.backward()
    assert outputs["entropy"].values.grad is None


def test_a_token_without_a_slope_may_have_any_logprob() -> None:
    samples = rollouts([3], torch.tensor([1.0, 0.0, 2.0]))
    values = torch.tensor([-1.0, -math.inf, -3.0], requires_grad=True)
    value, _ = LOSS({"logprobs": samples.ragged("responses").like(values)}, samples)
    value.backward()
    assert value.item() == -7.0 and values.grad.tolist() == [1.0, 0.0, 2.0]


def test_slopes_that_are_not_one_per_response_token_are_refused_with_their_sample() -> None:
    samples = rollouts([2, 1], torch.ones(3))
    moved = samples.plus(logprob_grads=Ragged(torch.ones(3), torch.tensor([2, 1])))
    outputs = {"logprobs": Ragged(torch.zeros(3), torch.tensor([1, 2]))}
    with pytest.raises(ValueError, match="sample 10 of the batch has 2 logprob_grads and 1 response tokens"):
        LOSS(outputs, moved)


@pytest.mark.parametrize("column", ["logprob_grads", "entropy_grads"])
@pytest.mark.parametrize("number", [math.nan, math.inf, 1e16])
def test_slopes_that_are_not_finite_are_refused_with_their_sample(column: str, number: float) -> None:
    samples = rollouts([2, 1], torch.ones(3), torch.ones(3))
    assert problem_of(samples) is None
    error = problem_of(samples.plus(**{column: samples.ragged(column).like(torch.tensor([1.0, 2.0, number]))}))
    assert error is not None and error.sample == 11
    assert "the loss's derivative by a" in str(error) and "sample 11" in str(error) and "kl_coef" not in str(error)


@given(LENGTHS, st.integers(0, 100), st.booleans())
def test_only_samples_without_a_slope_go_and_gradients_stay(lengths: list[int], seed: int, has_entropy: bool) -> None:
    generator, count = torch.Generator().manual_seed(seed), sum(lengths)

    def drawn() -> Tensor:
        """Token gradients of which most are 0, or -0."""
        return torch.randn(count, generator=generator) * (torch.rand(count, generator=generator) < 0.3)

    samples = rollouts(lengths, drawn(), drawn() if has_entropy else None)
    columns = ["logprob_grads", "entropy_grads"] if has_entropy else ["logprob_grads"]
    kept = without_zero_grads(samples)
    wanted = [
        int(index)
        for row, index in enumerate(samples.tensor("index"))
        if any(bool((samples.ragged(column)[row] != 0).any()) for column in columns)
    ]
    if wanted:
        assert kept.tensor("index").tolist() == wanted
    else:
        assert len(kept) == 1
        assert bool(kept.ragged("responses").lengths[0]) == any(lengths)
        assert int(kept.lengths[0]) == min([length + 3 for length in lengths if length] or [3])
    outputs = leaves(samples)
    of_kept = {name: column.select(kept.tensor("index") - 10) for name, column in outputs.items()}
    LOSS(outputs, samples)[0].backward()
    expected = {name: column.values.grad for name, column in outputs.items()}
    for column in outputs.values():
        column.values.grad = None
    LOSS(of_kept, kept)[0].backward()
    for name, column in outputs.items():
        assert (column.values.grad is None) == (expected[name] is None)
        assert expected[name] is None or torch.equal(column.values.grad, expected[name])


def test_no_samples_stay_no_samples() -> None:
    assert len(without_zero_grads(rollouts([2], torch.ones(2)).select([]))) == 0
