"""One rank's samples in an iteration, without engines and processes: the ranks of a job are threads. With processes,
see tests/multiprocess."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mailboxes import Mailbox, Mailboxes, on_ranks

from trl_realloc.algorithms.nonfinite import NonFiniteError
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.algorithms.trainer_loss import TrainerLoss
from trl_realloc.engines.requests import Sampling
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.dataflow import Call, CallKind, DataflowGraph, Role
from trl_realloc.plan.execution_plan import Assignment, ExecutionPlan, ParallelStrategy
from trl_realloc.plan.presets import flatten
from trl_realloc.plan.spans import Span
from trl_realloc.runtime.calls.batch import Batch, CallFailure, CallOutput, CallsFailed
from trl_realloc.runtime.calls.generate_and_score import CallSettings, Step
from trl_realloc.runtime.failures.alarm import Alarm, JobFailed
from trl_realloc.runtime.messages import Channels
from trl_realloc.runtime.samples.routes import PrefixAffinity, Share, receivers, replica, sources


SPAN = Span("actor.generate", 0, 1.0, 2.0, 0, 5)
TOKENIZER: Any = SimpleNamespace(batch_decode=lambda rows, **_: [" ".join(map(str, row)) for row in rows])
SETTINGS = CallSettings(Sampling(4, 1.0), 0, None, TOKENIZER, [], {})


def batch_of(plan: ExecutionPlan, rank: int, boxes: Mailboxes, samples: Rollouts | None = None, **how: Any) -> Batch:
    samples = Rollouts() if samples is None else samples
    channels = Channels(how.pop("messages", None) or boxes.of(rank), plan.order, rank, plan.cluster.size)
    affinity = {name: PrefixAffinity() for name in plan.graph.calls_of(CallKind.GENERATE)}
    algorithm = TrainerLoss(plan.graph)
    step = Step(0, len(samples) * [{}], {Role.ACTOR: 1.0})
    return Batch(plan, channels, step, algorithm, SETTINGS, Alarm(), affinity, lambda call: False, samples, **how)


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


def alone(*running: str) -> Batch:
    return batch_of(flatten(Cluster(1, 1)), 0, Mailboxes(), running=running)


def test_parts_come_back_in_the_order_of_the_global_batch_with_their_spans() -> None:
    batch = alone("actor.generate")
    batch.put("actor.generate", CallOutput(samples(), (SPAN,)))
    made = batch.outputs("actor.generate")
    assert made.samples.tensor("index").tolist() == [0, 1, 2]
    assert [row.tolist() for row in made.samples.ragged("responses").rows()] == [[5, 6], [], [7]]
    assert made.spans == (SPAN,)


def test_a_failure_is_raised_where_its_samples_are_needed_with_call_rank_and_reason() -> None:
    batch = alone("actor.generate", "reward.forward")
    batch.put_failure(["reward.forward"], ValueError("no"), is_collective=False)
    batch.put("actor.generate", CallOutput(samples()))
    assert len(batch.outputs("actor.generate").samples) == 3
    with pytest.raises(CallsFailed, match=r"reward.forward failed on rank 0 \(host .*\): no"):
        batch.outputs("reward.forward")


def test_outputs_without_a_sample_on_any_rank_are_empty() -> None:
    batch = alone("actor.train")
    batch.put("actor.train", CallOutput(Rollouts()))
    assert not len(batch.outputs("actor.train").samples)


def test_the_first_rank_of_each_replica_sends_to_the_leaders_of_the_meshes_that_read() -> None:
    plan = four_devices()
    everything = plan.order
    assert sources(plan, "actor.generate") == (0, 2) and sources(plan, "critic.train") == (0, 1, 2, 3)
    assert receivers(plan, "actor.generate", everything) == (0, 2)
    assert receivers(plan, "reward.forward", everything) == (0,)
    assert receivers(plan, "actor.generate", ["actor.generate"]) == (0,), "no other call of the iteration reads it"
    assert [replica(plan, "actor.generate", rank) for rank in range(4)] == [0, 0, 1, 1]


def test_a_leader_sends_each_share_once_to_its_replica_which_forwards_it() -> None:
    """Scoring by two replicas of two ranks: the leader sends one share to its neighbour, and one to the second replica,
    whose first rank has a neighbour too."""
    plan, boxes = four_devices(), Mailboxes()
    split = Assignment(DeviceMesh(0, 4), ParallelStrategy(dp=2, tp=2), "megatron")
    plan = ExecutionPlan(plan.cluster, {**plan.assignments, "critic.forward": split})
    prompts = Rollouts(index=torch.arange(3), prompts=Ragged.of([[1], [2], [3]], torch.long))
    batches = [batch_of(plan, rank, boxes, prompts) for rank in range(4)]
    for batch in batches:
        batch.know("actor.generate", samples().plus(logprobs=samples().ragged("responses")))
    shares = [batch.inputs(plan.graph.call("critic.forward")) for batch in batches]
    of_ranks = [share.samples.tensor("index").tolist() for share in shares if isinstance(share, Share)]
    assert of_ranks[0] == of_ranks[1] and of_ranks[2] == of_ranks[3]
    assert sorted(of_ranks[0] + of_ranks[2]) == [0, 1, 2]
    assert boxes.sent == {0: 2, 2: 1}


def test_a_call_without_inputs_sends_their_failures_on_to_every_rank_of_its_mesh() -> None:
    plan, boxes = four_devices(), Mailboxes()
    batches = [batch_of(plan, rank, boxes, samples().only(["index"]), running=plan.order) for rank in range(4)]
    failure = CallFailure(0, "actor.generate", "no prompt")
    for rank in (0, 2):
        batches[rank].put("actor.generate", (failure,))
    for rank in (2, 3):
        share = batches[rank].inputs(plan.graph.call("reward.forward"))
        assert isinstance(share, CallsFailed) and share.failures == (failure,)
        batches[rank].put("reward.forward", share.failures)
    with pytest.raises(CallsFailed) as failed:
        batches[0].outputs("reward.forward")
    assert failed.value.failures == (failure,), "said once"


# --- any graph, any meshes, any order of arrival ----------------------------------------------------------------------


class Delayed(Mailbox):
    """Messages whose sender waits now and then, so that they arrive in another order in each example."""

    def __init__(self, boxes: Mailboxes, rank: int, seed: int) -> None:
        super().__init__(boxes, rank)
        self._draw = random.Random(1000 * seed + rank)

    def send(self, content: bytes, rank: int, tag: int) -> None:
        if self._draw.random() < 0.2:
            time.sleep(self._draw.random() * 1e-3)
        super().send(content, rank, tag)


@st.composite
def plans(draw: st.DrawFn) -> ExecutionPlan:
    """A graph of a generation and up to four calls that read any earlier columns, on any meshes of four devices."""
    calls = [Call(Role.ACTOR, CallKind.GENERATE, ("prompts",), ("responses", "made0"))]
    for number, role in enumerate(draw(st.permutations([Role.REFERENCE, Role.CRITIC, Role.REWARD]))[:3], 1):
        earlier = draw(st.sets(st.sampled_from([f"made{n}" for n in range(number)])))
        calls.append(Call(role, CallKind.FORWARD, ("prompts", "responses", *sorted(earlier)), (f"made{number}",)))
    graph, world = DataflowGraph(tuple(calls)), draw(st.sampled_from([1, 2, 4]))
    assignments = {}
    for call in calls:
        size = draw(st.sampled_from([n for n in (1, 2, 4) if n <= world]))
        tp = draw(st.sampled_from([n for n in (1, 2, 4) if n <= size]))
        mesh = DeviceMesh(size * draw(st.integers(0, world // size - 1)), size)
        engine = "vllm" if call.kind is CallKind.GENERATE else "megatron"
        assignments[call.name] = Assignment(mesh, ParallelStrategy(dp=size // tp, tp=tp), engine)
    return ExecutionPlan(Cluster(1, world), assignments, graph=graph)


def made_by(call: Call, share: Rollouts) -> Rollouts:
    """The outputs of a call: numbers that tell which columns of which samples it read."""
    index = share.tensor("index").tolist()
    if call.kind is CallKind.GENERATE:
        rows = [row.tolist() for row in share.ragged("prompts").rows()]
        responses = [[sum(row)] * (1 + sum(row) % 3) for row in rows]
    else:
        read = [share.ragged(column).rows() for column in call.inputs]
        sums = [sum(int(row.sum()) for row in of_sample) for of_sample in zip(*read, strict=True)]
        lengths = share.ragged("responses").lengths.tolist()
        responses = [[number % 997] * length for number, length in zip(sums, lengths, strict=True)]
    columns: dict[str, Any] = dict.fromkeys(call.outputs, Ragged.of(responses, torch.long))
    return Rollouts(index=torch.tensor(index, dtype=torch.long), **columns)


lengths_of_prompts = st.lists(st.integers(1, 5), min_size=1, max_size=9)


def prompts_of(lengths: Sequence[int]) -> Rollouts:
    rows = [[7 * at + 1] * length for at, length in enumerate(lengths)]
    return Rollouts(index=torch.arange(len(rows)), prompts=Ragged.of(rows, torch.long))


@given(plans(), lengths_of_prompts, st.integers(0, 99), st.data())
@settings(max_examples=80)
def test_every_sample_arrives_once_at_each_reader_and_every_rank_that_waits_is_answered(
    plan: ExecutionPlan, lengths: list[int], seed: int, data: st.DataObject
) -> None:
    prompts, boxes, world = prompts_of(lengths), Mailboxes(20.0), plan.cluster.size
    failing = data.draw(st.sampled_from(["", "", *plan.order]))
    fails_on = data.draw(st.sampled_from(plan.mesh(failing).devices)) if failing else -1
    expected = prompts
    for name in plan.order:
        expected = expected.plus(**made_by(plan.graph.call(name), expected))
    is_heard = failing and fails_on in sources(plan, failing)
    downstream = {failing} if is_heard else set[str]()
    for call in map(plan.graph.call, plan.order):
        if downstream & {plan.graph.producer(column) for column in call.inputs}:
            downstream.add(call.name)

    def rank_of(rank: int) -> dict[str, list[int]]:
        messages = Delayed(boxes, rank, seed)
        batch, seen = batch_of(plan, rank, boxes, prompts, running=plan.order, messages=messages), {}
        for call in map(plan.graph.call, plan.order):
            if rank not in plan.mesh(call.name):
                continue
            share = batch.inputs(call)
            if isinstance(share, CallsFailed):
                assert call.name in downstream - {failing}
                batch.put(call.name, share.failures)
            elif (call.name, rank) == (failing, fails_on):
                batch.put_failure([call.name], ValueError("broken"), is_collective=False)
            else:
                seen[call.name] = share.samples.tensor("index").tolist()
                for column in call.inputs:
                    wanted = [expected.ragged(column).rows()[index].tolist() for index in seen[call.name]]
                    assert [row.tolist() for row in share.samples.ragged(column).rows()] == wanted
                batch.put(call.name, CallOutput(made_by(call, share.samples)))
        if rank == 0:
            for name in plan.order:
                if name in downstream:
                    with pytest.raises(CallsFailed, match=f"{failing} failed on rank {fails_on} .*broken"):
                        batch.outputs(name)
                else:
                    assert batch.outputs(name).samples.tensor("index").tolist() == list(range(len(lengths)))
        batch.channels.flush()
        return seen

    seen = on_ranks(range(world), rank_of)
    for rank, outcome in enumerate(seen):
        assert not isinstance(outcome, Exception), f"rank {rank}: {outcome!r}"
    for name in set(plan.order) - downstream - {failing}:
        firsts = [seen[rank][name] for rank in sources(plan, name)]
        assert sorted(index for of_rank in firsts for index in of_rank) == list(range(len(lengths)))
        for rank in plan.mesh(name).devices:
            assert seen[rank][name] == firsts[replica(plan, name, rank)], "all ranks of a replica have its samples"


@given(plans(), st.lists(lengths_of_prompts | st.just([]), min_size=4, max_size=4), st.integers(0, 99), st.booleans())
@settings(max_examples=60)
def test_samples_of_each_rank_come_back_to_it_in_their_order(
    plan: ExecutionPlan, lengths: list[list[int]], seed: int, breaks: bool
) -> None:
    world = plan.cluster.size
    sizes = [len(of_rank) for of_rank in lengths[:world]]
    if not any(sizes):
        sizes[-1], lengths[world - 1] = 1, [2]
    (call,), boxes = map(plan.graph.call, plan.graph.calls_of(CallKind.GENERATE)), Mailboxes(20.0)

    def rank_of(rank: int) -> Rollouts:
        local = prompts_of(lengths[rank]).only(["prompts"])
        batch = batch_of(plan, rank, boxes, local, sizes=sizes, messages=Delayed(boxes, rank, seed))
        batch.send_samples(call.name)
        if rank in plan.mesh(call.name):
            share = batch.inputs(call)
            assert isinstance(share, Share)
            if breaks and rank == plan.mesh(call.name).leader:
                batch.put_failure([call.name], ValueError("broken"), is_collective=False)
            else:
                batch.put(call.name, CallOutput(made_by(call, share.samples)))
        return batch.results(call)[0]

    for rank, outcome in enumerate(on_ranks(range(world), rank_of)):
        if breaks:
            assert isinstance(outcome, JobFailed) and "broken" in str(outcome)
        elif sizes[rank]:
            expected = made_by(call, prompts_of(lengths[rank]))
            assert [row.tolist() for row in outcome.ragged("responses").rows()] == [
                row.tolist() for row in expected.ragged("responses").rows()
            ]
        else:
            assert not len(outcome)


def test_numbers_that_are_not_finite_are_refused_on_every_rank_also_outside_the_mesh_that_trains() -> None:
    graph = grpo_graph(reference=False, reward_models=False)
    plan = flatten(Cluster(1, 4), graph=graph)
    on_two = replace(plan["actor.train"], mesh=DeviceMesh(2, 2), strategy=ParallelStrategy(dp=2))
    plan = ExecutionPlan(plan.cluster, {**plan.assignments, "actor.train": on_two}, graph=graph)
    call, boxes = plan.graph.call("actor.train"), Mailboxes(20.0)
    columns = {"prompts": torch.long, "responses": torch.long, "logprob_grads": torch.float32}
    rows: dict[str, Any] = {name: Ragged.of([[1], [2]], dtype) for name, dtype in columns.items()}
    broken = Rollouts(**rows).plus(logprob_grads=Ragged.of([[0.5], [float("nan")]], torch.float32))

    def rank_of(rank: int) -> Rollouts:
        batch = batch_of(plan, rank, boxes, broken if rank == 1 else Rollouts(**rows), sizes=[2] * 4)
        batch.send_samples(call.name)
        if rank in plan.mesh(call.name):
            share = batch.inputs(call)
            assert isinstance(share, CallsFailed)
            batch.put(call.name, share.failures)
        return batch.results(call)[0]

    outcomes = on_ranks(range(4), rank_of)
    assert [(type(outcome), outcome.sample) for outcome in outcomes] == [(NonFiniteError, 3)] * 4, outcomes
