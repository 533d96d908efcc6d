"""`StepBuffer`: from TRL's padded tensors to samples and back, and what is computed for an optimizer step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.algorithms.trainer_loss import LOGPROB_GRADS
from trl_realloc.trainer.policy import step_buffer
from trl_realloc.trainer.policy.step_buffer import MAX_SENT, LossBatch, MicroBatch, Rows, StepBuffer


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
    padded = rows.padded(Rollouts(ids=values.like(values.values.float() + 0.5)), "ids", CPU)
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
        return Rollouts(policy_logprobs=values, entropies=column.like(values.values * 10))


def made_buffer() -> tuple[StepBuffer, Calls]:
    calls: Any = Calls()
    return StepBuffer(calls), calls


def logprobs(outputs: Rollouts) -> list[float]:
    values: list[float] = outputs.ragged("policy_logprobs").values.tolist()
    return values


def rows_of(*responses: Sequence[int]) -> Rows:
    return Rows.of(*tensors([([3, 4], list(response)) for response in responses]))


def test_a_sample_is_computed_once_until_the_policy_changes() -> None:
    made, calls = made_buffer()
    first, second = rows_of([5, 6], [8]), rows_of([8], [9, 9, 9])
    outputs = made.forward([first, second])
    assert logprobs(outputs) == [5.25, 6.25, 8.25] and outputs.ragged("entropies").values[0] == 52.5
    assert logprobs(made.forward([second])) == [8.25, 9.25, 9.25, 9.25]
    assert calls.sizes == [3, 0], "the call of nothing is made too: other ranks may have something"
    for rows in (first, second):
        made.add(with_grads(rows, 0.0), rows.spare)
    assert len(made) == 2
    made.take()
    calls.shift = 0.5
    assert logprobs(made.forward([second]))[0] == 8.5 and len(made) == 0


def test_the_same_response_to_another_prompt_is_another_sample() -> None:
    made, calls = made_buffer()
    made.forward([Rows.of(*tensors([([3], [4, 5]), ([3, 4], [5]), ([2], [4, 5])]))])
    assert calls.sizes == [3]


def with_grads(rows: Rows, grad: float) -> Rollouts:
    column = rows.samples.ragged("responses")
    return rows.samples.plus(**{LOGPROB_GRADS: column.like(torch.full(column.values.shape, grad))})


def test_without_any_response_the_optimizer_makes_its_step_on_a_spare_sample() -> None:
    made, _ = made_buffer()
    rows = rows_of([], [])
    made.add(with_grads(rows, 0.0), rows.spare)
    (grads,) = made.take().ragged(LOGPROB_GRADS).rows()
    assert grads.tolist() == [0.0]


def test_a_step_has_the_samples_of_its_micro_batches_in_order() -> None:
    made, _ = made_buffer()
    for grad, rows in ((0.5, rows_of([5, 6], [])), (1.0, rows_of([8]))):
        made.add(with_grads(rows, grad), rows.spare)
    samples = made.take()
    assert [row.tolist() for row in samples.ragged("responses").rows()] == [[5, 6], [8]]
    assert samples.ragged(LOGPROB_GRADS).values.tolist() == [0.5, 0.5, 1.0]


def test_the_columns_of_samples_are_on_the_host() -> None:
    samples = rows_of([5, 6]).samples
    assert all(isinstance(column, Ragged) and column.values.device == CPU for column in dict(samples).values())


# --- log-probabilities and gradients in one pass ----------------------------------------------------------------------


def micro_batch(*responses: Sequence[int], may_have_grad: Sequence[bool] = ()) -> MicroBatch:
    ids, mask, width = tensors([([3, 4], list(response)) for response in responses])
    halves = {"prompt": slice(None, -width), "completion": slice(-width, None)}
    of_ids, of_masks = (
        {f"{name}_{what}": each[:, part] for name, part in halves.items()}
        for what, each in (("ids", ids), ("mask", mask))
    )
    inputs = {**of_ids, **of_masks}
    rows = Rows.of_inputs(inputs)
    return MicroBatch(inputs, rows, torch.tensor(may_have_grad or [True] * len(rows.samples), dtype=torch.bool))


def make_loss(batches: Sequence[LossBatch]) -> Any:
    """A loss that `PassingCalls` does not call."""


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


def collected(made: StepBuffer, *generation: MicroBatch, times: int = 1) -> list[float]:
    """Token gradients that are left for a step over the micro-batches of a generation, where TRL's loss has token
    gradients of 0.25."""
    for at, first in list(enumerate(generation)) * times:
        # TRL's inputs alone tell that a micro-batch occurs again
        parts = [MicroBatch(part.inputs, part.rows, part.may_have_grad) for part in (first, *generation[at + 1 :])]
        outputs = made.forward_backward(parts, make_loss)
        used = 0.25 if LOGPROB_GRADS in outputs else 0.0
        made.add(with_grads(first.rows, 0.25 - used), first.rows.spare)
    grads: list[float] = made.take().ragged(LOGPROB_GRADS).values.tolist()
    return grads


def test_a_micro_batch_that_occurs_twice_in_a_step_counts_twice() -> None:
    """TRL repeats a generation's micro-batches where gradient_accumulation_steps is above steps_per_generation."""
    calls: Any = PassingCalls()
    once, again = micro_batch([5, 6], [8]), micro_batch([9])
    assert collected(StepBuffer(calls), once, again) == [0.0], "the engines have added all"
    calls = PassingCalls()
    assert collected(StepBuffer(calls), once, again, times=2) == [0.0] * 4 + [0.25] * 4
    assert calls.added == [3]


def test_no_graphs_are_kept_for_samples_without_a_gradient() -> None:
    calls: Any = PassingCalls()
    StepBuffer(calls).forward_backward([micro_batch([5, 6], [8], may_have_grad=[False, True])], make_loss)
    assert calls.sizes == [1, 1] and calls.trained[0] is False and calls.added == [1]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=4))
def test_outputs_are_in_the_order_of_the_samples(may_have_grad: list[list[bool]]) -> None:
    tokens = itertools.count(5)
    parts = [micro_batch(*([next(tokens)] for _ in flags), may_have_grad=flags) for flags in may_have_grad]
    calls: Any = PassingCalls()
    made = StepBuffer(calls)
    for at, (part, flags) in enumerate(zip(parts, may_have_grad, strict=True)):
        outputs = made.forward_backward(parts[at:], make_loss)
        expected = part.rows.samples.ragged("responses").values + 0.25
        assert logprobs(outputs) == expected.tolist()
        assert outputs.ragged(LOGPROB_GRADS).values.tolist() == [0.25 * flag for flag in flags]
    assert len(calls.sizes) <= 2


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the other rank says, in the order of the collectives."""
    others: list[Any] = []
    monkeypatch.setattr(step_buffer, "all_gather_object", lambda value, control: [value, others.pop(0)])
    return others


def test_a_rank_whose_completions_are_all_masked_takes_part_in_the_pass_of_the_others(two_ranks: list[Any]) -> None:
    calls: Any = PassingCalls(control="a group")
    two_ranks += [100, [LossBatch({}, torch.ones(1, 2, dtype=torch.bool), [0])]]
    assert collected(StepBuffer(calls), micro_batch([], [])) == [0.0]
    assert calls.added == [0] and not two_ranks


def test_micro_batches_that_are_too_large_to_be_sent_are_computed_in_two_passes(two_ranks: list[Any]) -> None:
    calls: Any = PassingCalls(control="a group")
    two_ranks += [MAX_SENT]
    assert collected(StepBuffer(calls), micro_batch([5, 6], [8])) == [0.25] * 3
    assert not calls.added and calls.sizes[0] == 2 and not two_ranks
