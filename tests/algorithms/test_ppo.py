"""PPO's arithmetic against plain loops, and what must not change it: how a mini-batch is cut into micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trl_realloc.algorithms import ppo
from trl_realloc.algorithms.advantages import gae, kl_estimate, token_rewards, whiten
from trl_realloc.algorithms.ppo_metrics import objective_metrics, update_metrics
from trl_realloc.algorithms.ppo_settings import PPOSettings
from trl_realloc.algorithms.ppo_weights import SampleWeights, mini_batches, response_widths, sample_weights
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan.batching import micro_batches


LIMIT = 6
PLAIN = PPOSettings(response_length=LIMIT)
LENGTHS = st.lists(st.integers(1, LIMIT), min_size=1, max_size=8)
SEEDS = st.integers(0, 2**16)
fast = settings(max_examples=60, deadline=None)


def drawn(lengths: list[int], generator: torch.Generator) -> Ragged:
    return Ragged(torch.randn(sum(lengths), generator=generator), torch.tensor(lengths))


def scored(lengths: list[int], seed: int = 0) -> Rollouts:
    """Samples as they stand after the scoring calls."""
    g = torch.Generator().manual_seed(seed)
    n = len(lengths)
    return Rollouts(
        index=torch.arange(n),
        prompts=Ragged.of([[1, 2]] * n, torch.long),
        responses=Ragged.of([[5] * k for k in lengths], torch.long),
        logprobs=drawn(lengths, g),
        ref_logprobs=drawn(lengths, g),
        values=drawn([k + 1 for k in lengths], g),
        scores=torch.randn(n, generator=g),
        has_eos=torch.tensor([k < LIMIT for k in lengths]),
    )


def assert_ragged_close(ours: Ragged, expected: Ragged) -> None:
    assert ours.lengths.tolist() == expected.lengths.tolist()
    torch.testing.assert_close(ours.values, expected.values, rtol=1e-4, atol=1e-5)


# --- rewards and advantages ---------------------------------------------------------------------------------------


@fast
@given(st.floats(-20, 0), st.floats(-20, 0))
def test_kl_estimates(p: float, q: float) -> None:
    logprob, ref = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    assert float(kl_estimate(logprob, ref, "k1")) == pytest.approx(p - q)
    k3 = float(kl_estimate(logprob, ref, "k3"))
    assert k3 == pytest.approx(math.exp(q - p) - 1 - (q - p), abs=1e-9) and k3 >= 0


def test_both_estimators_have_the_same_mean() -> None:
    p, q = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1).double()
    exact = float((p.exp() * (p - q)).sum())
    for estimator in ("k1", "k3"):
        estimate = kl_estimate(p, q, estimator)  # type: ignore[arg-type]
        assert float((p.exp() * estimate).sum()) == pytest.approx(exact, rel=1e-5)


@fast
@given(LENGTHS, SEEDS, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_errors(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    g = torch.Generator().manual_seed(seed)
    rewards, values = drawn(lengths, g), drawn(lengths, g)
    advantages, returns = gae(rewards, values, gamma, lam)
    for row, length in enumerate(lengths):
        r, v = rewards[row].tolist(), [*values[row].tolist(), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        naive = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]
        assert advantages[row].tolist() == pytest.approx(naive, abs=1e-5)
        assert returns[row].tolist() == pytest.approx([a + b for a, b in zip(naive, v[:-1], strict=True)], abs=1e-5)


def test_undiscounted_gae_returns_are_the_rewards_to_go() -> None:
    rewards = Ragged.of([[1.0, 2.0, 4.0], [8.0]], torch.float32)
    _, returns = gae(rewards, rewards.like(torch.tensor([3.0, -1.0, 2.0, 5.0])), 1.0, 1.0)
    assert returns.values.tolist() == pytest.approx([7.0, 6.0, 4.0, 8.0])


@fast
@given(LENGTHS, SEEDS, st.booleans(), st.integers(0, 4), st.floats(0, 1))
def test_whitening_is_numpys_standardisation_group_by_group(
    lengths: list[int], seed: int, shift_mean: bool, group_size: int, masked: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    values = drawn(lengths, g)
    mask = torch.rand(len(values.values), generator=g) >= masked
    whitened = whiten(values, mask, shift_mean=shift_mean, group_size=group_size)
    size = group_size or len(lengths)
    for start in range(0, len(lengths), size):
        rows = range(start, min(start + size, len(lengths)))
        at = torch.isin(values.row_of, torch.tensor(list(rows)))
        x, kept = values.values[at].double().numpy(), mask[at].numpy()
        if kept.sum() < 2:
            expected = x
        else:
            mean, variance = x[kept].mean(), x[kept].var(ddof=1)
            expected = (x - mean) / np.sqrt(variance + 1e-8) + (0 if shift_mean else mean)
        np.testing.assert_allclose(whitened.values[at].numpy(), expected, rtol=1e-3, atol=1e-4)


def test_ten_million_tokens_are_whitened_as_exactly_as_ten() -> None:
    """Sums in float32, one token after the other, are 1 % wrong there."""
    drawn_values = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0)) + 3.0
    values = Ragged(drawn_values, torch.tensor([len(drawn_values)]))
    white = whiten(values, torch.ones(len(drawn_values), dtype=torch.bool), shift_mean=True).values.double()
    assert abs(float(white.mean())) < 1e-5 and abs(float(white.var()) - 1) < 1e-5


def test_a_response_that_ended_early_has_a_last_state_and_one_at_the_limit_has_not() -> None:
    samples = scored([1, 3, LIMIT])
    assert ppo.value_lengths(samples, PLAIN).tolist() == [2, 4, LIMIT]
    early = scored([1, 3, 3])
    assert ppo.value_lengths(early, PLAIN).tolist() == [2, 4, 4]


def test_with_match_trl_the_limit_is_the_longest_response_of_the_rank() -> None:
    trl = replace(PLAIN, match_trl=True, local_batch_size=2)
    samples = scored([1, 3, 2, 2, 5, 4])
    assert ppo.value_lengths(samples, trl).tolist() == [2, 3, 2, 2, 5, 5]
    assert response_widths(samples, trl).tolist() == [3, 3, 2, 2, 5, 5]


def test_the_score_falls_on_the_last_state_or_at_the_limit_on_the_last_token() -> None:
    kl = Ragged.of([[1.0, 2.0], [3.0, 4.0]], torch.float32)
    early_and_not = token_rewards(kl, torch.tensor([10.0, 20.0]), torch.tensor([3, 2]), kl_coef=0.5)
    assert early_and_not[0].tolist() == [-0.5, -1.0, 10.0]
    assert early_and_not[1].tolist() == [-1.5, 18.0]


@fast
@given(LENGTHS, SEEDS, st.floats(0, 2))
def test_rewards_sum_to_score_less_kl(lengths: list[int], seed: int, kl_coef: float) -> None:
    samples = scored(lengths, seed)
    kl, scores = samples.ragged("logprobs"), samples.tensor("scores")
    rewards = token_rewards(kl, scores, ppo.value_lengths(samples, PLAIN), kl_coef)
    torch.testing.assert_close(rewards.sum(), scores - kl_coef * kl.sum(), rtol=1e-4, atol=1e-5)


def test_a_response_without_eos_is_fined() -> None:
    samples = ppo.prepare(scored([2, LIMIT]), replace(PLAIN, missing_eos_penalty=1.5))
    given_scores, fined = samples.tensor("scores"), samples.tensor("penalized_scores")
    torch.testing.assert_close(fined, given_scores - torch.tensor([0.0, 1.5]))


@fast
@given(LENGTHS, SEEDS, st.booleans(), st.data())
def test_what_is_prepared_does_not_hang_on_the_order_of_samples(
    lengths: list[int], seed: int, whiten_rewards: bool, data: st.DataObject
) -> None:
    rules = replace(PLAIN, whiten_rewards=whiten_rewards, kl_estimator="k3", missing_eos_penalty=1.0)
    samples = scored(lengths, seed)
    order = data.draw(st.permutations(range(len(lengths))))
    one, other = ppo.prepare(samples, rules), ppo.prepare(samples.select(order), rules).sorted()
    for name in ("kl", "advantages", "old_values", "returns"):
        assert_ragged_close(other.ragged(name), one.ragged(name))


@fast
@given(st.integers(1, 3), st.integers(1, 4), SEEDS, st.booleans())
def test_with_match_trl_a_rank_is_prepared_as_if_alone(ranks: int, local: int, seed: int, whiten_rewards: bool) -> None:
    draw = np.random.default_rng(seed)
    samples = scored(draw.integers(1, LIMIT + 1, size=ranks * local).tolist(), seed)
    rules = replace(PLAIN, match_trl=True, local_batch_size=local, whiten_rewards=whiten_rewards)
    together = ppo.prepare(samples, rules)
    for start in range(0, ranks * local, local):
        mine = list(range(start, start + local))
        alone = ppo.prepare(samples.select(mine), rules)
        for name in ("advantages", "old_values", "returns"):
            assert_ragged_close(together.select(mine).ragged(name), alone.ragged(name))


def test_advantages_are_white_over_the_global_batch() -> None:
    advantages = ppo.prepare(scored([1, 4, LIMIT, 2, 5]), PLAIN).ragged("advantages").values
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-6)
    assert float(advantages.std()) == pytest.approx(1, abs=1e-5)


# --- mini-batches and weights -------------------------------------------------------------------------------------


@fast
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), SEEDS, st.integers(0, 99))
def test_every_epochs_mini_batches_are_a_partition(n: int, mini: int, epochs: int, seed: int, step: int) -> None:
    rules = replace(PLAIN, num_mini_batches=mini, num_ppo_epochs=epochs)
    batches = mini_batches(n, rules, seed, step)
    assert len(batches) == mini * epochs
    for epoch in range(epochs):
        parts = batches[epoch * mini : (epoch + 1) * mini]
        assert sorted(i for part in parts for i in part) == list(range(n))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert batches == mini_batches(n, rules, seed, step)


def test_seed_step_and_epoch_each_change_the_draw() -> None:
    rules = replace(PLAIN, num_ppo_epochs=2)
    draws = [mini_batches(50, rules, *at) for at in ((0, 0), (0, 1), (1, 0))]
    orders = [tuple(batch) for draw in draws for batch in draw]
    assert len(set(orders)) == len(orders)


@fast
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), SEEDS)
def test_with_match_trl_mini_batches_hold_as_many_of_each_rank(ranks: int, mini: int, size: int, seed: int) -> None:
    local = mini * size
    rules = replace(PLAIN, match_trl=True, local_batch_size=local, num_mini_batches=mini, num_ppo_epochs=2)
    batches = mini_batches(ranks * local, rules, seed, 0)
    assert len(batches) == 2 * mini
    for batch in batches:
        assert [i // local for i in batch] == [rank for rank in range(ranks) for _ in range(size)]


def weighed(samples: Rollouts, rules: PPOSettings) -> tuple[Rollouts, SampleWeights]:
    samples = ppo.prepare(samples, rules)
    samples = samples.plus(width=response_widths(samples, rules))
    weights = sample_weights(samples, rules)
    return samples.plus(policy_weight=weights.policy, value_weight=weights.value), weights


@fast
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), SEEDS, st.booleans())
def test_weights_of_all_tokens_sum_to_one(ranks: int, micro: int, per_device: int, seed: int, match_trl: bool) -> None:
    local = micro * per_device
    lengths = np.random.default_rng(seed).integers(1, LIMIT + 1, size=ranks * local).tolist()
    rules = replace(
        PLAIN, match_trl=match_trl, local_batch_size=local, per_device_train_batch_size=per_device, num_mini_batches=1
    )
    samples, weights = weighed(scored(lengths), rules)
    assert float((weights.policy * samples.ragged("responses").lengths).sum()) == pytest.approx(1, abs=1e-5)
    assert float((weights.value * samples.ragged("returns").lengths).sum()) == pytest.approx(1, abs=1e-5)
    if match_trl:
        assert float((weights.statistic * samples.tensor("width")).sum()) == pytest.approx(1, abs=1e-5)
        assert weights.group.tolist() == [i // per_device for i in range(ranks * local)]


# --- losses -------------------------------------------------------------------------------------------------------


def outputs_of(samples: Rollouts, new: Ragged, values: Ragged, at: list[int]) -> dict[str, Ragged]:
    """What a model with these log-probabilities and values says of the samples at these positions."""
    logprobs = new.select(at)
    return {"logprobs": logprobs, "entropy": logprobs.like(-logprobs.values.detach()), "values": values.select(at)}


@fast
@given(LENGTHS, SEEDS, st.integers(1, 60), st.booleans())
def test_no_cut_into_micro_batches_changes_losses_gradients_or_statistics(
    lengths: list[int], seed: int, budget: int, match_trl: bool
) -> None:
    rules = replace(PLAIN, match_trl=match_trl, local_batch_size=len(lengths), per_device_train_batch_size=2)
    samples, _ = weighed(scored(lengths, seed), rules)
    g = torch.Generator().manual_seed(seed + 1)
    start = [samples.ragged(name).values for name in ("logprobs", "values")]
    moved = [x + 0.3 * torch.randn(x.shape, generator=g) for x in start]
    losses = ppo.PolicyLoss(cliprange=0.2), ppo.ValueLoss(cliprange_value=0.2, vf_coef=0.1)

    def run(cut: list[list[int]]) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
        leaves = [x.clone().requires_grad_() for x in moved]
        new, values = samples.ragged("logprobs").like(leaves[0]), samples.ragged("values").like(leaves[1])
        sums: dict[str, Tensor] = {}
        total = torch.zeros(())
        for part in cut:
            for loss in losses:
                value, statistics = loss(outputs_of(samples, new, values, part), samples.select(part))
                value.backward()
                total += value.detach()
                for name, per_sample in statistics.items():
                    sums.setdefault(name, torch.zeros(len(lengths)))[part] = per_sample
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        assert len(gradients) == 2
        return gradients, sums, total

    whole = run([list(range(len(lengths)))])
    parts = run(micro_batches(samples.lengths.tolist(), budget))
    for ours, expected in zip(parts[0], whole[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
    assert parts[1].keys() == whole[1].keys()
    for name, expected in whole[1].items():
        torch.testing.assert_close(parts[1][name], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts[2], whole[2], rtol=1e-5, atol=1e-6)


@fast
@given(LENGTHS, SEEDS)
def test_the_losses_are_means_over_the_tokens_of_the_mini_batch(lengths: list[int], seed: int) -> None:
    samples, _ = weighed(scored(lengths, seed), PLAIN)
    g = torch.Generator().manual_seed(seed + 1)
    new, values = drawn(lengths, g), drawn([k + 1 for k in lengths], g)
    outputs = outputs_of(samples, new, values, list(range(len(lengths))))
    policy, value = [], []
    for row, length in enumerate(lengths):
        old, advantage = samples.ragged("logprobs")[row], samples.ragged("advantages")[row]
        for t in range(length):
            ratio = math.exp(float(new[row][t] - old[t]))
            a = float(advantage[t])
            policy.append(-min(a * ratio, a * min(max(ratio, 0.8), 1.2)))
        for t in range(int(samples.ragged("returns").lengths[row])):
            v, v0 = float(values[row][t]), float(samples.ragged("values")[row][t])
            target = float(samples.ragged("returns")[row][t])
            value.append(0.5 * max((v - target) ** 2, (min(max(v, v0 - 0.1), v0 + 0.1) - target) ** 2))
    ours = ppo.PolicyLoss(0.2)(outputs, samples)[0], ppo.ValueLoss(0.1, 0.5)(outputs, samples)[0]
    assert float(ours[0]) == pytest.approx(np.mean(policy), rel=1e-4, abs=1e-5)
    assert float(ours[1]) == pytest.approx(0.5 * np.mean(value), rel=1e-4, abs=1e-5)


def test_a_clipped_token_has_no_gradient() -> None:
    samples, _ = weighed(scored([3, 3]), PLAIN)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0])
    samples = samples.plus(advantages=samples.ragged("advantages").like(advantages))
    steps = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.1, 0.1])
    leaf = (samples.ragged("logprobs").values + steps).requires_grad_()
    new = samples.ragged("logprobs").like(leaf)
    loss, statistics = ppo.PolicyLoss(0.2)({"logprobs": new, "entropy": new.like(leaf.detach())}, samples)
    loss.backward()
    assert leaf.grad is not None
    assert (leaf.grad == 0).tolist() == [True, False, False, True, False, False]  # too far in the good direction
    assert statistics["clipped"].tolist() == [1.0, 1.0]


# --- statistics ---------------------------------------------------------------------------------------------------


def test_statistics_of_an_unchanged_policy() -> None:
    samples, weights = weighed(scored([2, LIMIT, 4]), PLAIN)
    outputs = outputs_of(samples, samples.ragged("logprobs"), samples.ragged("values"), [0, 1, 2])
    sums = ppo.PolicyLoss(0.2)(outputs, samples)[1] | ppo.ValueLoss(0.2, 0.1)(outputs, samples)[1]
    metrics = update_metrics([(weights, sums), (weights, sums)])
    advantages = samples.ragged("advantages").values
    assert metrics["val/ratio"] == 1 and metrics["val/ratio_var"] == 0
    assert metrics["policy/approxkl_avg"] == metrics["policy/clipfrac_avg"] == metrics["val/clipfrac_avg"] == 0
    assert metrics["loss/policy_avg"] == pytest.approx(-float(advantages.mean()), abs=1e-6)
    assert metrics["policy/entropy_avg"] == pytest.approx(-float(samples.ragged("logprobs").values.mean()), rel=1e-5)


def test_one_optimizer_step_has_no_variance_of_ratios() -> None:
    samples, weights = weighed(scored([2, 3]), PLAIN)
    outputs = outputs_of(samples, samples.ragged("logprobs"), samples.ragged("values"), [0, 1])
    assert update_metrics([(weights, ppo.PolicyLoss(0.2)(outputs, samples)[1])])["val/ratio_var"] == 0.0


def test_a_step_of_one_role_reports_that_roles_statistics() -> None:
    samples, weights = weighed(scored([2, 3]), PLAIN)
    outputs = outputs_of(samples, samples.ragged("logprobs"), samples.ragged("values"), [0, 1])
    metrics = update_metrics([(weights, ppo.ValueLoss(0.2, 0.1)(outputs, samples)[1])])
    assert metrics.keys() == {"loss/value_avg", "val/clipfrac_avg"}


def test_objective_metrics_sum_over_a_response_and_average_over_samples() -> None:
    samples = scored([2, 3]).plus(responses=Ragged.of([[4, 9], [9, 4, 4]], torch.long))
    samples = ppo.prepare(samples, replace(PLAIN, kl_coef=0.25))
    metrics = objective_metrics(samples, replace(PLAIN, kl_coef=0.25), eos_token_id=4)
    kl = samples.ragged("logprobs").values - samples.ragged("ref_logprobs").values
    assert metrics["objective/kl"] == pytest.approx(float(kl.sum()) / 2, rel=1e-5)
    assert metrics["objective/non_score_reward"] == pytest.approx(-0.25 * float(kl.sum()) / 2, rel=1e-5)
    assert metrics["objective/scores"] == pytest.approx(float(samples.tensor("scores").mean()))
    assert metrics["objective/rlhf_reward"] == pytest.approx(
        metrics["objective/scores"] + metrics["objective/non_score_reward"]
    )
    assert metrics["objective/entropy"] == pytest.approx(-float(samples.ragged("logprobs").values.sum()) / 2, rel=1e-5)
    assert metrics["val/num_eos_tokens"] == 3
    assert objective_metrics(samples, PLAIN, eos_token_id=None)["val/num_eos_tokens"] == 0
