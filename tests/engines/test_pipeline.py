"""What a stage does by itself, and in which order it comes to its messages; what the stages compute together is held in
tests/multiprocess."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import rollouts

from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.training import stage_run
from trl_realloc.engines.training.heads import ValueHead
from trl_realloc.engines.training.pipeline import PackedSamples, StagePipeline
from trl_realloc.engines.training.stage_messages import StageTask
from trl_realloc.engines.training.stage_run import Orders, StageRun, StageWork, run_pipeline
from trl_realloc.plan.batching import one_f_one_b


pytestmark = pytest.mark.oldest


CPU = torch.device("cpu")
HEAD, SAMPLE = ValueHead(tiny.classifier()), rollouts(3).select([0])


@pytest.fixture
def group() -> Iterator[MeshGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield MeshGroup((0,), 0, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory in a layer"), ValueError("of a user's hook")])
@pytest.mark.parametrize("trains", [False, True])
def test_an_error_in_a_stage_comes_out_as_itself(group: MeshGroup, error: Exception, trains: bool) -> None:
    head = ValueHead(tiny.classifier())

    def fails(*given: Any) -> None:
        raise error

    head.model.score.register_forward_hook(fails)
    pipeline = StagePipeline(head, group, CPU, hidden=head.model.config.hidden_size)
    work = StageWork(
        pipeline,
        [PackedSamples(rollouts(4))],
        lambda at, outputs: outputs["values"].values.sum(),
        lambda compute: compute(),
    )
    with pytest.raises(type(error)) as raised:
        run_pipeline(work, trains=trains)
    assert raised.value is error


@pytest.mark.parametrize(("micro_batches", "stages"), [(1, 1), (2, 4), (4, 4), (9, 3)])
def test_1f1b_holds_the_activations_of_no_more_micro_batches_than_stages(micro_batches: int, stages: int) -> None:
    for stage in range(stages):
        held, most = set[int](), 0
        for number, is_backward in one_f_one_b(micro_batches, stages, stage):
            (held.remove if is_backward else held.add)(number)
            most = max(most, len(held))
        assert most == min(micro_batches, stages - stage) and not held


class Sent:
    """In place of a message: counts those on their way."""

    under_way = most = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        Sent.under_way += 1
        Sent.most = max(Sent.most, Sent.under_way)

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        Sent.under_way -= 1


def test_a_stage_that_scores_keeps_a_hidden_state_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    head, ran = ValueHead(tiny.classifier()).eval(), list[int]()
    pipeline = StagePipeline(head, MeshGroup((0, 1, 2), 0), CPU, hidden=head.model.config.hidden_size)
    monkeypatch.setattr(dist, "isend", Sent)

    def call(work: Any) -> Any:
        ran.append(len(ran))
        return torch.zeros(1, 1, pipeline.hidden), {}

    micros = [PackedSamples(rollouts(4).select([at % 4])) for at in range(9)]
    run_pipeline(StageWork(pipeline, micros, lambda at, outputs: torch.zeros(()), call), trains=False)
    assert ran == list(range(9))
    assert Sent.most == 4 and not Sent.under_way


# --- the order of the messages ------------------------------------------------------------------------------------

Routes = list[tuple[tuple[int, ...], int]]  # of each model's pipelines: the stages in order, and its micro-batches


def drawn(draw: random.Random) -> tuple[int, list[Routes]]:
    """One model on a line, in either direction, or two in opposite directions, of which one may have several pipelines
    there."""
    size = draw.choice([2, 3, 4, 6])
    models = []
    for is_reversed in draw.choice([[False], [True], [False, True]]):
        copies = draw.choice([1, 2, 3]) if len(models) == 1 else 1
        copies = copies if size % copies == 0 and size // copies > 1 else 1
        length = size // copies
        lines = [tuple(range(copy * length, (copy + 1) * length)) for copy in range(copies)]
        models.append([(line[::-1] if is_reversed else line, draw.randint(0, 5)) for line in lines])
    return size, models


def any_orders(draw: random.Random, size: int, models: list[Routes]) -> Orders:
    """An order that the stages can follow; neighbours may run the micro-batches in different orders, and some have no
    backward."""
    orders: list[list[StageTask]] = [[] for _ in range(size)]
    waiting = []
    for model, routes in enumerate(models):
        for route, count in routes:
            for number in range(count):
                forwards = [(stage, StageTask(model, number, False)) for stage in route]
                backwards = [(stage, StageTask(model, number, True)) for stage in route[::-1]]
                waiting.append(forwards + backwards * draw.choice([0, 1, 1]))
    while waiting := [left for left in waiting if left]:
        stage, task = draw.choice(waiting).pop(0)
        orders[stage].append(task)
    return orders


def pipelined(size: int, models: list[Routes]) -> Orders:
    """1F1B of one model."""
    orders: list[list[StageTask]] = [[] for _ in range(size)]
    for route, count in models[0]:
        for own, stage in enumerate(route):
            orders[stage] = [StageTask(0, *task) for task in one_f_one_b(count, len(route), own)]
    return orders


Message = tuple[bool, int, int]  # whether it is sent, the peer, the tag


def messages_of(rank: int, size: int, models: list[Routes], orders: Orders, has_tags: bool) -> list[Message]:
    """The messages of a rank in the order in which it comes to them."""
    came: list[Message] = []

    class Done:
        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            pass

    def message(is_sent: bool) -> Callable[..., Done]:
        return lambda tensor, peer, group, tag: [came.append((is_sent, peer, tag)), Done()][1]

    def call(work: Any) -> Any:
        return torch.zeros(1, 1, 1), {}

    works = []
    for routes in models:
        route, count = next(pair for pair in routes if rank in pair[0])
        pipeline = StagePipeline(HEAD, MeshGroup(route, rank), CPU, hidden=1)
        micros = [PackedSamples(SAMPLE)] * count
        works.append(StageWork(pipeline, micros, lambda at, outputs: torch.zeros(()), call))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "isend", message(True))
        patched.setattr(dist, "irecv", message(False))
        patched.setattr(stage_run, "is_accelerator", lambda device: not has_tags)
        StageRun(works, orders, MeshGroup(tuple(range(size)), rank)).run()
    return came


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_no_order_ends_in_a_deadlock_even_if_every_message_stops_its_rank(number: int, is_1f1b: bool) -> None:
    """As NCCL may: messages of two ranks one after the other, each when both have come to it."""
    draw = random.Random(number)
    size, models = drawn(draw)
    if is_1f1b:
        models = [[(route if route[0] == 0 else route[::-1], count) for route, count in models[0][:1]]]
    orders = pipelined(size, models) if is_1f1b else any_orders(draw, size, models)
    left = [messages_of(rank, size, models, orders, has_tags=False) for rank in range(size)]
    while any(left):
        met = [
            rank
            for rank in range(size - 1)
            if left[rank] and left[rank + 1] and left[rank][0][1] == rank + 1 and left[rank + 1][0][1] == rank
        ]
        assert met, f"the ranks wait for each other: {[each[:1] for each in left]}"
        for rank in met:
            (is_sent, _, tag), (is_received, _, other) = left[rank].pop(0), left[rank + 1].pop(0)
            assert tag == other and is_sent != is_received


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_with_tags_every_message_is_sent_once_and_received_once(number: int) -> None:
    draw = random.Random(number)
    size, models = drawn(draw)
    orders = any_orders(draw, size, models)
    came = [messages_of(rank, size, models, orders, has_tags=True) for rank in range(size)]
    sent = [(rank, peer, tag) for rank, each in enumerate(came) for is_sent, peer, tag in each if is_sent]
    received = [(peer, rank, tag) for rank, each in enumerate(came) for is_sent, peer, tag in each if not is_sent]
    assert sorted(sent) == sorted(received) and len(set(sent)) == len(sent)
