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
