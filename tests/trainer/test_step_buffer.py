"""`StepBuffer`: from TRL's padded tensors to samples and back, and what is computed for an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.algorithms.trainer_loss import ENTROPY_GRADS, LOGPROB_GRADS
from trl_realloc.trainer.policy import loss_and_logprobs
from trl_realloc.trainer.policy.loss_and_logprobs import LossInputs, Rows, StepBuffer
from trl_realloc.trainer.policy.loss_in_engine import MAX_SENT, MicroBatch


CPU = torch.device("cpu")
Tokens = list[tuple[list[int], list[int]]]  # of each row: prompt and response

tokens = st.lists(st.integers(0, 50), min_size=1, max_size=6)
batches = st.lists(st.tuples(tokens, st.one_of(tokens, st.just([]))), min_size=1, max_size=6)


def tensors(batch: Tokens, spare: int = 0) -> tuple[Tensor, Tensor, int]:
    """As TRL's: ids and mask, (rows, length) each, prompts padded on the left and responses on the right, and the width
    of the responses. A response without tokens is all padding.

    Args:
        spare: columns of padding more than the longest needs, as there are in a slice of a larger batch.
    """
    longest = max(len(prompt) for prompt, _ in batch) + spare
    width = max(1, *(len(response) for _, response in batch)) + spare
    rows = [
        [[7] * (longest - len(p)) + p + r + [7] * (width - len(r)), [0] * (longest - len(p)) + [1] * len(p + r)]
        for p, r in batch
    ]
    ids, mask = (torch.tensor([row[at] + [0] * (longest + width - len(row[at])) for row in rows]) for at in (0, 1))
    return ids, mask, width


@given(batches, st.integers(0, 3))
def test_rows_lose_their_padding_and_get_it_back(batch: Tokens, spare: int) -> None:
    ids, mask, width = tensors(batch, spare)
    rows = Rows.of(ids, mask, width)
    kept = [(p, r) for p, r in batch if r]
    found = zip(rows.samples.ragged("prompts").rows(), rows.samples.ragged("responses").rows(), strict=True)
    assert [(p.tolist(), r.tolist()) for p, r in found] == kept
    values = rows.samples.ragged("responses")
    padded = rows.padded(values.like(values.values.float() + 0.5), CPU)
    assert padded.shape == (len(batch), width)
    assert torch.equal(padded, torch.where(mask[:, -width:].bool(), ids[:, -width:] + 0.5, 0.0))
    again = rows.unpadded(padded)
    assert torch.equal(again.lengths, values.lengths) and torch.equal(again.values, values.values + 0.5)


@given(batches)
def test_what_lies_under_padding_is_not_read(batch: Tokens) -> None:
    ids, mask, width = tensors(batch, spare=1)
    rows = Rows.of(ids, mask, width)
    noisy = torch.where(mask[:, -width:].bool(), 1.0, float("nan"))
    assert rows.unpadded(noisy).values.tolist() == [1.0] * int(mask[:, -width:].sum())


class Calls:
    """Stands for the engines: the log-probability of a token is its id plus `shift`, its entropy ten times that."""

    def __init__(self) -> None:
        self.shift = 0.25
        self.sizes: list[int] = []
        self.trained: list[bool] = []

    def forward(self, name: str, samples: Rollouts, *, trained: bool = True) -> Rollouts:
        self.sizes.append(len(samples))
        self.trained.append(trained)
        if not len(samples):
            return Rollouts()
        column = samples.ragged("responses")
        values = column.like(column.values.float() + self.shift)
        if name == "reference.forward":
            return Rollouts(ref_logprobs=values)
        return Rollouts(policy_logprobs=values, entropies=column.like(values.values * 10))


def step_buffer() -> tuple[StepBuffer, Calls]:
    calls: Any = Calls()
    return StepBuffer(calls, CPU), calls


def rows_of(*responses: Sequence[int]) -> Rows:
    return Rows.of(*tensors([([3, 4], list(response)) for response in responses]))


def test_a_sample_is_computed_once_until_the_policy_changes() -> None:
    made, calls = step_buffer()
    first, second = rows_of([5, 6], [8]), rows_of([8], [9, 9, 9])
    logprobs, entropies = made.of_policy(first, [second])
    assert logprobs.tolist() == [[5.25, 6.25], [8.25, 0.0]] and entropies[0, 0] == 52.5
    assert made.of_policy(second)[0].tolist() == [[8.25, 0, 0], [9.25, 9.25, 9.25]]
    assert calls.sizes == [3, 0], "the call of nothing is made too: other ranks may have something"
    for rows in (first, second):
        made.add(LossInputs(rows, *(leaf.requires_grad_() for leaf in made.of_policy(rows))), 1.0)
    assert len(made) == 2
    made.take()
    calls.shift = 0.5
    assert made.of_policy(second)[0][0, 0] == 8.5 and len(made) == 0


def test_the_same_response_to_another_prompt_is_another_sample() -> None:
    made, calls = step_buffer()
    made.of_policy(Rows.of(*tensors([([3], [4, 5]), ([3, 4], [5]), ([2], [4, 5])])))
    assert calls.sizes == [3]


def test_rows_without_any_response_take_part_in_every_call() -> None:
    made, calls = step_buffer()
    rows = rows_of([], [])
    logprobs, entropies = made.of_policy(rows)
    assert logprobs.shape == entropies.shape == made.of_reference(rows).shape == (2, 1)
    assert not logprobs.any() and calls.sizes == [0, 0]
    made.add(LossInputs(rows, logprobs.requires_grad_(), entropies), 1.0)
    (grads,) = made.take().ragged(LOGPROB_GRADS).rows()
    assert grads.tolist() == [0.0], "the optimizer makes its step"


@pytest.mark.parametrize("has_entropy_term", [True, False])
def test_slopes_are_the_scaled_gradients_of_the_leaves(has_entropy_term: bool) -> None:
    made, _ = step_buffer()
    parts = [rows_of([5, 6], []), rows_of([8])]
    for weight, rows in enumerate(parts, 1):
        logprobs, entropies = made.of_policy(rows)
        leaves = LossInputs(rows, logprobs.requires_grad_(), entropies.requires_grad_(has_entropy_term))
        (weight * (leaves.logprobs.sum() + 3 * leaves.entropies[leaves.rows.mask].sum())).backward()
        made.add(leaves, 0.5)
    samples = made.take()
    assert [row.tolist() for row in samples.ragged("responses").rows()] == [[5, 6], [8]]
    assert samples.ragged(LOGPROB_GRADS).values.tolist() == [0.5, 0.5, 1.0]
    assert (ENTROPY_GRADS in samples) == has_entropy_term
    if has_entropy_term:
        assert samples.ragged(ENTROPY_GRADS).values.tolist() == [1.5, 1.5, 3.0]


def test_a_loss_that_does_not_read_the_log_probabilities_has_slopes_of_zero() -> None:
    made, _ = step_buffer()
    rows = rows_of([5, 6])
    logprobs, entropies = made.of_policy(rows)
    leaves = LossInputs(rows, logprobs.requires_grad_(), entropies.requires_grad_())
    leaves.entropies.sum().backward()
    made.add(leaves, 1.0)
    assert made.take().ragged(LOGPROB_GRADS).values.tolist() == [0.0, 0.0]


def test_the_columns_of_samples_are_on_the_host() -> None:
    samples = rows_of([5, 6]).samples
    assert all(isinstance(column, Ragged) and column.values.device == CPU for column in dict(samples).values())


# --- log-probabilities and gradients in one pass ----------------------------------------------------------------------

TRAINER: Any = SimpleNamespace(
    beta=0.0, args=None, accelerator=SimpleNamespace(num_processes=2, device=CPU), compute_loss_func=None
)


def micro_batch(*responses: Sequence[int]) -> dict[str, Tensor]:
    ids, mask, width = tensors([([3, 4], list(response)) for response in responses])
    halves = {"prompt": slice(None, -width), "completion": slice(-width, None)}
    of_ids, of_masks = (
        {f"{name}_{what}": each[:, at] for name, at in halves.items()} for what, each in (("ids", ids), ("mask", mask))
    )
    return {**of_ids, **of_masks, "advantages": torch.ones(len(responses))}


class PassingCalls(Calls):
    """Adds gradients by token gradients of 0.25."""

    def __init__(self, control: object = None) -> None:
        super().__init__()
        self.executor = SimpleNamespace(placement=SimpleNamespace(control=control))
        self.added: list[int] = []

    def add_gradients(self, samples: Rollouts, loss: object) -> Rollouts:
        self.added.append(len(samples))
        outputs = self.forward("actor.forward", samples)
        if not len(outputs):
            return outputs
        column = outputs.ragged("policy_logprobs")
        return outputs.plus(**{LOGPROB_GRADS: column.like(torch.full_like(column.values, 0.25))})


def collected(made: StepBuffer, *generation: dict[str, Tensor], times: int = 1) -> list[float]:
    """Token gradients that are left for a step over the micro-batches of a generation, where TRL's loss has token
    gradients of 0.25."""
    for at, inputs in list(enumerate(generation)) * times:
        after = generation[at + 1 :]
        rows = [Rows.of_inputs(each) for each in (inputs, *after)]
        used = made.in_one_pass(TRAINER, [inputs, *after], rows)
        logprobs, entropies = made.padded(rows[0], used)
        leaves = LossInputs(rows[0], logprobs.requires_grad_(), entropies, used)
        (0.25 * leaves.logprobs.sum()).backward()
        made.add(leaves, 1.0)
    grads: list[float] = made.take().ragged(LOGPROB_GRADS).values.tolist()
    return grads


def test_a_micro_batch_that_occurs_twice_in_a_step_counts_twice() -> None:
    """TRL repeats a generation's micro-batches where gradient_accumulation_steps is above steps_per_generation."""
    calls: Any = PassingCalls()
    once, again = micro_batch([5, 6], [8]), micro_batch([9])
    assert collected(StepBuffer(calls, CPU), once, again) == [0.0], "the engines have added all"
    calls = PassingCalls()
    assert collected(StepBuffer(calls, CPU), once, again, times=2) == [0.0] * 4 + [0.25] * 4
    assert calls.added == [3]


def test_graphs_are_kept_of_no_rows_that_the_loss_does_not_move() -> None:
    calls: Any = PassingCalls()
    still = {**micro_batch([5, 6], [8]), "advantages": torch.tensor([0.0, 1.0])}
    StepBuffer(calls, CPU).in_one_pass(TRAINER, [still], [Rows.of_inputs(still)])
    assert calls.sizes == [1, 1] and calls.trained[0] is False and calls.added == [1]


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the other rank says, in the order of the collectives."""
    others: list[Any] = []
    monkeypatch.setattr(loss_and_logprobs, "all_gather_object", lambda value, control: [value, others.pop(0)])
    return others


def test_a_rank_whose_completions_are_all_masked_takes_part_in_the_pass_of_the_others(two_ranks: list[Any]) -> None:
    calls: Any = PassingCalls(control="a group")
    two_ranks += [100, [MicroBatch({}, torch.ones(1, 2, dtype=torch.bool), [0])]]
    assert collected(StepBuffer(calls, CPU), micro_batch([], [])) == [0.0]
    assert calls.added == [0] and not two_ranks


def test_micro_batches_that_are_too_large_to_be_sent_are_computed_in_two_passes(two_ranks: list[Any]) -> None:
    calls: Any = PassingCalls(control="a group")
    two_ranks += [MAX_SENT]
    assert collected(StepBuffer(calls, CPU), micro_batch([5, 6], [8])) == [0.25] * 3
    assert not calls.added and calls.sizes[0] == 2 and not two_ranks
