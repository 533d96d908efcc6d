"""TRL's loss on leaf tensors, in the trainer and in the engines."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_rollouts import make
from torch import Tensor, nn

import trl_realloc
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.trainer.policy.loss import (
    EngineLoss,
    LossInEngine,
    LossInputs,
    ReferenceInEngine,
    has_entropy_term,
    is_computed_in_engines,
    rows_with_grad,
)
from trl_realloc.trainer.policy.sampled_routes import SampledRoutes
from trl_realloc.trainer.policy.step_buffer import LossBatch, MicroBatch, Rows


pytestmark = pytest.mark.oldest

ROWS, WIDTH = 5, 7
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"beta": 0.04, "use_bias_correction_kl": True},
    "entropy bonus": {"entropy_coef": 0.3},
    # with a controller that stays where it is, although here each micro-batch ends an optimizer step
    "entropy controller": {
        "entropy_coef": 0.1,
        "use_adaptive_entropy": True,
        "entropy_coef_delta": 0.0,
        "entropy_target": float("inf"),
    },
    "two-sided, off-policy mask": {"delta": 1.01, "off_policy_mask_threshold": 0.01},
}


def batch(draw: torch.Generator, kind: str, *, tells_old: bool, per_token: bool, tools: bool) -> dict[str, Any]:
    """A micro-batch as TRL's loss reads it, with a row whose tokens are all left out and one without an advantage."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw)

    lengths = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=draw)
    lengths[1] = 0
    mask = (torch.arange(WIDTH)[None] < lengths).long()
    advantages = normal(ROWS)
    advantages[2] = 0.0
    inputs = {name: torch.ones(ROWS, 3, dtype=torch.long) for name in ("prompt_ids", "prompt_mask")}
    inputs |= {"completion_ids": mask, "completion_mask": mask, "advantages": advantages}
    inputs["num_items_in_batch"] = torch.tensor(40)
    if kind == "RLOO":
        return {**inputs, "old_logps": -4.0 * mask.sum(1) + 0.05 * normal(ROWS)}
    inputs["ref_per_token_logps"] = -4.0 + 0.1 * normal(ROWS, WIDTH)
    inputs["importance_sampling_ratio"] = (0.2 * normal(ROWS, WIDTH if per_token else 1)).exp()
    if tells_old:
        inputs["old_per_token_logps"] = -4.0 + 0.3 * normal(ROWS, WIDTH)
    if tools:
        inputs["tool_mask"] = (torch.rand(ROWS, WIDTH, generator=draw) < 0.7).long()
    return inputs


def grads(trainer: Any, inputs: dict[str, Any], logprobs: Tensor, entropies: Tensor) -> list[Tensor]:
    """Of TRL's loss of all rows, as Trainer differentiates it."""
    leaves = [logprobs.clone().requires_grad_(), entropies.clone().requires_grad_(has_entropy_term(trainer))]
    vars(trainer)["_get_per_token_logps_and_entropies"] = lambda *_, **__: (*leaves, None)
    loss = trainer.compute_loss(trainer.model, inputs)
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # of Transformers 5.19 and newer
    if not (trainer.compute_loss_func is not None if scaled is None else scaled):
        loss = loss / trainer.current_gradient_accumulation_steps
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad]))


def loss_batch(inputs: dict[str, Any], *, is_sent: bool) -> LossBatch:
    """What the loss in an engine reads, if all samples may have a gradient."""
    rows = Rows.of_inputs(inputs)
    may_have_grad = torch.ones(len(rows.samples), dtype=torch.bool)
    return LossBatch.of(MicroBatch(inputs, rows, may_have_grad), is_sent=is_sent)


def check(trainer: Any, micro_batches: Sequence[dict[str, Any]], seed: int) -> None:
    draw, shuffled = torch.Generator().manual_seed(seed), random.Random(seed)
    columns = [(-4.0 + 0.3 * torch.randn(2, ROWS, WIDTH, generator=draw)).unbind() for _ in micro_batches]
    expected = [grads(trainer, *given) for given in zip(micro_batches, *zip(*columns, strict=True), strict=True)]
    masks = [inputs["completion_mask"].bool() for inputs in micro_batches]
    rows = [mask.any(1).nonzero()[:, 0].tolist() for mask in masks]
    loss = LossInEngine(trainer, [loss_batch(inputs, is_sent=True) for inputs in micro_batches])
    places = [(at, row) for at, own in enumerate(rows) for row in own]
    order = shuffled.sample(range(len(places)), len(places))
    for begin in range(0, len(order), 3):  # a micro-batch of the engine
        numbers = order[begin : begin + 3]
        own = [places[number] for number in numbers]
        parts = ([columns[at][which][row][masks[at][row]] for at, row in own] for which in (0, 1))
        logprobs, entropies = (Ragged.of(part, torch.float32) for part in parts)
        leaves = [column.values.requires_grad_() for column in (logprobs, entropies)]
        samples = Rollouts(index=torch.tensor(numbers), prompts=logprobs, responses=logprobs)
        value, made = loss({"logprobs": logprobs, "entropy": entropies}, samples)
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        names = ("logprob_grads", "entropy_grads")[: 1 + has_entropy_term(trainer)]
        for which, name in enumerate(names):
            wanted = torch.cat([expected[at][which][row][masks[at][row]] for at, row in own])
            assert torch.equal(made[name], wanted), "what differs would be trained a second time"
            torch.testing.assert_close(gradients[which], wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("settings", SETTINGS)
def test_slopes_of_some_rows_are_those_of_the_micro_batch(tmp_path: Path, settings: str) -> None:
    trainer = ready(make(trl_realloc, tmp_path, epsilon=0.05, **SETTINGS[settings]))
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    for seed, (loss, level, _) in enumerate(itertools.product(LOSSES, ("token", "sequence"), range(3))):
        trainer.loss_type, trainer.importance_sampling_level = loss, level
        draw, chosen = torch.Generator().manual_seed(seed), random.Random(seed)
        columns = {name: chosen.random() < 0.5 for name in ("tells_old", "per_token", "tools")}
        check(trainer, [batch(draw, "GRPO", **columns) for _ in range(3)], seed)


def ready(trainer: Any) -> Any:
    """The trainer as in the middle of a training."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 3
    return trainer


def test_slopes_of_some_rows_are_those_of_rloos_micro_batch(tmp_path: Path) -> None:
    trainer = ready(make(trl_realloc, tmp_path, kind="RLOO", epsilon=0.05))
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        check(trainer, [batch(draw, "RLOO", tells_old=True, per_token=True, tools=False) for _ in range(2)], seed)


def test_a_loss_in_an_engine_leaves_the_trainer_alone(tmp_path: Path) -> None:
    trainer = ready(make(trl_realloc, tmp_path, entropy_coef=0.1, use_adaptive_entropy=True))
    inputs = batch(torch.Generator().manual_seed(0), "GRPO", tells_old=True, per_token=True, tools=False)
    rows = inputs["completion_mask"].any(1).nonzero()[:, 0].tolist()
    column = Ragged(torch.zeros(int(inputs["completion_mask"].sum())), inputs["completion_mask"].sum(1)[rows])
    before = dict(vars(trainer))
    LossInEngine(trainer, [loss_batch(inputs, is_sent=False)])(
        {"logprobs": column, "entropy": column}, Rollouts(index=torch.arange(len(rows)), responses=column)
    )
    assert vars(trainer) == before and not before["_metrics"]["train"]


def test_rows_without_an_advantage_have_a_gradient_where_the_loss_has_another_term(tmp_path: Path) -> None:
    trainer = make(trl_realloc, tmp_path)
    inputs = {"advantages": torch.tensor([0.0, 1.0, 0.0])}
    assert rows_with_grad(trainer, inputs).tolist() == [False, True, False]
    assert rows_with_grad(trainer, {"advantages": torch.eye(2)[[0, 1, 0]] * 0.0}).tolist() == [False] * 3
    trainer.beta = 0.1
    assert rows_with_grad(trainer, inputs).tolist() == [True] * 3


def test_a_users_loss_and_a_threshold_over_all_processes_are_computed_by_the_trainer(tmp_path: Path) -> None:
    class OfUser(trl_realloc.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return inputs["advantages"].mean()

    assert is_computed_in_engines(make(trl_realloc, tmp_path))
    assert not is_computed_in_engines(make(trl_realloc, tmp_path, base=lambda trainer: OfUser))
    assert not is_computed_in_engines(make(trl_realloc, tmp_path, top_entropy_quantile=0.5))


def leaf_rows(*responses: list[int]) -> Rows:
    """Rows of a prompt of one token and these responses."""
    width = max(map(len, responses))
    ids = torch.tensor([[3, *response, *[0] * (width - len(response))] for response in responses])
    mask = torch.tensor([[1] * (1 + len(response)) + [0] * (width - len(response)) for response in responses])
    return Rows.of(ids, mask, width)


@pytest.mark.parametrize("has_entropy_term", [True, False])
def test_token_gradients_are_the_scaled_gradients_of_the_leaves(has_entropy_term: bool) -> None:
    rows = leaf_rows([5, 6], [])
    leaves = LossInputs(
        rows, torch.zeros(2, 2).requires_grad_(), torch.zeros(2, 2).requires_grad_(has_entropy_term), Rollouts()
    )
    (leaves.logprobs.sum() + 3 * leaves.entropies[rows.mask].sum()).backward()  # type: ignore[no-untyped-call]
    samples = leaves.token_grads(0.5)
    assert [row.tolist() for row in samples.ragged("responses").rows()] == [[5, 6]]
    assert samples.ragged("logprob_grads").values.tolist() == [0.5, 0.5]
    assert ("entropy_grads" in samples) == has_entropy_term
    if has_entropy_term:
        assert samples.ragged("entropy_grads").values.tolist() == [1.5, 1.5]


def test_token_gradients_that_the_engines_have_added_are_subtracted() -> None:
    rows = leaf_rows([5, 6], [8])
    added = Rollouts(logprob_grads=Ragged.of([[0.5, 0.25], [0.5]], torch.float32))
    leaves = LossInputs(rows, torch.zeros(2, 2).requires_grad_(), torch.zeros(2, 2), added)
    leaves.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert leaves.token_grads(0.5).ragged("logprob_grads").values.tolist() == [0.0, 0.25, 0.0]


def test_a_loss_that_does_not_read_the_log_probabilities_has_token_gradients_of_zero() -> None:
    leaves = LossInputs(
        leaf_rows([5, 6]), torch.zeros(1, 2).requires_grad_(), torch.zeros(1, 2).requires_grad_(), Rollouts()
    )
    leaves.entropies.sum().backward()  # type: ignore[no-untyped-call]
    assert leaves.token_grads(1.0).ragged("logprob_grads").values.tolist() == [0.0, 0.0]


def test_rows_without_any_response_take_part_in_the_calls_of_policy_and_reference() -> None:
    asked: list[tuple[str, int]] = []

    def forward(name: str, samples: Rollouts) -> Rollouts:
        asked.append((name, len(samples)))
        return Rollouts()

    trainer: Any = SimpleNamespace(
        placement=SimpleNamespace(started=True), accelerator=SimpleNamespace(device=torch.device("cpu"))
    )
    calls: Any = SimpleNamespace(forward=forward)
    loss = EngineLoss(trainer, calls, SampledRoutes())
    ids, mask = torch.tensor([[3, 7], [4, 7]]), torch.tensor([[1, 0], [1, 0]])
    with torch.no_grad():
        for model in (nn.Identity(), ReferenceInEngine()):
            logprobs, _, _ = loss.logps_and_entropies(model, ids, mask, 1)
            assert logprobs.tolist() == [[0.0], [0.0]]
    assert asked == [("actor.forward", 0), ("reference.forward", 0)]
