"""What one rank's post office promises without any other rank; with others, see tests/multiprocess."""

from __future__ import annotations

import pytest
import torch

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.execution_plan import Assignment, ExecutionPlan, ParallelStrategy
from trl_realloc.plan.presets import flatten
from trl_realloc.plan.timeline import Span
from trl_realloc.runtime.exchange import CallFailure, CallOutput, Exchange, sources
from trl_realloc.runtime.failures.alarm import JobFailed


SPAN = Span("actor.generate", 0, 1.0, 2.0, 0, 5)


def samples() -> Rollouts:
    return Rollouts(index=torch.tensor([2, 0, 1]), responses=Ragged.of([[7], [5, 6], []], torch.long))


def test_pieces_come_back_in_the_order_of_the_global_batch_with_their_spans() -> None:
    exchange = Exchange(flatten(Cluster(1, 1)), 0)
    exchange.begin()
    exchange.publish("actor.generate", CallOutput(samples(), SPAN))
    made = exchange.collect("actor.generate")
    assert made.tensor("index").tolist() == [0, 1, 2]
    assert [row.tolist() for row in made.ragged("responses").rows()] == [[5, 6], [], [7]]
    assert exchange.spans("actor.generate") == (SPAN,)


def test_a_failure_is_raised_where_its_piece_is_needed_with_call_rank_and_reason() -> None:
    exchange = Exchange(flatten(Cluster(1, 1)), 0)
    exchange.begin()
    exchange.publish("reward.forward", CallFailure(0, "reward.forward", "no"))
    exchange.publish("actor.generate", CallOutput(samples(), SPAN))
    assert len(exchange.collect("actor.generate")) == 3
    with pytest.raises(JobFailed, match=r"reward.forward failed on rank 0 \(host .*\): no"):
        exchange.collect("reward.forward")


def test_of_a_tensor_parallel_engine_the_first_rank_speaks() -> None:
    plan = flatten(Cluster(1, 4))
    split = Assignment(DeviceMesh(0, 4), ParallelStrategy(dp=2, tp=2), "vllm")
    plan = ExecutionPlan(plan.cluster, {**plan.assignments, "actor.generate": split})
    assert sources(plan, "actor.generate") == (0, 2) and sources(plan, "actor.train") == (0, 1, 2, 3)
