"""What a rank sends and receives for the loop of another trainer does not depend on how many ranks there are, unless it
is the first rank of a mesh or of the job."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from mailboxes import Mailboxes, on_ranks

from trl_realloc import Cluster
from trl_realloc.algorithms.nonfinite import NonFiniteError
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.algorithms.trainer_loss import LOGPROB_GRADS, TrainerLoss
from trl_realloc.engines.requests import Sampling
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.dataflow import Call, CallKind
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten
from trl_realloc.runtime.call_server import CallServer
from trl_realloc.runtime.calls.call_runner import CallRunner
from trl_realloc.runtime.calls.generate_and_score import CallSettings, Step
from trl_realloc.runtime.calls.training_calls import GRAD_NORM
from trl_realloc.runtime.executor import Executor
from trl_realloc.runtime.failures.alarm import Alarm
from trl_realloc.runtime.messages import Channels
from trl_realloc.runtime.samples.routes import Share


SAMPLES, TOKENS = 8, 200  # of each rank; of a response
GRAPH = grpo_graph(reference=False, reward_models=False)


class NoEngines:
    """What the executor asks of `Placement`, of a rank without engines."""

    def __init__(self, plan: ExecutionPlan, rank: int) -> None:
        self.plan, self.rank = plan, rank

    def has(self, call: str) -> bool:
        return self.rank in self.plan.mesh(call)

    takes_part = has

    def refresh(self, call: str) -> None:
        return None

    def has_collectives(self, call: str) -> bool:
        return False

    def check_fresh(self, call: str) -> None:
        pass

    def shares_tokens(self, call: str) -> bool:
        return False

    def take_shared_tokens(self, call: str) -> int:
        return 0

    def resident(self, call: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Arithmetic(CallRunner):
    """The tokens of a response are its prompt's first one; log-probabilities are the token, entropies their half."""

    def compute(self, call: Call, share: Share, step: Step) -> Rollouts:
        if call.kind is CallKind.TRAIN:
            (batch,) = share.mini_batches()
            norm = torch.full((len(batch),), 2.5)
            return Rollouts(index=batch.tensor("index"), update=torch.zeros(len(batch)), **{GRAD_NORM: norm})
        samples = share.samples
        index = samples.tensor("index")
        if call.kind is CallKind.GENERATE:
            rows = [[int(prompt[0])] * TOKENS for prompt in samples.ragged("prompts").rows()]
            return Rollouts(index=index, responses=Ragged.of(rows, torch.long))
        values = samples.ragged("responses")
        return Rollouts(
            index=index, policy_logprobs=values.like(values.values.float()), entropies=values.like(values.values / 2)
        )


class NamesEngine(Arithmetic):
    """A response is one token, the rank that generated it."""

    def compute(self, call: Call, share: Share, step: Step) -> Rollouts:
        index = share.samples.tensor("index")
        return Rollouts(index=index, responses=Ragged.of([[self.placement.rank]] * len(index), torch.long))


def update(calls: CallServer, rank: int, grad: float = 0.1) -> list[Rollouts]:
    prompts = [[1000 * rank + at] for at in range(SAMPLES)]
    calls.at(0)
    made = calls.generate(prompts)
    samples = Rollouts(prompts=Ragged.of(prompts, torch.long), responses=made.ragged("responses"))
    scores = calls.forward("actor.forward", samples)
    grads = torch.full_like(scores.ragged("entropies").values, grad if rank == 1 else 0.1)
    trained = calls.train(samples.plus(**{LOGPROB_GRADS: scores.ragged("entropies").like(grads)}), 0.1)
    return [samples.plus(**scores), trained]


def turns(calls: CallServer, rank: int) -> list[tuple[int, int]]:
    """The engines of two samples that have a second turn, in the first and in the second."""
    prompts, again = [[1000 * rank + at] for at in range(SAMPLES)], [rank, rank + 4]
    calls.at(0)
    first = [row.tolist() for row in calls.generate(prompts).ragged("responses").rows()]
    second = calls.generate([[*prompts[at], *first[at], 5] for at in again]).ragged("responses").values.tolist()
    return [(first[at][0], engine) for at, engine in zip(again, second, strict=True)]


def run(
    ranks: int, drive: Callable[[CallServer, int], Any] = update, kind: type[CallRunner] = Arithmetic
) -> tuple[list[Any], Mailboxes]:
    """What all ranks do with their samples: the result of each, or its error. By default one update, in which each
    generates, scores and trains: the samples and the training's result."""
    plan, boxes = flatten(Cluster(1, ranks), generation_engine="transformers", graph=GRAPH), Mailboxes()
    tokenizer = tiny.tokenizer()

    def work(rank: int) -> Any:
        placement: Any = NoEngines(plan, rank)
        settings = CallSettings(Sampling(TOKENS, 1.0), 0, None, tokenizer, [], {})
        algorithm, alarm = TrainerLoss(GRAPH), Alarm()
        channels = Channels(boxes.of(rank), plan.order, rank, plan.cluster.size)
        runner = kind(placement, algorithm, settings, alarm)
        return drive(CallServer(Executor(placement, channels, algorithm, settings, alarm, runner)), rank)

    outcomes = on_ranks(range(ranks), work, timeout_s=120)
    # a refusal of samples is an outcome, any other exception is a defect
    for outcome in outcomes:
        if isinstance(outcome, Exception) and not isinstance(outcome, NonFiniteError):
            raise outcome
    return outcomes, boxes


def test_a_rank_gets_its_part_and_not_the_samples_of_all() -> None:
    counts: dict[int, dict[str, Counter[int]]] = {}
    for ranks in (8, 32):  # of fewer, none but the first sends on to two in the tree of messages
        outcomes, boxes = run(ranks)
        for rank, (samples, trained) in enumerate(outcomes):
            first = [[1000 * rank + at] * TOKENS for at in range(SAMPLES)]
            assert [row.tolist() for row in samples.ragged("responses").rows()] == first
            assert [row.tolist() for row in samples.ragged("policy_logprobs").rows()] == first
            assert trained.tensor(GRAD_NORM).tolist() == [2.5]
        counts[ranks] = {"messages": boxes.sent, "sent": boxes.bytes, "received": boxes.received}
    few, many = ({name: max(of[rank] for rank in range(1, n)) for name, of in counts[n].items()} for n in (8, 32))
    assert many["messages"] == few["messages"]
    for name in ("sent", "received"):
        # the number of samples of every rank, and the names of columns in messages
        assert many[name] < 1.1 * few[name], name
    column = SAMPLES * TOKENS * 8  # bytes of a rank's responses; those of all ranks are eight times as many
    assert few["received"] < 6 * column, "its responses three times, log-probabilities, entropies and token gradients"


def test_numbers_that_are_not_finite_are_refused_on_every_rank_before_anything_is_trained() -> None:
    outcomes, _ = run(4, partial(update, grad=float("nan")))
    assert {type(outcome) for outcome in outcomes} == {NonFiniteError}
    assert {outcome.sample for outcome in outcomes} == {SAMPLES}, "the first one of the second rank"
    with pytest.raises(NonFiniteError, match="Nothing was trained on this batch"):
        raise outcomes[3]


def test_a_later_turn_goes_to_the_engine_that_generated_the_turn_before() -> None:
    outcomes, _ = run(4, turns, NamesEngine)
    assert outcomes == [[(rank, rank)] * 2 for rank in range(4)]
