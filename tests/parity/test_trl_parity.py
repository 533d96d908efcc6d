"""From the same rollouts, this project's arithmetic gives what TRL 1.12's PPOTrainer logs and learns."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import nn

from trl_realloc.algorithms import ppo
from trl_realloc.algorithms.ppo_metrics import objective_metrics, update_metrics
from trl_realloc.algorithms.ppo_settings import PPOSettings
from trl_realloc.algorithms.ppo_weights import response_widths, sample_weights
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.training.heads import PolicyHead, ScoreHead, ValueHead
from trl_realloc.engines.training.replicated import ReplicatedEngine


pytest.importorskip("trl.experimental.ppo", reason="from 1.13 on TRL has no PPO to compare with")

from .recorded_trl import EOS, PAD, Case, Models, PPOConfig, Recording, State, Update, run_trl


# TRL takes the variance of the ratios of one mini-batch, where it has but one
pytestmark = [pytest.mark.oldest, pytest.mark.filterwarnings("ignore:var\\(\\). degrees of freedom:UserWarning")]

ENDS_AT_VARIED_LENGTHS = 1.5
ALL_END_EARLY = 3.0
TOLERANCE = 1e-5
PENALTY_AND_DISCOUNT = {"missing_eos_penalty": 1.0, "gamma": 0.98, "lam": 0.9}

CASES = {
    "no stop token": Case(),
    "k3": Case(options={"kl_estimator": "k3"}),
    "whitened rewards": Case(options={"whiten_rewards": True}),
    "eos": Case(ENDS_AT_VARIED_LENGTHS, options={"stop_token": "eos"}),
    "eos, k3, whitened rewards, penalty, discount": Case(
        ENDS_AT_VARIED_LENGTHS,
        options={"stop_token": "eos", "kl_estimator": "k3", "whiten_rewards": True, **PENALTY_AND_DISCOUNT},
    ),
    "eos, two updates of two epochs": Case(
        ENDS_AT_VARIED_LENGTHS, updates=2, options={"stop_token": "eos", "num_ppo_epochs": 2}
    ),
    "eos, all before the limit": Case(
        ALL_END_EARLY, options={"stop_token": "eos", "num_ppo_epochs": 2, "missing_eos_penalty": 1.0}
    ),
    "another stop token": Case(
        ENDS_AT_VARIED_LENGTHS, options={"stop_token_id": 17, "missing_eos_penalty": 0.5, "num_ppo_epochs": 2}
    ),
    "two mini-batches": Case(
        ENDS_AT_VARIED_LENGTHS,
        options={
            "stop_token": "eos",
            "num_mini_batches": 2,
            "per_device_train_batch_size": 16,
            "num_ppo_epochs": 2,
            "whiten_rewards": True,
        },
    ),
    "two micro-batches": Case(
        ENDS_AT_VARIED_LENGTHS,
        options={"stop_token": "eos", "gradient_accumulation_steps": 2, "num_ppo_epochs": 2, "whiten_rewards": True},
    ),
    "clipped": Case(
        options={
            "num_ppo_epochs": 3,
            "num_mini_batches": 2,
            "cliprange": 0.05,
            "cliprange_value": 0.02,
            "learning_rate": 3e-3,
        }
    ),
    "rollouts in chunks": Case(
        stop_pull=2.5, options={"stop_token": "eos", "local_rollout_forward_batch_size": 3, "temperature": 1.3}
    ),
    "lora": Case(lora=True, updates=2, options={"num_ppo_epochs": 2}),
    "lora, eos": Case(ENDS_AT_VARIED_LENGTHS, lora=True, options={"stop_token": "eos", "kl_estimator": "k3"}),
}
LIMIT = 12
BUDGET = 64  # tokens: a mini-batch is several micro-batches


@dataclass
class Replay:
    """What this project makes of one of TRL's updates."""

    samples: Rollouts
    metrics: dict[str, float]
    policy: State
    critic: State
    moments: State


@functools.cache
def recorded(name: str) -> Recording:
    return run_trl(CASES[name])


@functools.cache
def replayed(name: str, match_trl: bool = True) -> list[Replay]:
    recording = recorded(name)
    args, before = recording.args, copy.deepcopy(recording.before)
    names = [f.name for f in fields(PPOSettings) if hasattr(args, f.name)]
    settings = PPOSettings(**{n: getattr(args, n) for n in names}, match_trl=match_trl)
    engines = _Engines(before, args)
    return [_replay(update, recording, settings, engines) for update in recording.updates]


class _Engines:
    def __init__(self, models: Models, args: PPOConfig) -> None:
        alone, cpu = MeshGroup(ranks=(0,), rank=0), torch.device("cpu")

        def adamw(module: nn.Module) -> torch.optim.Optimizer:
            trained = [p for p in module.parameters() if p.requires_grad]
            return torch.optim.AdamW(trained, eps=args.adam_epsilon, weight_decay=0.0)

        def policy_head(model: Any) -> PolicyHead:
            return PolicyHead(model, args.temperature)

        self.policy = ReplicatedEngine(policy_head(models.policy), alone, cpu, make_optimizer=adamw)
        self.critic = ReplicatedEngine(ValueHead(models.critic), alone, cpu, make_optimizer=adamw)
        self.reward = ReplicatedEngine(ScoreHead(models.reward), alone, cpu)
        self.reference = models.reference and ReplicatedEngine(policy_head(models.reference), alone, cpu)

    def ref_logprobs(self, samples: Rollouts) -> Ragged:
        if self.reference is not None:
            return self.reference.forward(samples, BUDGET)["logprobs"]
        policy: Any = self.policy.head.model
        with policy.disable_adapter():
            return self.policy.forward(samples, BUDGET)["logprobs"]


def _rollouts(update: Update, recording: Recording) -> Rollouts:
    responses = []
    for row in update.responses:
        stops = (row == recording.stop_token_id).nonzero() if recording.stop_token_id is not None else row[:0]
        responses.append(row[: int(stops[0]) + 1] if len(stops) else row)
    return Rollouts(
        index=torch.arange(len(responses)),
        prompts=Ragged.of([row[row != PAD] for row in update.queries], torch.long),
        responses=Ragged.of(responses, torch.long),
        has_eos=torch.tensor([bool((row == EOS).any()) for row in responses]),
    )


def _replay(update: Update, recording: Recording, settings: PPOSettings, engines: _Engines) -> Replay:
    args = recording.args
    samples = _rollouts(update, recording)
    samples = samples.plus(
        logprobs=engines.policy.forward(samples, BUDGET)["logprobs"],
        ref_logprobs=engines.ref_logprobs(samples),
        values=engines.critic.forward(samples, BUDGET)["values"],
        scores=engines.reward.forward(samples, BUDGET)["scores"].values,
    )
    samples = ppo.prepare(samples, settings)
    samples = samples.plus(width=response_widths(samples, settings))
    policy_loss = ppo.PolicyLoss(settings.cliprange)
    value_loss = ppo.ValueLoss(settings.cliprange_value, settings.vf_coef)
    steps = []
    for order in update.orders:
        for part in order.reshape(settings.num_mini_batches, -1):
            mini = samples.select(part.tolist())
            weights = sample_weights(mini, settings)
            mini = mini.plus(policy_weight=weights.policy, value_weight=weights.value)
            steps.append(
                (
                    weights,
                    {
                        **engines.policy.train(mini, policy_loss, BUDGET, args.learning_rate),
                        **engines.critic.train(mini, value_loss, BUDGET, args.learning_rate),
                    },
                )
            )
    metrics = objective_metrics(samples, settings, EOS) | update_metrics(steps)
    policy, critic = engines.policy, engines.critic
    return Replay(
        samples,
        metrics,
        {name: p.detach().clone() for name, p in policy.head.model.named_parameters()},
        {name: p.detach().clone() for name, p in critic.head.model.named_parameters()},
        _moments("policy", policy) | _moments("value_model", critic),
    )


def _moments(role: str, engine: ReplicatedEngine) -> State:
    assert engine.optimizer is not None
    state, parameters = engine.optimizer.state, engine.head.model.named_parameters()
    return {f"{role}.{name}": state[p]["exp_avg"].clone() for name, p in parameters if p in state}


def pairs(name: str, match_trl: bool = True) -> list[tuple[Update, Replay]]:
    return list(zip(recorded(name).updates, replayed(name, match_trl), strict=True))


def assert_same_state(ours: State, trls: State) -> None:
    assert ours.keys() == trls.keys()
    for name, theirs in trls.items():
        torch.testing.assert_close(ours[name], theirs, atol=TOLERANCE, rtol=TOLERANCE, msg=f"{name}: {{}}".format)


def has_padding(update: Update, replay: Replay) -> bool:
    return bool((replay.samples.ragged("responses").lengths < update.responses.shape[1]).any())


@pytest.mark.parametrize("name", CASES)
def test_the_responses_are_what_the_case_is_about(name: str) -> None:
    options = CASES[name].options
    for update, replay in pairs(name):
        responses = replay.samples.ragged("responses")
        lengths = responses.lengths.tolist()
        assert not (responses.values == PAD).any()
        if "stop_token" not in options and "stop_token_id" not in options:
            assert set(lengths) == {LIMIT} and not has_padding(update, replay)
        elif name == "eos, all before the limit":
            assert max(lengths) < LIMIT and min(lengths) < max(lengths)
        else:
            assert max(lengths) == LIMIT and len(set(lengths)) > 2


@pytest.mark.parametrize("name", CASES)
def test_old_logprobs_equal_those_of_trls_generation(name: str) -> None:
    for update, replay in pairs(name):
        every = update.logits.log_softmax(-1).gather(-1, update.responses[..., None]).squeeze(-1)
        ours = replay.samples.ragged("logprobs")
        torch.testing.assert_close(
            ours.values, Ragged.unpad(every, ours.lengths).values, atol=TOLERANCE, rtol=TOLERANCE
        )


@pytest.mark.parametrize("name", CASES)
def test_logged_statistics_equal_trls(name: str) -> None:
    for update, replay in pairs(name):
        trls = {k: v for k, v in update.metrics.items() if k not in ("eps", "lr", "episode", "epoch")}
        assert replay.metrics.keys() == trls.keys()
        if has_padding(update, replay):
            del trls["policy/entropy_avg"]  # TRL's mean has the distributions after padding tokens in it: see below
        for key, value in trls.items():
            if key == "val/ratio_var" and math.isnan(value):
                value = 0.0  # of one optimizer step, whose variance TRL takes over n - 1 = 0
            assert replay.metrics[key] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), key


def test_with_padding_the_entropy_is_the_mean_over_response_tokens() -> None:
    """Where TRL's is over padding too. One mini-batch, so it is that of the models as they were before."""
    ((update, replay),) = pairs("eos")
    recording = recorded("eos")
    entropies = []
    with torch.no_grad():
        for prompt, response in zip(
            replay.samples.ragged("prompts").rows(), replay.samples.ragged("responses").rows(), strict=True
        ):
            logits = recording.before.policy(input_ids=torch.cat([prompt, response])[None]).logits[0]
            p = torch.softmax(logits[len(prompt) - 1 : -1] / recording.args.temperature, -1)
            entropies.append(-(p * p.log()).sum(-1))
    assert has_padding(update, replay)
    assert replay.metrics["policy/entropy_avg"] == pytest.approx(float(torch.cat(entropies).mean()), rel=TOLERANCE)
    assert update.metrics["policy/entropy_avg"] != pytest.approx(float(torch.cat(entropies).mean()), rel=1e-3)


def test_the_clipped_case_clips_both_losses() -> None:
    ((update, _),) = pairs("clipped")
    assert update.metrics["policy/clipfrac_avg"] > 0.05 and update.metrics["val/clipfrac_avg"] > 0.05


@pytest.mark.parametrize("name", CASES)
def test_updated_parameters_equal_trls(name: str) -> None:
    for update, replay in pairs(name):
        assert_same_state(replay.policy, update.policy)
        assert_same_state(replay.critic, update.critic)


@pytest.mark.parametrize("name", CASES)
def test_the_updates_are_far_larger_than_the_tolerance(name: str) -> None:
    before = recorded(name).before
    for update in recorded(name).updates:
        for model, after in ((before.policy, update.policy), (before.critic, update.critic)):
            moved = max(float((after[n] - p.detach()).abs().max()) for n, p in model.named_parameters())
            assert moved > 50 * TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_adams_moments_equal_trls(name: str) -> None:
    """Sharper than the parameters, for Adam's step hides a gradient's size. 7e-6 of the largest was seen."""
    for update, replay in pairs(name):
        assert replay.moments.keys() == update.moments.keys()
        for key, theirs in update.moments.items():
            largest = float(theirs.abs().max())
            torch.testing.assert_close(
                replay.moments[key], theirs, atol=5 * TOLERANCE * largest, rtol=0, msg=f"{key}: {{}}".format
            )


# what TRL's batch layout decides: where a response's last state lies, and how its tokens weigh against the others'
LAID_OUT = ["eos, all before the limit", "two micro-batches"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in LAID_OUT])
def test_where_the_layout_decides_nothing_the_global_token_mean_learns_what_trl_learns(name: str) -> None:
    for update, replay in pairs(name, match_trl=False):
        assert_same_state(replay.policy, update.policy)
        assert_same_state(replay.critic, update.critic)


@pytest.mark.parametrize("name", LAID_OUT)
def test_where_the_layout_decides_something_only_match_trl_reproduces_it(name: str) -> None:
    ((update, replay),) = pairs(name, match_trl=False)
    furthest = max(float((replay.critic[n] - p).abs().max()) for n, p in update.critic.items())
    assert furthest > 5 * TOLERANCE
