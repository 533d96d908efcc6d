"""Log-probabilities over the tokens that the engine draws among, against its own rules, autograd and enumeration."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trl_realloc.engines.generation.token_draw import keep_likely, keep_nucleus, keep_top
from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.requests import Sampling, SamplingMask
from trl_realloc.engines.training import sliced_head
from trl_realloc.engines.training.sliced_head import SlicedLogprobs
from trl_realloc.engines.training.token_logprobs import TokenLogprobs
from trl_realloc.engines.training.vocab_parallel import SplitLogprobs


VOCABULARY, TOKENS = 40, 12


@pytest.fixture(scope="module")
def alone() -> Any:
    """A tensor-parallel group of one rank."""
    made_here = not dist.is_initialized()
    if made_here:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield MeshGroup((0,), 0, dist.group.WORLD)
    if made_here:
        dist.destroy_process_group()


def drawn_from(logits: Tensor, sampling_mask: SamplingMask) -> Tensor:
    """The logits of the distribution that an engine draws from, -inf for what it cannot draw."""
    logits = keep_likely(logits, sampling_mask.min_p)
    if sampling_mask.top_k:
        logits = keep_top(logits, torch.full((len(logits),), sampling_mask.top_k))
    return keep_nucleus(logits, torch.full((len(logits),), sampling_mask.top_p)) if sampling_mask.top_p < 1 else logits


def some_mask(seed: int) -> SamplingMask:
    draw = random.Random(seed)
    of_all = SamplingMask(
        draw.choice([1.0, 0.3, 0.8, 0.95, 0.999]), draw.choice([0, 1, 7, 100]), draw.choice([0.0, 0.02, 0.3])
    )
    return of_all if of_all != SamplingMask() else SamplingMask(top_p=0.9)


def expected(leaf: Tensor, targets: Tensor, temperature: float, sampling_mask: SamplingMask) -> tuple[Tensor, Tensor]:
    x = leaf / temperature
    outside = drawn_from(x.detach(), sampling_mask).isinf().scatter(-1, targets[:, None], False)
    log_p = x.masked_fill(outside, -torch.inf).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p.masked_fill(outside, 0.0)).sum(-1)


def in_slices(leaf: Tensor, targets: Tensor, temperature: float, sampling_mask: SamplingMask) -> Any:
    """The logits as a head's products with unit vectors, in slices of five rows."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sliced_head, "SLICE_ON_CPU", 5 * VOCABULARY)
        unit = torch.eye(VOCABULARY, dtype=leaf.dtype)
        return SlicedLogprobs.apply(leaf, unit, None, targets, temperature, leaf.dtype, 0, None, None, sampling_mask)


@pytest.mark.parametrize("way", ["whole", "in slices", "split"])
@pytest.mark.parametrize("seed", range(12))
def test_logprobs_entropies_and_gradients_are_of_kept_tokens(way: str, seed: int, alone: MeshGroup) -> None:
    """And of the target, also where it is not among them: rounding may have put it on the other side."""
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(TOKENS, VOCABULARY, generator=draw, dtype=torch.float64)
    logits[0, 3:6] = logits[0, 3]  # equal ones, which are kept together
    sampling_mask, temperature = some_mask(seed), 0.7
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    targets[:4] = logits[:4].argmin(-1)
    ways: dict[str, Callable[..., Any]] = {
        "whole": lambda leaf: TokenLogprobs.apply(leaf * 1, targets, temperature, sampling_mask),
        "in slices": lambda leaf: in_slices(leaf, targets, temperature, sampling_mask),
        "split": lambda leaf: SplitLogprobs.apply(leaf * 1, targets, temperature, 0, alone, sampling_mask),
    }
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    made, wanted = ways[way](ours), expected(theirs, targets, temperature, sampling_mask)
    weights = torch.randn(2, TOKENS, generator=draw, dtype=torch.float64)
    for outputs in (made, wanted):
        (outputs[0] * weights[0] + outputs[1] * weights[1]).sum().backward()
    torch.testing.assert_close(tuple(made), wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)


def test_a_token_that_was_forced_has_no_gradient() -> None:
    leaf = torch.randn(3, 8, requires_grad=True)
    logprobs, entropy = TokenLogprobs.apply(leaf * 1, leaf.argmax(-1), 1.0, SamplingMask(top_k=1))
    (logprobs.sum() + entropy.sum()).backward()
    assert not logprobs.any() and not entropy.any() and leaf.grad is not None and not leaf.grad.any()


def test_only_rules_by_probability_are_a_sampling_mask() -> None:
    assert Sampling(8, 1.0).mask is None
    assert Sampling(8, 0.5, repetition_penalty=1.2, regex="a+").mask is None
    assert Sampling(8, 1.0, top_p=0.9, top_k=5).mask == SamplingMask(0.9, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_real_vocabulary_keep_the_engines_tokens(dtype: torch.dtype) -> None:
    logits = (2 * torch.randn(16, 32_000, generator=torch.Generator().manual_seed(3))).to(dtype)
    sampling_mask, targets = SamplingMask(top_p=0.9), logits.argmax(-1)
    of_engine = drawn_from(logits.float(), sampling_mask).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    logprobs, _ = TokenLogprobs.apply(logits * 1, targets, 1.0, sampling_mask)
    torch.testing.assert_close(logprobs, of_engine, rtol=0, atol=1e-5)


# --- the true gradient ----------------------------------------------------------------------------------------------

WIDTH, TEMPERATURE = 6, 0.8  # of a vocabulary whose responses of two tokens can be enumerated


def policy_of(first: Tensor, second: Tensor, pair: tuple[int, int], sampling_mask: SamplingMask | None) -> Tensor:
    """The log-probability of a response of two tokens, from the logits (6,) of its first and (6, 6) of its second."""
    logits = torch.stack([first, second[pair[0]]])
    logprobs, _ = TokenLogprobs.apply(logits, torch.tensor(pair), TEMPERATURE, sampling_mask)
    return logprobs.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "sampling_mask",
    [SamplingMask(top_p=0.8), SamplingMask(top_k=3), SamplingMask(min_p=0.2), SamplingMask(0.9, 4, 0.05)],
    ids=str,
)
def test_the_weighted_gradient_is_that_of_the_distribution_that_is_drawn_from(sampling_mask: SamplingMask) -> None:
    """Over all responses: Σ μ (π / μ) A ∇log π is the gradient of Σ π A, where the engine's μ rounds otherwise than the
    trainer's π. With log-probabilities over the whole vocabulary, as TRL's, it is not."""
    draw = torch.Generator().manual_seed(1)
    shapes = ((WIDTH,), (WIDTH, WIDTH))
    first, second = (2 * torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes)
    noise = [0.01 * torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    advantages = torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64)
    engine = [
        drawn_from((logits + of) / TEMPERATURE, sampling_mask).log_softmax(-1)
        for logits, of in zip((first[None], second), noise, strict=True)
    ]
    mu = engine[0][0][:, None] + engine[1]
    pairs = [pair for pair in itertools.product(range(WIDTH), repeat=2) if mu[pair].isfinite()]
    assert len(pairs) < WIDTH**2, "some responses cannot be drawn"

    def weighted(of: SamplingMask | None) -> Tensor:
        leaves = [logits.clone().requires_grad_() for logits in (first, second)]
        for pair in pairs:
            log_pi = policy_of(*leaves, pair, of)
            weight = torch.exp(log_pi.detach() - mu[pair])
            (mu[pair].exp() * weight * advantages[pair] * log_pi).backward()
        return torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None])

    leaves = [logits.clone().requires_grad_() for logits in (first, second)]
    kept = [drawn_from(leaf.detach().view(-1, WIDTH) / TEMPERATURE, sampling_mask).isfinite() for leaf in leaves]
    pi = [
        (leaf.view(-1, WIDTH) / TEMPERATURE).masked_fill(~of, -torch.inf).softmax(-1)
        for leaf, of in zip(leaves, kept, strict=True)
    ]
    (pi[0][0][:, None] * pi[1] * advantages).sum().backward()
    true = torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None])
    assert all(torch.equal(of, part.isfinite()) for of, part in zip(kept, engine, strict=True)), "both keep the same"
    torch.testing.assert_close(weighted(sampling_mask), true, rtol=0, atol=1e-5)
    assert float((weighted(None) - true).abs().max()) > 0.01
