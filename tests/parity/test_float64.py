"""Losses and gradients beside references in float64, for 50 random settings of each algorithm.

The references are the formulas, written anew with dense softmaxes. PPO's loss is this package's, in float32 as it
runs. GRPO's and RLOO's are TRL's, on leaf tensors as in a run; their derivatives reach the logits by `LinearLoss`.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from torch import Tensor

from trl_realloc.algorithms import ppo
from trl_realloc.algorithms.corrections import MODES, Correction
from trl_realloc.algorithms.ppo_settings import PPOSettings
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.algorithms.trainer_loss import LOGPROB_GRADS, LinearLoss
from trl_realloc.engines.requests import SamplingMask
from trl_realloc.engines.training.token_logprobs import TokenLogprobs
from trl_realloc.trainer.policy.mismatch import sampling_logps
from trl_realloc.trainer.policy.step_buffer import Rows


VOCABULARY, LIMIT, SEEDS = 9, 7, range(50)
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def randn(draw: random.Random, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    return scale * torch.randn(*shape, generator=generator, dtype=dtype)


def kept(x: Tensor, sampling_mask: SamplingMask | None) -> Tensor:
    """(rows, vocabulary) bool: the tokens that the rules keep, one row after the other."""
    rows = []
    for row in x.tolist():
        sampling_mask = sampling_mask or SamplingMask()
        order = sorted(range(len(row)), key=lambda token: -row[token])
        order = [token for token in order if math.exp(row[token] - row[order[0]]) >= sampling_mask.min_p]
        order = order[: sampling_mask.top_k or None]
        total, before, nucleus = sum(math.exp(row[token]) for token in order), 0.0, set[int]()
        for token in order:
            if before < sampling_mask.top_p * total:
                nucleus.add(token)
            before += math.exp(row[token])
        rows.append([token in nucleus for token in range(len(row))])
    return torch.tensor(rows)


def logprobs_of(logits: Tensor, targets: Tensor, temperature: float, sampling_mask: SamplingMask | None) -> Tensor:
    """(tokens,) over the tokens that are kept, and the target."""
    x = logits.double() / temperature
    inside = kept(x.detach(), sampling_mask).scatter(1, targets[:, None], True)
    return x.masked_fill(~inside, -math.inf).log_softmax(-1).gather(1, targets[:, None])[:, 0]


# --- PPO ------------------------------------------------------------------------------------------------------------


def ppo_settings(draw: random.Random) -> PPOSettings:
    return PPOSettings(
        response_length=LIMIT,
        kl_coef=draw.choice([0.0, 0.05, 0.4]),
        kl_estimator=draw.choice(["k1", "k3"]),
        whiten_rewards=draw.random() < 0.3,
        missing_eos_penalty=draw.choice([None, 1.0]),
        gamma=draw.choice([1.0, 0.97]),
        lam=draw.choice([0.95, 0.5, 1.0]),
        cliprange=draw.choice([0.2, 0.02]),
        cliprange_value=draw.choice([0.2, 0.05]),
        vf_coef=draw.choice([0.1, 1.0]),
        vllm_importance_sampling_correction=draw.random() < 0.6,
        vllm_importance_sampling_mode=draw.choice(MODES),  # type: ignore[arg-type]
        vllm_importance_sampling_clip_max=draw.choice([None, 1.1, 3.0]),
        vllm_importance_sampling_clip_min=draw.choice([None, 0.9]),
    )


def whitened(values: list[list[float]], *, shift: bool) -> list[list[float]]:
    flat = [value for row in values for value in row]
    mean = sum(flat) / len(flat)
    variance = sum((value - mean) ** 2 for value in flat) / (len(flat) - 1)
    return [[(value - mean) / math.sqrt(variance + 1e-8) + (0 if shift else mean) for value in row] for row in values]


def weights_of(rows: list[list[float]], mode: str, least: float | None, most: float | None) -> list[list[float]]:
    """The importance weights of tokens, from rows of log ratios."""

    def bounded(ratio: float) -> float:
        low, high = -math.inf if least is None else least, math.inf if most is None else most
        if mode.endswith("mask"):
            return ratio if low <= ratio <= high else 0.0
        return min(max(ratio, low), high)

    if mode.startswith("sequence"):
        return [[bounded(math.exp(sum(row)))] * len(row) for row in rows]
    return [[bounded(math.exp(value)) for value in row] for row in rows]


def ppo_reference(samples: Rollouts, s: PPOSettings, new: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The policy's and the critic's loss of one mini-batch of all samples, from new log-probabilities and values."""
    mu, pi, ref, old = (
        [row.tolist() for row in samples.ragged(name).rows()]
        for name in ("logprobs", "proximal_logprobs", "ref_logprobs", "values")
    )
    corrects = bool(s.vllm_importance_sampling_correction)
    before = pi if corrects else mu
    rewards, counts = [], []
    for i, row in enumerate(before):
        log_ratio = [q - p for p, q in zip(row, ref[i], strict=True)]
        kl = [-x if s.kl_estimator == "k1" else math.exp(x) - 1 - x for x in log_ratio]
        counts.append(len(row) + (len(row) < LIMIT))
        of_row = [-s.kl_coef * x for x in kl] + [0.0] * (counts[i] - len(row))
        penalty = 0.0 if bool(samples.tensor("has_eos")[i]) else s.missing_eos_penalty or 0.0
        of_row[-1] += float(samples.tensor("scores")[i]) - penalty
        rewards.append(of_row)
    rewards = whitened(rewards, shift=False) if s.whiten_rewards else rewards
    advantages, returns = [], []
    for i, row in enumerate(rewards):
        v = [*old[i][: counts[i]], 0.0]
        deltas = [row[t] + s.gamma * v[t + 1] - v[t] for t in range(counts[i])]
        of_row = [sum((s.gamma * s.lam) ** (k - t) * deltas[k] for k in range(t, counts[i])) for t in range(counts[i])]
        returns.append([a + b for a, b in zip(of_row, v[:-1], strict=True)])
        advantages.append(of_row[: len(before[i])])
    advantages = whitened(advantages, shift=True)
    ratios = [[p - m for m, p in zip(*of, strict=True)] for of in zip(mu, pi, strict=True)]
    bounds = s.vllm_importance_sampling_clip_min, s.vllm_importance_sampling_clip_max
    w = weights_of(ratios, s.vllm_importance_sampling_mode, *bounds) if corrects else [[1.0] * len(row) for row in mu]

    def flat(rows: list[list[float]]) -> Tensor:
        return torch.tensor([value for row in rows for value in row], dtype=torch.float64)

    ratio = torch.exp(new - flat(before))
    clipped = ratio.clamp(1 - s.cliprange, 1 + s.cliprange)
    policy = (-flat(w) * torch.minimum(flat(advantages) * ratio, flat(advantages) * clipped)).mean()
    kept_values = flat([row[:count] for row, count in zip(old, counts, strict=True)])
    near = torch.minimum(torch.maximum(values, kept_values - s.cliprange_value), kept_values + s.cliprange_value)
    target = flat(returns)
    return policy, s.vf_coef * 0.5 * torch.maximum((values - target) ** 2, (near - target) ** 2).mean()


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo(seed: int) -> None:
    draw = random.Random(seed)
    settings, temperature = ppo_settings(draw), draw.choice([1.0, 0.7])
    lengths = [draw.randint(1, LIMIT) for _ in range(5)]
    tokens = sum(lengths)
    ids = torch.tensor([draw.randrange(VOCABULARY) for _ in range(tokens)])

    def column(of: Tensor) -> Ragged:
        return Ragged(of.float(), torch.tensor(lengths))

    logits = randn(draw, tokens, VOCABULARY, dtype=torch.float32)
    before = logprobs_of(logits + randn(draw, tokens, VOCABULARY, scale=0.2), ids, temperature, None)
    old_values = Ragged(randn(draw, tokens + 5).float(), torch.tensor(lengths) + 1)
    samples = Rollouts(
        index=torch.arange(5),
        prompts=Ragged.of([[1]] * 5, torch.long),
        responses=Ragged(ids, torch.tensor(lengths)),
        logprobs=column(before + randn(draw, tokens, scale=0.1)),
        proximal_logprobs=column(before),
        ref_logprobs=column(before + randn(draw, tokens, scale=0.3)),
        values=old_values,
        scores=randn(draw, 5).float(),
        has_eos=torch.tensor([draw.random() < 0.5 for _ in range(5)]),
    )
    algorithm = ppo.PPO(settings)
    batch = next(algorithm.mini_batches(algorithm.prepare(samples), 0)).sorted()
    leaf = logits.clone().requires_grad_()
    made = TokenLogprobs.apply(leaf * 1, ids, temperature)
    new_values = (old_values.values + randn(draw, tokens + 5, scale=0.2).float()).requires_grad_()
    outputs = {"logprobs": column(made[0]), "entropy": column(made[1])}
    policy, _ = algorithm.loss("actor.train").of_tokens(outputs, batch)
    value, _ = algorithm.loss("critic.train").of_tokens({"values": old_values.like(new_values)}, batch)
    (policy + value).backward()

    exact = logits.double().requires_grad_()
    exact_values = new_values.detach().double().requires_grad_()
    counts = ppo.value_lengths(samples, settings)
    cropped = old_values.like(exact_values).crop(counts).values
    wanted = ppo_reference(samples, settings, logprobs_of(exact, ids, temperature, None), cropped)
    sum(wanted).backward()  # type: ignore[union-attr]
    torch.testing.assert_close((policy.double(), value.double()), wanted, rtol=1e-5, atol=1e-5)
    for ours, theirs in ((leaf.grad, exact.grad), (new_values.grad, exact_values.grad)):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)


# --- GRPO and RLOO --------------------------------------------------------------------------------------------------


class Batch:
    """Completions of random lengths with everything that a loss reads, (rows, `LIMIT`) each, and the tokens' logits."""

    def __init__(self, draw: random.Random) -> None:
        self.rows = 4
        self.lengths = [draw.randint(1, LIMIT) for _ in range(self.rows)]
        self.mask = torch.tensor([[1] * n + [0] * (LIMIT - n) for n in self.lengths])
        self.ids = torch.tensor([[draw.randrange(VOCABULARY) for _ in range(LIMIT)] for _ in range(self.rows)])
        self.temperature = draw.choice([1.0, 0.6])
        masks = [None, SamplingMask(top_p=0.8), SamplingMask(top_k=4), SamplingMask(0.9, 6, 0.05)]
        self.sampling_mask = draw.choice(masks)
        self.logits = randn(draw, int(self.mask.sum()), VOCABULARY, scale=1.5)
        self.targets = self.ids[self.mask.bool()]
        now = self.dense(logprobs_of(self.logits, self.targets, self.temperature, self.sampling_mask))
        self.old, self.engine, self.reference = (
            (now + randn(draw, self.rows, LIMIT, scale=scale)) * self.mask for scale in (0.15, 0.2, 0.3)
        )
        self.advantages = randn(draw, self.rows)

    def dense(self, flat: Tensor) -> Tensor:
        """(rows, `LIMIT`), from the tokens of all rows."""
        return torch.zeros(self.mask.shape, dtype=torch.float64).masked_scatter(self.mask.bool(), flat)

    def by_slopes(self, loss_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """A loss of log-probabilities, and its gradient by the logits as an engine computes it."""
        leaf = self.logits.clone().requires_grad_()
        logprobs, entropies = TokenLogprobs.apply(leaf * 1, self.targets, self.temperature, self.sampling_mask)
        values = self.dense(logprobs.detach()).requires_grad_()
        loss = loss_of(values)
        loss.backward()  # type: ignore[no-untyped-call]
        prompts = torch.ones(self.rows, 1, dtype=torch.long)
        rows = Rows.of(torch.cat([prompts, self.ids], 1), torch.cat([prompts, self.mask], 1), LIMIT)
        assert values.grad is not None
        column = rows.samples.ragged("responses")
        samples = rows.samples.plus(**{LOGPROB_GRADS: rows.unpadded(values.grad)})
        value, _ = LinearLoss()({"logprobs": column.like(logprobs), "entropy": column.like(entropies)}, samples)
        value.backward()
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    def exactly(self, loss_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The same by autograd through dense softmaxes."""
        leaf = self.logits.clone().requires_grad_()
        loss = loss_of(self.dense(logprobs_of(leaf, self.targets, self.temperature, self.sampling_mask)))
        loss.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    def inputs(self, **columns: Any) -> dict[str, Any]:
        prompts = torch.ones(self.rows, 1, dtype=torch.long)
        made = {"prompt_ids": prompts, "prompt_mask": prompts, "completion_ids": self.ids}
        return {**made, "completion_mask": self.mask, "advantages": self.advantages, **columns}


def loss_by_trl(kind: type, inputs: dict[str, Any], **attributes: Any) -> Callable[[Tensor], Tensor]:
    """TRL's loss as a function of log-probabilities, of a trainer that has nothing but what the loss reads."""

    def loss_of(logprobs: Tensor) -> Tensor:
        made: Any = object.__new__(kind)
        accelerator = SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
        )
        vars(made).update(
            accelerator=accelerator,
            model=SimpleNamespace(training=True),
            aux_loss_enabled=False,
            _metrics={"train": defaultdict(list)},
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
            **attributes,
        )
        return made._compute_loss(None, inputs)  # type: ignore[no-any-return]

    return loss_of


def grpo_reference(batch: Batch, s: dict[str, Any], logprobs: Tensor) -> Tensor:
    mask, advantages = batch.mask.double(), batch.advantages[:, None]
    counts = mask.sum(1, keepdim=True)
    log_ratio = (logprobs - batch.old) * mask
    if s["importance_sampling_level"] == "sequence":
        log_ratio_of_loss = log_ratio.sum(1, keepdim=True) / counts
    else:
        log_ratio_of_loss = logprobs - batch.old
    r, kind, weights = log_ratio_of_loss.exp(), s["loss_type"], s["weights"]
    if kind == "cispo":
        per_token = -r.detach().clamp(max=s["epsilon_high"]) * advantages * logprobs
    elif kind == "sapo":
        tau = torch.where(advantages > 0, 1.0, 1.05)
        per_token = -torch.sigmoid(tau * (r - 1)) * 4 / tau * advantages
    elif kind == "vespo":
        least = math.log(1e-8)
        log_w = log_ratio.clamp(-20, 20).sum(1, keepdim=True)
        log_w = log_w + (mask * weights.log().clamp(least, 20)).sum(1, keepdim=True) if s["corrects"] else log_w
        log_w = log_w.clamp(least, 20).detach()
        k, lam = torch.where(advantages >= 0, 2.0, 3.0), torch.where(advantages >= 0, 3.0, 2.0)
        per_token = -torch.exp(lam + k * log_w - lam * log_w.exp()) * advantages * logprobs
    else:
        first = r if s["delta"] is None else r.clamp(max=s["delta"])
        clipped = r.clamp(1 - s["epsilon_low"], 1 + s["epsilon_high"])
        per_token = -torch.minimum(first * advantages, clipped * advantages)
        r = first
    if s["corrects"] and kind != "vespo":
        per_token = per_token * weights
    if s["beta"]:
        difference = batch.reference - logprobs
        k3 = difference.exp() - 1 - difference
        per_token = per_token + s["beta"] * (k3 * (log_ratio_of_loss.exp() if s["bias_corrected"] else 1.0))
    per_token = per_token * mask
    if kind in ("grpo", "sapo"):
        return (per_token.sum(1) / counts[:, 0]).mean() / 2
    if kind == "luspo":
        return per_token.sum(1).mean() / 2
    if kind == "bnpo":
        return per_token.sum() / mask.sum() / 2
    return per_token.sum() / (batch.rows * LIMIT * 2 if kind == "dr_grpo" else 23.0 * 2 / 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_grpo(seed: int) -> None:
    draw = random.Random(seed)
    batch = Batch(draw)
    kind = (*CLIPPED, "cispo", "sapo", "vespo")[seed % 8]
    level = "token" if kind in ("vespo", "cispo") else draw.choice(["token", "sequence"])
    mode = draw.choice(["token_truncate", "token_mask"] if kind == "vespo" else list(MODES))
    correction = Correction(mode, draw.choice([1.3, 3.0]), draw.choice([None, 0.7]))  # type: ignore[arg-type]
    ratios = batch.old - batch.engine
    sums = ratios.sum(1, keepdim=True) if correction.is_of_sequences else ratios
    s: dict[str, Any] = {
        "loss_type": kind,
        "importance_sampling_level": level,
        "beta": draw.choice([0.0, 0.04]),
        "epsilon_low": draw.choice([0.2, 0.05]),
        "epsilon_high": draw.choice([0.28, 0.1]) if kind != "cispo" else 1.1,
        "delta": draw.choice([None, 1.2]) if kind in CLIPPED else None,
        "bias_corrected": draw.random() < 0.5,
        "corrects": draw.random() < 0.7,
    }
    rows = [row[:n] for row, n in zip(ratios.tolist(), batch.lengths, strict=True)]
    exact = weights_of(rows, mode, correction.clip_min, correction.clip_max)
    s["weights"] = torch.tensor([row + [1.0] * (LIMIT - len(row)) for row in exact], dtype=torch.float64)
    inputs = batch.inputs(
        old_per_token_logps=batch.old,
        sampling_per_token_logps=batch.engine,
        ref_per_token_logps=batch.reference,
        **({"importance_sampling_ratio": correction.bounded(sums.exp())} if s["corrects"] else {}),
        num_items_in_batch=torch.tensor(23.0),
    )
    arguments = SimpleNamespace(
        **{"delta": s["delta"], "use_bias_correction_kl": s["bias_corrected"], "steps_per_generation": 4},
        **{"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        **{"vespo_k_pos": 2.0, "vespo_k_neg": 3.0, "vespo_lambda_pos": 3.0, "vespo_lambda_neg": 2.0},
    )
    loss_of = loss_by_trl(
        trl.GRPOTrainer,
        inputs,
        args=arguments,
        **{name: s[name] for name in ("loss_type", "importance_sampling_level", "beta", "epsilon_low", "epsilon_high")},
        **{"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "_entropy_bonus_enabled": False},
        **{"use_vllm": True, "vllm_importance_sampling_correction": s["corrects"]},
        **{"current_gradient_accumulation_steps": 2, "max_completion_length": LIMIT},
    )
    made, wanted = batch.by_slopes(loss_of), batch.exactly(lambda logprobs: grpo_reference(batch, s, logprobs))
    torch.testing.assert_close(made, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo(seed: int) -> None:
    draw = random.Random(seed)
    batch, low, high, corrects = Batch(draw), draw.choice([0.2, 0.05]), draw.choice([0.2, 0.4]), draw.random() < 0.5
    old = (batch.old * batch.mask).sum(1)
    if corrects:  # to the policy that drew the completions
        told = [row[:n] for row, n in zip(batch.engine, batch.lengths, strict=True)]
        old = sampling_logps(told, batch.mask, old)
    inputs = batch.inputs(old_logps=old)
    loss_of = loss_by_trl(trl.RLOOTrainer, inputs, epsilon_low=low, epsilon_high=high)

    def reference(logprobs: Tensor) -> Tensor:
        losses = []
        for row, n in enumerate(batch.lengths):
            before = (batch.engine if corrects else batch.old)[row, :n].sum()
            r = torch.exp(logprobs[row, :n].sum() - before)
            advantage = batch.advantages[row]
            losses.append(-torch.minimum(r * advantage, r.clamp(1 - low, 1 + high) * advantage))
        return torch.stack(losses).mean()

    torch.testing.assert_close(batch.by_slopes(loss_of), batch.exactly(reference), rtol=1e-8, atol=1e-8)
