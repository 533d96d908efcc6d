"""What one rank sends and receives of samples, without other processes; with them, see tests/multiprocess."""

from __future__ import annotations

import pytest
import torch
from mailboxes import Mailbox, Mailboxes

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.execution_plan import Assignment, ExecutionPlan, ParallelStrategy
from trl_realloc.plan.presets import flatten
from trl_realloc.plan.timeline import Span
from trl_realloc.runtime.samples.exchange import CallFailure, CallOutput, CallsFailed, Exchange
from trl_realloc.runtime.samples.routes import is_divided_by_each, receivers, replica, sources
from trl_realloc.runtime.samples.shares import Share


SPAN = Span("actor.generate", 0, 1.0, 2.0, 0, 5)


def samples() -> Rollouts:
    return Rollouts(index=torch.tensor([2, 0, 1]), responses=Ragged.of([[7], [5, 6], []], torch.long))


def four_devices() -> ExecutionPlan:
    """Generation on all four in two tensor groups, scoring on the last two, training on the first two."""
    plan = flatten(Cluster(1, 4))
    changed = {
        "actor.generate": Assignment(DeviceMesh(0, 4), ParallelStrategy(dp=2, tp=2), "vllm"),
        "reward.forward": Assignment(DeviceMesh(2, 2), ParallelStrategy(dp=2), "zero"),
        "actor.train": Assignment(DeviceMesh(0, 2), ParallelStrategy(dp=1, tp=2), "megatron"),
    }
    return ExecutionPlan(plan.cluster, {**plan.assignments, **changed})


def test_parts_come_back_in_the_order_of_the_global_batch_with_their_spans() -> None:
    exchange = Exchange(flatten(Cluster(1, 1)), 0)
    exchange.begin(["actor.generate"])
    exchange.publish("actor.generate", CallOutput(samples(), (SPAN,)))
    made = exchange.collect("actor.generate")
    assert made.samples.tensor("index").tolist() == [0, 1, 2]
    assert [row.tolist() for row in made.samples.ragged("responses").rows()] == [[5, 6], [], [7]]
    assert made.spans == (SPAN,)


def test_a_failure_is_raised_where_its_samples_are_needed_with_call_rank_and_reason() -> None:
    exchange = Exchange(flatten(Cluster(1, 1)), 0)
    exchange.begin(["actor.generate", "reward.forward"])
    exchange.publish("reward.forward", (CallFailure(0, "reward.forward", "no"),))
    exchange.publish("actor.generate", CallOutput(samples()))
    assert len(exchange.collect("actor.generate").samples) == 3
    with pytest.raises(CallsFailed, match=r"reward.forward failed on rank 0 \(host .*\): no"):
        exchange.collect("reward.forward")


def test_outputs_without_a_sample_on_any_rank_are_empty() -> None:
    exchange = Exchange(flatten(Cluster(1, 1)), 0)
    exchange.begin(["actor.train"])
    exchange.publish("actor.train", CallOutput(Rollouts()))
    assert not len(exchange.collect("actor.train").samples)


def test_the_first_rank_of_each_replica_sends_to_the_leaders_of_the_meshes_that_read() -> None:
    plan = four_devices()
    everything = plan.order
    assert sources(plan, "actor.generate") == (0, 2) and sources(plan, "critic.train") == (0, 1, 2, 3)
    assert receivers(plan, "actor.generate", everything) == (0, 2)
    assert receivers(plan, "reward.forward", everything) == (0,)
    assert receivers(plan, "actor.generate", ["actor.generate"]) == (0,), "no other call of the iteration reads it"
    assert [replica(plan, "actor.generate", rank) for rank in range(4)] == [0, 0, 1, 1]
    assert is_divided_by_each(plan, "actor.generate") and not is_divided_by_each(plan, "reward.forward")


def test_the_leader_sends_a_share_to_each_replica_which_passes_it_on() -> None:
    plan, boxes = four_devices(), Mailboxes()
    exchanges = [Exchange(plan, rank, messages=Mailbox(boxes, rank)) for rank in range(4)]
    exchanges[2].distribute("reward.forward", [Share(samples().select(own)) for own in ([0, 2], [1])])
    assert boxes.sent == {2: 1}
    assert exchanges[3].receive_share("reward.forward").samples.tensor("index").tolist() == [0]
    exchanges[0].distribute("actor.train", [Share(samples(), (samples().only(["index"]),))])
    got = exchanges[1].receive_share("actor.train")
    assert [batch.tensor("index").tolist() for batch in got.mini_batches()] == [[2, 0, 1]]
    split = Assignment(DeviceMesh(0, 4), ParallelStrategy(dp=2, tp=2), "megatron")
    plan = ExecutionPlan(plan.cluster, {**plan.assignments, "critic.forward": split})
    boxes.sent.clear()
    exchanges = [Exchange(plan, rank, messages=Mailbox(boxes, rank)) for rank in range(4)]
    exchanges[0].distribute("critic.forward", [Share(samples().select(own)) for own in ([0, 2], [1])])
    received = [exchanges[rank].receive_share("critic.forward").samples.tensor("index").tolist() for rank in (1, 2, 3)]
    assert received == [[2, 1], [0], [0]]
    assert boxes.sent == {0: 2, 2: 1}, "the leader to its neighbour and to the second replica, which has another rank"


def test_a_call_without_inputs_sends_their_failures_on_to_every_rank_of_its_mesh() -> None:
    plan, boxes = four_devices(), Mailboxes()
    exchanges = [Exchange(plan, rank, messages=Mailbox(boxes, rank)) for rank in range(4)]
    failures = (CallFailure(1, "actor.generate", "no prompt"),)
    exchanges[2].distribute("reward.forward", CallsFailed(failures))
    with pytest.raises(CallsFailed, match="actor.generate failed on rank 1 .*no prompt"):
        exchanges[3].receive_share("reward.forward")
    for rank in (2, 3):
        exchanges[rank].publish("reward.forward", failures)
    with pytest.raises(CallsFailed) as failed:
        exchanges[0].collect("reward.forward")
    assert failed.value.failures == failures, "said once"
