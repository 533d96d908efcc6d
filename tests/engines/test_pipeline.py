"""What a pipeline does by itself; what its stages do together is held in tests/multiprocess."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trl_realloc.engines.forward import ValueHead
from trl_realloc.engines.group import MeshGroup
from trl_realloc.engines.pipeline import Pipeline


sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("trainer", "multiprocess")]
import tiny  # noqa: E402
from replay import rollouts  # noqa: E402


@pytest.fixture
def group() -> Iterator[MeshGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield MeshGroup((0,), 0, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory in a layer"), ValueError("of a user's hook")])
@pytest.mark.parametrize("learns", [False, True])
def test_an_error_in_a_stage_comes_out_as_itself(group: MeshGroup, error: Exception, learns: bool) -> None:
    """The schedule would raise a `RuntimeError` without the class and the message."""
    head = ValueHead(tiny.classifier())

    def fails(*given: Any) -> None:
        raise error

    head.model.score.register_forward_hook(fails)
    pipeline = Pipeline(head, group, torch.device("cpu"), hidden=head.model.config.hidden_size)
    with pytest.raises(type(error)) as raised:
        pipeline.run(
            [rollouts(4)], lambda at, outputs: outputs["values"].values.sum(), learns=learns, call=lambda work: work()
        )
    assert raised.value is error
