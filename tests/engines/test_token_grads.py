"""Training by the token gradients of a loss gives the parameters that training by the loss itself gives: in float64,
with one process. With several, `tests/multiprocess/test_token_grads.py`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from test_replicated import ALONE, CPU, config
from token_grads import bonus, clipped, samples_of, sequence_level, with_grads
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from trl_realloc.algorithms.algorithm import TokenLoss
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.algorithms.trainer_loss import LinearLoss, without_zero_grads
from trl_realloc.engines.training import heads, sliced_head
from trl_realloc.engines.training.heads import PolicyHead
from trl_realloc.engines.training.replicated import ReplicatedEngine


State = dict[str, Tensor]


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.9, weight_decay=0.1)


def engine() -> ReplicatedEngine:
    torch.manual_seed(0)
    head = PolicyHead(AutoModelForCausalLM.from_config(config()).double(), temperature=0.7)
    assert head.packed
    return ReplicatedEngine(head, ALONE, CPU, make_optimizer=optimizer, max_grad_norm=0.5)


def state(of: ReplicatedEngine) -> State:
    return {name: p.detach().clone() for name, p in of.head.model.named_parameters()}


def furthest(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("loss", [clipped, sequence_level, bonus])
def test_steps_by_a_losss_slopes_are_its_steps(loss: TokenLoss, sliced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if sliced:
        monkeypatch.setattr(heads, "MAX_WHOLE_ON_CPU", 0)
        monkeypatch.setattr(sliced_head, "SLICE_ON_CPU", 3 * 50)
    direct, by_slopes = engine(), engine()
    samples = samples_of(direct)
    before = state(direct)
    for _ in range(3):
        direct.train(samples, loss, 30, 0.5)
        linear = with_grads(samples, loss, by_slopes)
        assert ("entropy_grads" in linear) == (loss is bonus)
        by_slopes.train(linear, LinearLoss(), 17, 0.5)
        assert by_slopes.grad_norm == pytest.approx(direct.grad_norm, rel=1e-10) and direct.grad_norm > 0.05
    assert furthest(state(direct), before) > 1e-2, "nothing was learned"
    assert furthest(state(by_slopes), state(direct)) < 1e-10


def test_gradients_that_are_added_before_a_step_are_of_the_step() -> None:
    whole, added = engine(), engine()
    samples = with_grads(samples_of(whole), bonus, whole)
    added.add_gradients(samples, LinearLoss(), 30)
    added.drop()
    parts = [added.add_gradients(samples.select(part), told, 17) for part in ([5, 2], [7, 0, 1])]
    added.train(samples.select([3, 4, 6]), LinearLoss(), 30, 0.5)
    whole.train(samples, LinearLoss(), 30, 0.5)
    assert added.grad_norm == pytest.approx(whole.grad_norm, rel=1e-10)
    assert furthest(state(added), state(whole)) < 1e-10
    for part, made in zip(([5, 2], [7, 0, 1]), parts, strict=True):
        of_tokens = samples.ragged("logprob_grads").select(part).values
        torch.testing.assert_close(made["grads"], of_tokens.float())
        assert made["lengths"].tolist() == samples.lengths[part].tolist()


def told(outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
    """The linear loss, with statistics of response tokens and of samples."""
    of_tokens = {"grads": samples.ragged("logprob_grads").values, "lengths": samples.lengths}
    return LinearLoss()(outputs, samples)[0], of_tokens


@pytest.mark.parametrize("keeps", ["some", "none"])
@pytest.mark.parametrize("budget", [1, 17, 1000])
def test_samples_without_slopes_may_be_left_out_of_an_update(keeps: str, budget: int) -> None:
    """The momentum and the weight decay of the steps before go on in a step without any token gradient."""
    whole, fewer = engine(), engine()
    samples = samples_of(whole)
    advantages = samples.ragged("advantages")
    equal_rewards = samples.tensor("index") % 2 == 0 if keeps == "some" else torch.ones(len(samples), dtype=torch.bool)
    second = samples.plus(advantages=advantages.like(advantages.values * ~equal_rewards[advantages.row_of]))
    for batch in (samples, second):
        before, linear = state(whole), with_grads(batch, clipped, whole)
        dropped = without_zero_grads(linear)
        whole.train(linear, LinearLoss(), budget, 0.5)
        fewer.train(dropped, LinearLoss(), budget, 0.5)
    assert len(dropped) == (4 if keeps == "some" else 1)
    assert furthest(state(whole), before) > 1e-4, "a step without a gradient moves by momentum and weight decay"
    assert furthest(state(fewer), state(whole)) < 1e-12
    assert whole.grad_norm == pytest.approx(fewer.grad_norm, rel=1e-12)
    assert (whole.grad_norm == 0) == (keeps == "none")
