"""What a pipeline does by itself; what its stages do together is held in tests/multiprocess."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from replay import rollouts  # noqa: E402

from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.torch_compat import LeanStage
from trl_realloc.engines.training import pipeline as pipelines
from trl_realloc.engines.training.packed_forward import ValueHead
from trl_realloc.engines.training.pipeline import Pipeline


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
    """The schedule would raise a `RuntimeError` without the class and the message."""
    head = ValueHead(tiny.classifier())

    def fails(*given: Any) -> None:
        raise error

    head.model.score.register_forward_hook(fails)
    pipeline = Pipeline(head, group, torch.device("cpu"), hidden=head.model.config.hidden_size)
    with pytest.raises(type(error)) as raised:
        pipeline.run(
            [rollouts(4)], lambda at, outputs: outputs["values"].values.sum(), trains=trains, call=lambda work: work()
        )
    assert raised.value is error


class First(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * hidden


class Last(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.square().sum()


def test_a_stage_has_memory_for_what_it_receives_of_the_micro_batches_under_way(group: MeshGroup) -> None:
    """torch's stage would have it for all micro-batches from the beginning."""
    schedules: Any = torch.distributed.pipelining.stage
    shape = torch.empty((1, 4, 8), device="meta", requires_grad=True)
    number = torch.empty((), device="meta", requires_grad=True)
    for index, module, result in ((0, First(), shape), (1, Last(), number)):
        stage = LeanStage(
            module, index, 2, torch.device("cpu"), input_args=(shape,), output_args=(result,), group=group.group
        )
        stage.has_backward = True
        if hasattr(schedules, "InferenceMode"):  # not in torch 2.11
            stage._inference_mode = schedules.InferenceMode.STATIC

        def held(stage: LeanStage = stage) -> int:
            tables = stage.args_recv_info, stage.grad_recv_info
            buffers = [getattr(info, "buffer", None) for table in tables for infos in table.values() for info in infos]
            return sum(buffer is not None and not buffer.is_meta for buffer in buffers)

        stage._prepare_forward_infra(5, ())
        stage._prepare_backward_infra(5)
        assert not held()
        for at in range(5):
            for message in stage.get_fwd_recv_ops(at):
                message.tensor.detach().fill_(float(at))
            output = stage.forward_one_chunk(at, (torch.ones(1, 4, 8, requires_grad=True),), {})
            assert held() == index
            for message in stage.get_bwd_recv_ops(at):
                message.tensor.detach().fill_(float(at))
            assert held() == 1, "the last stage receives hidden states, the first one their gradients"
            stage.backward_one_chunk(at, loss=output)
            sent = [message.tensor for message in stage.get_bwd_send_ops(at)] or stage.bwd_cache.pop(at)
            assert torch.equal(sent[0], torch.full((1, 4, 8), 2.0 * at))
            assert not held()


class Sent:
    """In place of messages to the next stage: counts what is on its way."""

    def __init__(self, route: Any) -> None:
        self.under_way: set[int] = set()
        self.most = 0
        Sent.latest = self

    latest: Any = None

    def send(self, at: int, tensor: torch.Tensor) -> None:
        self.under_way.add(at)
        self.most = max(self.most, len(self.under_way))

    def wait(self, at: int) -> None:
        self.under_way.discard(at)

    def wait_all(self) -> None:
        self.under_way.clear()


def test_a_stage_that_scores_keeps_as_many_of_its_hidden_states_as_there_are_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, ran = ValueHead(tiny.classifier()).eval(), list[int]()
    pipeline = Pipeline(head, MeshGroup((0, 1, 2), 0), torch.device("cpu"), hidden=head.model.config.hidden_size)
    monkeypatch.setattr(pipelines, "Outbox", Sent)
    micros = [rollouts(4).select([at % 4]) for at in range(9)]

    def call(work: Any) -> torch.Tensor:
        ran.append(len(ran))
        return torch.zeros(1, 1, pipeline.hidden)

    pipeline.run(micros, lambda at, outputs: torch.zeros(()), trains=False, call=call)
    assert ran == list(range(9))
    assert Sent.latest.most <= 4 and not Sent.latest.under_way
