"""In which order a split model's gradients are summed: the copies of a weight must get the same bits."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trl_realloc.engines.training.split_masters import SplitMasters
from trl_realloc.engines.training.tensor_parallel import local


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


@pytest.mark.parametrize(("owner", "replica"), [(-1, 1), (1, 1), (1, 0)])
def test_copies_are_made_equal_after_a_sum_over_replicas_that_each_end_makes(owner: int, replica: int) -> None:
    """Three replicas and more add in an order that may differ between groups. The copies of a weight that one replica
    steps are made equal among its ranks."""
    done: list[tuple[str, str, int]] = []
    masters: Any = object.__new__(SplitMasters)
    masters.groups = SimpleNamespace(
        **{name: Group(name, done, size) for name, size in {"tp": 2, "ends": 2, "dp": 3}.items()}
    )
    masters.groups.dp.index = replica
    parameter = nn.Parameter(torch.zeros(2))
    masters.all = [
        SimpleNamespace(name="norm", parameter=parameter, owner=owner, tied=False, partial=False),
        SimpleNamespace(name="tied", parameter=parameter, owner=owner, tied=True, partial=True),
    ]
    masters.sum({"norm": torch.zeros(2), "tied": torch.zeros(2)})
    places = {(group, what): at for at, (group, what, count) in enumerate(done) if count}
    over_replicas = places[("dp", "sum" if owner == -1 else "sum to 1")]
    for copies in (("tp", "broadcast of 0"), ("ends", "sum")):
        if owner in (-1, replica):
            assert places[copies] > over_replicas
        else:
            assert copies not in places
    assert places[("tp", "sum")] < over_replicas


def sizes_on(rank: int, ranks: int, vocabulary: int) -> tuple[list[int], list[int]]:
    """In a process of its own: of parameters, those of a tensor rank's parts, and the largest of any rank's."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from trl_realloc.engines.training.tensor_parallel import largest_part

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    mesh = DeviceMesh("cpu", list(range(ranks)))
    whole = [torch.zeros(vocabulary, 12), torch.zeros(16, 12), torch.zeros(12)]
    split = [distribute_tensor(whole[at], mesh, [Shard(dim)], src_data_rank=None) for at, dim in ((0, 0), (1, 1))]
    parameters = [nn.Parameter(tensor) for tensor in (*split, whole[2])]
    dist.destroy_process_group()
    return [local(p.data).numel() for p in parameters], [largest_part(p) for p in parameters]


def test_all_ranks_of_a_tensor_group_count_a_parameter_alike() -> None:
    """So that its copies have the same owner on each of them, also where the last one has less of the vocabulary."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:  # one process, whose imports take seconds
        for vocabulary, ranks in ((129, 2), (9, 4)):
            asked = [process.submit(sizes_on, rank, ranks, vocabulary) for rank in (0, ranks - 1)]
            (first, of_first), (last, of_last) = (answer.result(timeout=120) for answer in asked)
            assert of_first == of_last == first
            assert last[0] < first[0] and last[1:] == first[1:]
