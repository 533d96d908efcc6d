"""The random numbers of a response that one engine begins and another one ends, and the distribution that tokens are
drawn from, against Transformers' logits processors and plain arithmetic."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trl_realloc.engines.generation import token_draw
from trl_realloc.engines.generation.token_draw import (
    draw,
    keep_likely,
    keep_nucleus,
    keep_top,
    penalize_repetition,
    seed_arguments,
    uniforms,
)


ROWS = st.integers(0, 2**31).map(lambda seed: random_rows(seed))
P = st.floats(0.01, 0.999)
K = st.integers(1, 400)


def random_rows(seed: int) -> Tensor:
    """(rows, vocabulary) float32 logits, from flat to peaked."""
    random = np.random.default_rng(seed)
    shape = (int(random.integers(1, 6)), int(random.integers(2, 900)))
    return torch.from_numpy(random.normal(scale=random.choice([0.1, 1.0, 6.0]), size=shape)).float()


def tied(logits: Tensor) -> Tensor:
    return logits.mul(2).round().div(2)


def limited(logits: Tensor, k: int, p: float) -> Tensor:
    rows = len(logits)
    return keep_nucleus(keep_top(logits, torch.full((rows,), k)), torch.full((rows,), p))


def nucleus(logits: Tensor, p: float) -> list[set[int]]:
    """The tokens of each row of which all more probable ones have less than `p` together, in Python's floats."""
    result = []
    for row in logits.double().tolist():
        weights = [math.exp(value - max(row)) for value in row]
        total = math.fsum(weights)
        result.append(
            {at for at, own in enumerate(weights) if math.fsum(w for w in weights if w > own) / total < p - 1e-9}
        )
    return result


def allowed(logits: Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in logits]


@given(logits=ROWS, k=K, p=P)
def test_top_k_and_top_p_keep_the_tokens_that_transformers_keeps(logits: Tensor, k: int, p: float) -> None:
    got = limited(logits, k, p)
    ids = torch.zeros((len(logits), 1), dtype=torch.long)
    expected = TopPLogitsWarper(p)(ids, TopKLogitsWarper(k)(ids, logits.double()))
    assume(_is_clear(expected, logits, k, p))
    assert allowed(got) == allowed(expected)
    kept = got.isfinite()
    assert torch.equal(got[kept], logits[kept]), "what stays is unchanged"


def _is_clear(expected: Tensor, logits: Tensor, k: int, p: float) -> bool:
    """Whether the sum of the kept probabilities is far enough from `p` for rounding to decide nothing."""
    top = keep_top(logits, torch.full((len(logits),), k)).double().softmax(-1)
    ordered = top.sort(-1, descending=True).values.cumsum(-1)
    return bool(((ordered - p).abs() > 1e-6).all())


@given(logits=ROWS.map(tied), p=P)
def test_of_tokens_that_are_equally_probable_top_p_keeps_all_or_none(logits: Tensor, p: float) -> None:
    got = keep_nucleus(logits, torch.full((len(logits),), p))
    for row, values, least in zip(allowed(got), logits.tolist(), nucleus(logits, p), strict=True):
        assert row >= least, "all that are needed"
        assert {at for at, value in enumerate(values) if value in {values[kept] for kept in row}} == row
        assert len({values[at] for at in row - least}) <= 1, "at most the value at the bound, which rounding decides"


@given(logits=ROWS, min_p=st.floats(0.0, 1.0))
def test_min_p_keeps_the_tokens_that_transformers_keeps(logits: Tensor, min_p: float) -> None:
    ids = torch.zeros((len(logits), 1), dtype=torch.long)
    assert allowed(keep_likely(logits, min_p)) == allowed(MinPLogitsWarper(min_p)(ids, logits))


@given(logits=ROWS, penalty=st.floats(0.2, 5.0), seed=st.integers(0, 1000))
def test_the_repetition_penalty_is_that_of_transformers(logits: Tensor, penalty: float, seed: int) -> None:
    rows, vocabulary = logits.shape
    ids = torch.from_numpy(np.random.default_rng(seed).integers(vocabulary, size=(rows, 7)))
    seen = torch.zeros(logits.shape, dtype=torch.bool).scatter_(-1, ids, True)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    torch.testing.assert_close(penalize_repetition(logits, seen, penalty), expected)


@given(logits=ROWS, k=K, p=P, uniform=st.floats(0, 1, exclude_max=True))
def test_only_kept_tokens_are_drawn_and_they_sum_to_1(logits: Tensor, k: int, p: float, uniform: float) -> None:
    kept = limited(logits, k, p)
    logprobs = kept.log_softmax(-1)
    assert torch.allclose(logprobs.double().exp().sum(-1), torch.ones(len(logits), dtype=torch.float64), atol=1e-5)
    for at in (uniform, 0.0, math.nextafter(1.0, 0.0)):
        tokens = draw(logprobs, torch.full((len(logits), 1), at, dtype=torch.float64))
        assert logprobs.gather(-1, tokens[:, None]).isfinite().all()


@given(logits=ROWS, uniform=st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(logits: Tensor, uniform: float) -> None:
    logprobs = logits.log_softmax(-1)
    ends = logprobs.double().exp().cumsum(-1)
    tokens = draw(logprobs, torch.full((len(logits), 1), uniform, dtype=torch.float64))
    for row, token in zip(ends.tolist(), tokens.tolist(), strict=True):
        begin, end, point = (row[token - 1] if token else 0.0), row[token], uniform * row[-1]
        assert begin - 1e-12 <= point <= end + 1e-12


@given(logits=ROWS, k=K, p=P, uniform=st.floats(0, 1, exclude_max=True))
def test_a_row_is_the_same_alone_and_in_a_batch(logits: Tensor, k: int, p: float, uniform: float) -> None:
    whole, points = limited(logits, k, p), torch.full((len(logits), 1), uniform, dtype=torch.float64)
    tokens = draw(whole.log_softmax(-1), points)
    for row in range(len(logits)):
        alone = limited(logits[row : row + 1], k, p)
        assert torch.equal(alone, whole[row : row + 1])
        assert draw(alone.log_softmax(-1), points[:1]) == tokens[row]


@given(seed=st.integers(0, 2**31))
def test_rows_that_are_drawn_some_at_a_time_are_the_same(seed: int) -> None:
    logprobs = random_rows(seed).log_softmax(-1)
    uniform = torch.rand(len(logprobs), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    with mock.patch.object(token_draw, "AT_ONCE", 2 * logprobs.shape[1] + 1):
        some_at_a_time = draw(logprobs, uniform)
    torch.testing.assert_close(some_at_a_time, draw(logprobs, uniform), rtol=0, atol=0)


@given(logits=ROWS, p=P, seed=st.integers(0, 1000))
def test_rows_may_have_settings_of_their_own(logits: Tensor, p: float, seed: int) -> None:
    rows, vocabulary = logits.shape
    ks = torch.from_numpy(np.random.default_rng(seed).integers(1, vocabulary + 1, size=rows))
    ps = torch.where(torch.arange(rows) % 2 == 0, p, 1.0)
    got = keep_nucleus(keep_top(logits, ks), ps)
    for row in range(rows):
        assert torch.equal(got[row], limited(logits[row : row + 1], int(ks[row]), float(ps[row]))[0])


def test_neutral_settings_change_no_logit() -> None:
    logits = random_rows(3)
    vocabulary = logits.shape[1]
    assert torch.equal(limited(logits, vocabulary, 1.0), logits)
    assert keep_likely(logits, 0.0) is logits
    assert penalize_repetition(logits, torch.ones_like(logits, dtype=torch.bool), 1.0) is logits


@pytest.mark.parametrize("p", [0.3, 0.9, 0.999999])
def test_a_flat_distribution_is_looked_at_further_than_the_first_candidates(p: float) -> None:
    vocabulary = 40 * token_draw.CANDIDATES
    logits = torch.arange(vocabulary).float().mul(1e-5)[None]
    kept = keep_nucleus(logits, torch.tensor([p])).isfinite().sum().item()
    assert kept == pytest.approx(p * vocabulary, rel=0.2)
    assert kept > token_draw.CANDIDATES


@given(seed=st.integers(0, 2**63 - 1), length=st.integers(1, 200), offset=st.integers(0, 200))
def test_a_continued_response_has_the_numbers_that_it_would_have_had(seed: int, length: int, offset: int) -> None:
    offset = min(offset, length - 1)
    whole = uniforms(seed_arguments(seed, 0, True, True)["extra_args"], length)
    rest = uniforms(seed_arguments(seed, offset, True, True)["extra_args"], length - offset)
    assert np.array_equal(whole[offset:], rest)
    assert np.array_equal(whole, np.random.default_rng(seed).random(length))  # as generation by Transformers


def test_vllms_newest_sampler_needs_the_seed_alone_because_it_draws_by_position() -> None:
    assert seed_arguments(7, 0, False, True) == seed_arguments(7, 30, False, True) == {"seed": 7}


@given(seed=st.integers(0, 2**63 - 1), offsets=st.sets(st.integers(1, 10_000), min_size=2, max_size=2))
def test_vllms_older_sampler_never_draws_with_the_same_numbers_again(seed: int, offsets: set[int]) -> None:
    seeds = [seed_arguments(seed, offset, False, False)["seed"] for offset in (0, *offsets)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 3
    assert all(0 <= other < 2**63 for other in seeds)
    again = [seed_arguments(seed, offset, False, False)["seed"] for offset in (0, *offsets)]
    assert again == seeds
