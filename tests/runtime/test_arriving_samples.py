"""What a rank keeps of the samples whose gradients it has added."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trl_realloc.algorithms.nonfinite import NonFiniteError
from trl_realloc.algorithms.ppo import PPO
from trl_realloc.algorithms.ppo_settings import PPOSettings
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.presets import separate, with_first_epoch
from trl_realloc.runtime import training_calls
from trl_realloc.runtime.arriving_samples import ArrivingSamples


class Refusing:
    """An engine that adds gradients, and whose step is not finite because of sample 4."""

    grad_norm = 0.0

    def add(self, samples: Rollouts, loss: Any, tokens: int) -> dict[str, Tensor]:
        return {"value_loss": torch.ones(len(samples))}

    def step(self, samples: Rollouts, statistics: Any, rate: Any, scale: float) -> None:
        assert samples.tensor("index").tolist() == [4, 2]
        raise NonFiniteError("the loss of sample 4 is not finite", 4)


def sample(index: int) -> Rollouts:
    tokens = {name: Ragged.of([[index, index + 1]], torch.long) for name in ("prompts", "responses")}
    values = Ragged.of([[0.0, 0.0, 0.0]], torch.float32)
    rows = {name: Ragged.of([[0.0, 0.0]], torch.float32) for name in ("logprobs", "ref_logprobs")}
    of_sample = {"scores": torch.zeros(1), "has_eos": torch.ones(1, dtype=torch.bool)}
    return Rollouts(index=torch.tensor([index]), values=values, **tokens, **rows, **of_sample)


def test_a_step_that_is_left_out_is_told_with_the_text_of_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, engine = with_first_epoch(separate(Cluster(1, 2)), ["critic.train"]), Refusing()
    call = plan.graph.call("critic.train")
    placement: Any = SimpleNamespace(
        plan=plan,
        rank=plan.mesh("critic.train").leader,
        trained=lambda role: engine,
        budget=lambda name: 100,
        group=lambda name: SimpleNamespace(is_leader=True),
    )
    arriving = ArrivingSamples(placement, PPO(PPOSettings(response_length=8)), n=2)
    for index in (4, 2):
        arriving.add(call, sample(index))
    tokenizer = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: [f"text of {row}" for row in ids])
    settings: Any = SimpleNamespace(skip_nonfinite=True, processing_class=tokenizer)
    step: Any = SimpleNamespace(number=0, learning_rates={Role.CRITIC: 1e-4})
    told: list[str] = []
    monkeypatch.setattr(training_calls.logger, "warning", told.append)
    for name in ("check_weights", "check_replicas"):
        monkeypatch.setattr(training_calls, name, lambda *_: None)
    log = training_calls.train(placement, settings, None, call, [], step, arriving.added(call.name, 1.0))  # type: ignore[arg-type]
    assert not len(log), "a step that was skipped has no rows"
    assert "optimizer step 1 of critic.train in update 1 was left out" in told[0]
    assert "prompt 'text of [4, 5]'" in told[0]
