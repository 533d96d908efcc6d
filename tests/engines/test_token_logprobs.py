"""Log-probabilities and entropies of tokens, and their gradients, against log_softmax and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trl_realloc.engines.training.token_logprobs import TokenLogprobs


def assert_close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def reference(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    p = torch.log_softmax(logits.double() / temperature, -1)
    return p.gather(-1, targets[:, None])[:, 0], -(p.exp() * p).nan_to_num(0).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_token_logprobs_are_log_softmax(dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(50, 300)).to(dtype)
    targets = torch.randint(300, (50,))
    logprobs, entropy = TokenLogprobs.apply(logits, targets, temperature)
    expected, expected_entropy = reference(logits, targets, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 5e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("terms", [lambda o: o[0], lambda o: o[1], lambda o: 2 * o[0] - o[1]], ids=["l", "H", "l, H"])
def test_the_gradients_of_token_logprobs_and_entropies_are_autograds(
    dtype: torch.dtype, tolerance: float, terms: Callable[[Any], Tensor]
) -> None:
    torch.manual_seed(0)
    leaf = (4 * torch.randn(50, 300)).to(dtype).requires_grad_()
    targets, weights = torch.randint(300, (50,)), torch.randn(50)
    (terms(TokenLogprobs.apply(leaf * 1, targets, 0.7)) * weights).sum().backward()
    precise = leaf.detach().double().requires_grad_()
    (terms(reference(precise, targets, 0.7)) * weights).sum().backward()
    assert leaf.grad is not None and precise.grad is not None and leaf.grad.dtype == dtype
    torch.testing.assert_close(leaf.grad.double(), precise.grad, rtol=tolerance, atol=tolerance)


def test_token_logprobs_work_in_slices() -> None:
    """More rows than one slice holds, and rows longer than a slice."""
    torch.manual_seed(0)
    vocabulary = TokenLogprobs.SLICE // 3
    leaf = torch.randn(8, vocabulary, requires_grad=True)
    targets = torch.randint(vocabulary, (8,))
    assert len(list(TokenLogprobs.slices(leaf, torch.float32, 1))) == 3
    logprobs, entropy = TokenLogprobs.apply(leaf * 1, targets, 1.0)
    expected, expected_entropy = reference(leaf.detach(), targets, 1.0)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-4, atol=1e-4)
    logprobs.sum().backward()
    assert leaf.grad is not None
    assert_close(leaf.grad.sum(-1), torch.zeros(8))
    longer = torch.empty(2, 1).expand(2, 2 * TokenLogprobs.SLICE)
    assert [rows for rows, _ in TokenLogprobs.slices(longer, torch.float32, 0)] == [slice(0, 1), slice(1, 2)]


def test_forbidden_tokens_add_nothing() -> None:
    leaf = torch.tensor([[1.0, float("-inf"), 2.0], [0.0, 0.0, float("-inf")]], requires_grad=True)
    logprobs, entropy = TokenLogprobs.apply(leaf * 1, torch.tensor([2, 0]), 1.0)
    expected, expected_entropy = reference(leaf.detach(), torch.tensor([2, 0]), 1.0)
    assert_close(logprobs.double(), expected)
    assert_close(entropy.double(), expected_entropy)
    logprobs.sum().backward()
    assert leaf.grad is not None
    expected_gradient = torch.tensor([[-0.2689, 0.0, 0.2689], [0.5, -0.5, 0.0]])
    torch.testing.assert_close(leaf.grad, expected_gradient, rtol=0, atol=1e-4)
    leaf.grad = None
    TokenLogprobs.apply(leaf * 1, torch.tensor([2, 0]), 1.0)[1].sum().backward()
    # of two tokens with the odds e: dH/dx = -p (1 - p) for the likelier one
    expected_gradient = torch.tensor([[0.1966, 0.0, -0.1966], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(leaf.grad, expected_gradient, rtol=0, atol=1e-4)


def test_a_gradient_of_an_entropy_that_is_not_finite_stays_so() -> None:
    leaf = torch.tensor([[1.0, float("-inf"), 2.0]], requires_grad=True)
    entropy = TokenLogprobs.apply(leaf * 1, torch.tensor([2]), 1.0)[1]
    (entropy * torch.nan).sum().backward()
    assert leaf.grad is not None and not bool(leaf.grad.isfinite().any())


def test_logprobs_and_entropies_are_those_of_trl_under_its_temperature() -> None:
    """As in its GRPOTrainer: both of the logits divided by the temperature."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    torch.manual_seed(0)
    logits = 3 * torch.randn(12, 40)
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    targets, weights = torch.randint(40, (12,)), torch.linspace(-1, 2, 12)
    tempered = leaves[0] / 0.6
    theirs = selective_log_softmax(tempered, targets), entropy_from_logits(tempered)
    ours = TokenLogprobs.apply(leaves[1] * 1, targets, 0.6)
    for column, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(column, other)
    for columns in (theirs, ours):
        ((columns[0] + 0.3 * columns[1]) * weights).sum().backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)


def test_no_tokens_have_no_logprobs() -> None:
    logits = torch.zeros(0, 7, requires_grad=True)
    logprobs, entropy = TokenLogprobs.apply(logits * 1, torch.zeros(0, dtype=torch.long), 1.0)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()


def test_spent_logits_are_not_used_twice() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    logprobs, _ = TokenLogprobs.apply(logits * 1, torch.tensor([0, 1, 2]), 1.0)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()
