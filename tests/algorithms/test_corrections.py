"""Importance weights by their properties, and PPO's loss with them against loops over tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ppo import LENGTHS, LIMIT, PLAIN, SEEDS, drawn, scored
from torch import Tensor

from trl_realloc.algorithms import ppo
from trl_realloc.algorithms.corrections import MODES, WEIGHTS, Correction, correction_metrics, importance_weights
from trl_realloc.algorithms.nonfinite import problem_of
from trl_realloc.algorithms.ppo import PPO, PolicyLoss
from trl_realloc.algorithms.ppo_settings import PPOSettings
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.batching import micro_batches


fast = settings(max_examples=60, deadline=None)
modes = st.sampled_from(MODES)
bounds = st.sampled_from([(3.0, None), (1.2, 0.8), (None, 0.5), (1.05, None)])  # (clip_max, clip_min)
CORRECTED = replace(PLAIN, vllm_importance_sampling_correction=True)


def old(lengths: list[int], seed: int, noise: float = 0.4) -> Rollouts:
    """Samples whose proximal policy is not the one that has drawn them."""
    samples = scored(lengths, seed)
    behaviour = samples.ragged("logprobs")
    moved = drawn(lengths, torch.Generator().manual_seed(seed + 7)).values
    return samples.plus(proximal_logprobs=behaviour.like(behaviour.values + noise * moved))


def correcting(mode: Any, clip_max: float | None, clip_min: float | None) -> PPOSettings:
    return replace(
        CORRECTED,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=clip_max,
        vllm_importance_sampling_clip_min=clip_min,
    )


def naive_weights(samples: Rollouts, mode: str, most: float | None, least: float | None) -> list[list[float]]:
    """By loops over tokens, in float64."""
    rows = []
    for mu, prox in zip(samples.ragged("logprobs").rows(), samples.ragged("proximal_logprobs").rows(), strict=True):
        ratios = [math.exp(float(p) - float(m)) for m, p in zip(mu, prox, strict=True)]
        if mode.startswith("sequence"):
            ratios = [math.prod(ratios)] * len(ratios)
        high, low = math.inf if most is None else most, -math.inf if least is None else least
        if mode.endswith("truncate"):
            rows.append([min(max(ratio, low), high) for ratio in ratios])
        else:
            rows.append([ratio if low <= ratio <= high else 0.0 for ratio in ratios])
    return rows


# --- weights ------------------------------------------------------------------------------------------------------


@fast
@given(LENGTHS, SEEDS, modes, bounds)
def test_weights_are_products_of_ratios_truncated_or_masked(
    lengths: list[int], seed: int, mode: Any, clips: tuple[float | None, float | None]
) -> None:
    samples = old(lengths, seed)
    weights = importance_weights(samples, Correction(mode, *clips))
    for row, expected in zip(weights.rows(), naive_weights(samples, mode, *clips), strict=True):
        assert row.tolist() == pytest.approx(expected, rel=1e-5)
        if mode.startswith("sequence"):
            assert len(set(row.tolist())) == 1
    assert not weights.values.requires_grad
    positive = weights.values[weights.values > 0] if mode.endswith("mask") else weights.values
    assert bool((positive <= (clips[0] or math.inf)).all() and (positive >= (clips[1] or 0.0)).all())


def test_a_weight_on_the_bound_is_within_it() -> None:
    ratios = torch.tensor([0.5, 1.0, 3.0, 3.0001, 0.4999])
    assert Correction("token_mask", 3.0, 0.5).is_outside(ratios).tolist() == [False, False, False, True, True]
    assert Correction("token_mask", 3.0, 0.5).bounded(ratios).tolist() == [0.5, 1.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("far", [-300.0, 300.0])
def test_weights_of_policies_that_have_nothing_in_common_are_finite(mode: Any, far: float) -> None:
    samples = scored([2, LIMIT])
    logprobs = samples.ragged("logprobs")
    samples = samples.plus(proximal_logprobs=logprobs.like(logprobs.values + far))
    weights = importance_weights(samples, Correction(mode, None, None)).values
    assert weights.tolist() == pytest.approx([math.exp(math.copysign(20, far))] * len(weights), rel=1e-5)
    assert all(map(math.isfinite, correction_metrics(samples, Correction(mode, None, None)).values()))


@fast
@given(LENGTHS, SEEDS, modes, st.data())
def test_weights_of_a_sample_are_its_own(lengths: list[int], seed: int, mode: Any, data: st.DataObject) -> None:
    samples, correction = old(lengths, seed), Correction(mode)
    some = data.draw(st.permutations(range(len(lengths))))[: max(1, len(lengths) // 2)]
    whole, part = importance_weights(samples, correction), importance_weights(samples.select(some), correction)
    assert torch.equal(part.values, whole.select(some).values)


# --- the loss -----------------------------------------------------------------------------------------------------


def mini_batch(samples: Rollouts, rules: PPOSettings) -> Rollouts:
    (batch,) = PPO(replace(rules, num_ppo_epochs=1)).mini_batches(PPO(rules).prepare(samples), 0)
    return batch.sorted()


def in_float64(samples: Rollouts) -> Rollouts:
    def double(column: Any) -> Any:
        if isinstance(column, Ragged):
            return column.like(double(column.values))
        return column.double() if column.is_floating_point() else column

    return Rollouts(**{name: double(column) for name, column in samples.items()})


def loss_of(rules: PPOSettings, batch: Rollouts, new: Tensor, cut: list[list[int]] | None = None) -> tuple[Any, ...]:
    """(the loss, its gradient by `new`, statistics by sample) of a mini-batch in these micro-batches."""
    leaf = new.clone().requires_grad_()
    outputs = batch.ragged("logprobs").like(leaf)
    loss, total, sums = PPO(rules).loss("actor.train").of_tokens, 0.0, dict[str, Tensor]()
    for part in cut or [list(range(len(batch)))]:
        logprobs = outputs.select(part)
        entropy = logprobs.like(-logprobs.values.detach())
        value, statistics = loss({"logprobs": logprobs, "entropy": entropy}, batch.select(part))
        value.backward()
        total += float(value.detach())
        for name, of_samples in statistics.items():
            sums.setdefault(name, torch.zeros(len(batch), dtype=of_samples.dtype))[part] = of_samples
    return total, leaf.grad, sums


@fast
@given(LENGTHS, SEEDS, modes)
def test_where_proximal_and_behaviour_policy_are_one_it_is_plain_ppo(lengths: list[int], seed: int, mode: Any) -> None:
    samples = scored(lengths, seed)
    equal = samples.plus(proximal_logprobs=samples.ragged("logprobs"))
    new = samples.ragged("logprobs").values + 0.3 * drawn(lengths, torch.Generator().manual_seed(seed + 1)).values
    rules = correcting(mode, 3.0, None)
    corrected, plain = mini_batch(equal, rules), mini_batch(samples, PLAIN)
    for name in plain:
        ours, expected = corrected[name], plain[name]
        values = (ours.values, expected.values) if isinstance(ours, Ragged) else (ours, expected)
        assert torch.equal(*values), name
    one, other = loss_of(rules, corrected, new), loss_of(PLAIN, plain, new)
    assert one[0] == other[0] and torch.equal(one[1], other[1])
    assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])


@fast
@given(LENGTHS, SEEDS)
def test_without_a_correction_no_bit_is_another(lengths: list[int], seed: int) -> None:
    """The operations of PPO's loss, in the order in which they have always been."""
    batch = mini_batch(scored(lengths, seed), PLAIN)
    assert WEIGHTS not in batch and PPO(PLAIN).graph == ppo_graph() and len(ppo_graph().order) == 6
    leaf = batch.ragged("logprobs").values + 0.3 * drawn(lengths, torch.Generator().manual_seed(seed + 1)).values
    total, gradient, sums = loss_of(PLAIN, batch, leaf)
    new = leaf.clone().requires_grad_()
    ratio = torch.exp(new - batch.ragged("logprobs").values)
    advantages = batch.ragged("advantages").values
    surrogate = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 1.0 - 0.2, 1.0 + 0.2))
    per_sample = batch.ragged("logprobs").like(surrogate).sum()
    (per_sample * batch.tensor("policy_weight")).sum().backward()
    assert new.grad is not None and torch.equal(gradient, new.grad)
    assert torch.equal(sums["policy_loss"], per_sample.detach())
    assert total == float((per_sample * batch.tensor("policy_weight")).sum().detach())


@fast
@given(LENGTHS, SEEDS, modes, bounds, st.sampled_from(["k1", "k3"]))
def test_the_loss_and_its_gradient_are_those_of_the_formula(
    lengths: list[int], seed: int, mode: Any, clips: tuple[float | None, float | None], estimator: Any
) -> None:
    rules = replace(correcting(mode, *clips), kl_estimator=estimator)
    batch = in_float64(mini_batch(old(lengths, seed), rules))
    batch = batch.plus(**{WEIGHTS: importance_weights(batch, Correction(mode, *clips))})
    weights, n = naive_weights(batch, mode, *clips), sum(lengths)
    new = batch.ragged("logprobs").values + 0.3 * drawn(lengths, torch.Generator().manual_seed(seed + 1)).values
    total, gradient, _ = loss_of(rules, batch, new)
    expected, grads = 0.0, []
    rows = zip(batch.ragged("logprobs").like(new).rows(), batch.ragged("advantages").rows(), strict=True)
    for row, (logprobs, advantages) in enumerate(rows):
        proximal, reference = batch.ragged("proximal_logprobs")[row], batch.ragged("ref_logprobs")[row]
        for t, (logprob, a) in enumerate(zip(logprobs.tolist(), advantages.tolist(), strict=True)):
            ratio, w = math.exp(logprob - float(proximal[t])), weights[row][t]
            plain, clipped = a * ratio, a * min(max(ratio, 0.8), 1.2)
            expected -= w * min(plain, clipped) / n
            grads.append(-w * plain / n if plain <= clipped else 0.0)  # of a clipped token it is 0
            difference = float(reference[t]) - float(proximal[t])  # the reward's KL is that of the proximal policy
            kl = -difference if estimator == "k1" else math.expm1(difference) - difference
            assert float(batch.ragged("kl")[row][t]) == pytest.approx(kl, rel=1e-5, abs=1e-6)
    assert total == pytest.approx(expected, rel=1e-7, abs=1e-8)  # the divisor is of float32
    assert gradient.tolist() == pytest.approx(grads, rel=1e-7, abs=1e-8)


@fast
@given(LENGTHS, SEEDS, modes, st.integers(1, 60))
def test_micro_batches_do_not_change_the_corrected_loss(lengths: list[int], seed: int, mode: Any, budget: int) -> None:
    rules = correcting(mode, 1.5, 0.5)
    batch = mini_batch(old(lengths, seed), rules)
    new = batch.ragged("logprobs").values + 0.3 * drawn(lengths, torch.Generator().manual_seed(seed + 1)).values
    whole, cut = (loss_of(rules, batch, new, c) for c in (None, micro_batches(batch.lengths.tolist(), budget)))
    assert cut[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-5, atol=1e-7)
    for name, expected in whole[2].items():
        torch.testing.assert_close(cut[2][name], expected, rtol=1e-5, atol=1e-6)


def test_a_masked_response_has_no_gradient_and_counts_in_the_divisor() -> None:
    samples = scored([2, 3])
    logprobs = samples.ragged("logprobs")
    samples = samples.plus(proximal_logprobs=logprobs.like(logprobs.values + torch.tensor([0.0] * 2 + [0.6] * 3)))
    rules = correcting("sequence_mask", 3.0, None)  # of the second response it is e^1.8 = 6
    batch = mini_batch(samples, rules)
    _, gradient, _ = loss_of(rules, batch, batch.ragged("proximal_logprobs").values)
    assert gradient[2:].tolist() == [0.0] * 3
    assert gradient[:2].tolist() == pytest.approx((-batch.ragged("advantages").values[:2] / 5).tolist())


def test_numbers_of_the_proximal_policy_that_are_not_finite_are_found() -> None:
    samples = old([2, 3], 0)
    proximal = samples.ragged("proximal_logprobs")
    broken = samples.plus(
        proximal_logprobs=proximal.like(proximal.values.clone().index_fill_(0, torch.tensor(3), math.nan))
    )
    error = problem_of(PPO(CORRECTED).prepare(broken))
    assert error is not None and error.sample == 1
    assert "a log-probability of actor.forward of sample 1 of the batch is nan" in str(error)


# --- an off-policy problem that can be enumerated ------------------------------------------------------------------


def test_the_corrected_gradient_is_unbiased_and_others_are_not() -> None:
    """All responses of two tokens out of three, each with its probability under the behaviour policy in place of a
    draw: the loss's gradient is then the expected one."""
    g = torch.Generator().manual_seed(1)
    first, second = torch.randn(3, generator=g), torch.randn(3, 3, generator=g)
    theta = torch.cat([first, second.flatten()]).double().requires_grad_()
    behaviour = theta.detach() + 0.7 * torch.randn(12, generator=g)
    responses = list(itertools.product(range(3), range(3)))
    rewards = torch.randn(9, generator=g).double()

    def logprobs(logits: Tensor) -> Tensor:
        """(18,): of both tokens of each response."""
        start, then = logits[:3].log_softmax(-1), logits[3:].reshape(3, 3).log_softmax(-1)
        return torch.stack([x for a, b in responses for x in (start[a], then[a, b])])

    def of_tokens(values: Tensor) -> Ragged:
        return Ragged(values, torch.full((9,), 2))

    mu = logprobs(behaviour)
    samples = Rollouts(
        logprobs=of_tokens(mu),
        proximal_logprobs=of_tokens(logprobs(theta).detach()),
        advantages=of_tokens(rewards.repeat_interleave(2)),
        policy_weight=of_tokens(mu).sum().exp(),
    )

    def gradient(loss: PolicyLoss, **columns: Ragged) -> Tensor:
        new = of_tokens(logprobs(theta))
        value, _ = loss({"logprobs": new, "entropy": new.like(new.values.detach())}, samples.plus(**columns))
        (slope,) = torch.autograd.grad(value, theta)
        return -slope

    (exact,) = torch.autograd.grad((of_tokens(logprobs(theta)).sum().exp() * rewards).sum(), theta)
    weights = importance_weights(samples, Correction("sequence_truncate", None, None))
    decoupled = PolicyLoss(0.2, "proximal_logprobs", WEIGHTS)
    corrected = gradient(decoupled, **{WEIGHTS: weights})
    torch.testing.assert_close(corrected, exact, rtol=1e-9, atol=1e-12)
    recomputed = gradient(PolicyLoss(0.2, "proximal_logprobs"))  # as if the proximal policy had drawn the tokens
    to_behaviour = gradient(PolicyLoss(1e9, "logprobs"))
    tokens = gradient(decoupled, **{WEIGHTS: importance_weights(samples, Correction("token_truncate", None, None))})
    truncated = gradient(decoupled, **{WEIGHTS: importance_weights(samples, Correction("sequence_truncate", 1.0))})
    for biased in (recomputed, to_behaviour, tokens, truncated):
        assert float((biased - exact).norm() / exact.norm()) > 0.05


# --- metrics ------------------------------------------------------------------------------------------------------


@fast
@given(LENGTHS, SEEDS, modes, bounds)
def test_metrics_are_those_of_the_formulas(
    lengths: list[int], seed: int, mode: Any, clips: tuple[float | None, float | None]
) -> None:
    samples = old(lengths, seed)
    found = correction_metrics(samples, Correction(mode, *clips))
    rows, raw = naive_weights(samples, mode, *clips), naive_weights(samples, mode, None, None)
    if mode.startswith("sequence"):
        rows, raw = [row[:1] for row in rows], [row[:1] for row in raw]
    w, ratios = sum(rows, []), sum(raw, [])
    differences = (samples.ragged("proximal_logprobs").values - samples.ragged("logprobs").values).tolist()
    n = len(differences)
    assert found == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": sum(map(abs, differences)) / n,
            "sampling/sampling_logp_difference/max": max(map(abs, differences)),
            "sampling/importance_sampling_ratio/min": min(w),
            "sampling/importance_sampling_ratio/mean": sum(w) / len(w),
            "sampling/importance_sampling_ratio/max": max(w),
            "sampling/importance_sampling_ratio/clipfrac": sum(a != b for a, b in zip(w, ratios, strict=True)) / len(w),
            "sampling/effective_sample_size": sum(w) ** 2 / (len(w) * sum(x * x for x in w)) if any(w) else 0.0,
            "sampling/kl_k1": -sum(differences) / n,
            "sampling/kl_k3": sum(math.expm1(d) - d for d in differences) / n,
            "sampling/token_mult_prob_error": sum(math.exp(abs(d)) for d in differences) / n,
        },
        rel=1e-4,
        abs=1e-6,
    )


def test_older_tokens_do_not_count_in_the_mismatch_of_engine_and_trainer() -> None:
    """Their difference contains what the policy has learned."""
    samples = old([2, 3], 0)
    ages = samples.ragged("logprobs").like(torch.tensor([0, 1, 2, 0, 1]))
    aged = correction_metrics(samples.plus(ages=ages), Correction())
    differences = samples.ragged("proximal_logprobs").values - samples.ragged("logprobs").values
    assert aged["sampling/token_mult_prob_error"] == pytest.approx(float(differences[[0, 3]].abs().exp().mean()))
    none = samples.plus(ages=ages.like(torch.ones(5, dtype=torch.long)))
    assert "sampling/token_mult_prob_error" not in correction_metrics(none, Correction())


def test_only_a_corrected_run_has_these_metrics() -> None:
    samples = old([2, 4], 0)
    assert not any(name.startswith("sampling/") for name in PPO(PLAIN).sample_metrics(ppo.prepare(samples, PLAIN)))
    metrics = PPO(CORRECTED).sample_metrics(ppo.prepare(samples, CORRECTED))
    assert metrics.keys() >= {"sampling/effective_sample_size", "objective/kl"}
