"""In which order a split model's gradients are summed: the copies of a weight must get the same bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trl_realloc.engines.training.master_weights import SplitMasters


class Group:
    """Notes what is done in it."""

    def __init__(self, name: str, done: list[tuple[str, str, int]], size: int) -> None:
        self.name, self.done, self.size, self.rank, self.ranks = name, done, size, 0, tuple(range(size))

    def sum_(self, tensors: Any) -> None:
        self.done.append((self.name, "sum", len(tensors)))

    def sum_to(self, tensors: Any, owner: int) -> None:
        self.done.append((self.name, f"sum to {owner}", len(tensors)))

    def broadcast(self, tensors: Any, source: int) -> None:
        self.done.append((self.name, f"broadcast of {source}", len(tensors)))


@pytest.mark.parametrize("owner", [-1, 1])
def test_copies_are_made_equal_after_a_sum_over_replicas_that_each_end_makes_for_itself(owner: int) -> None:
    """Three replicas and more add in an order that may differ between groups. A weight that one replica steps has it
    from that one."""
    done: list[tuple[str, str, int]] = []
    masters: Any = object.__new__(SplitMasters)
    masters.groups = SimpleNamespace(
        **{name: Group(name, done, size) for name, size in {"tp": 2, "ends": 2, "dp": 3}.items()}
    )
    parameter = nn.Parameter(torch.zeros(2))
    masters.all = [
        SimpleNamespace(name="norm", parameter=parameter, owner=owner, tied=False, partial=False),
        SimpleNamespace(name="tied", parameter=parameter, owner=owner, tied=True, partial=True),
    ]
    masters._sum({"norm": torch.zeros(2), "tied": torch.zeros(2)})
    places = {(group, what): at for at, (group, what, count) in enumerate(done) if count}
    over_replicas = places[("dp", "sum" if owner == -1 else "sum to 1")]
    for copies in (places[("tp", "broadcast of 0")], places[("ends", "sum")]):
        assert (copies > over_replicas) == (owner == -1)
    assert places[("tp", "sum")] < over_replicas
