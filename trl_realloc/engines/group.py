"""The ranks of one device mesh as a process group: the collectives an engine needs, and nothing for a mesh of one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class MeshGroup:
    """Args:
    ranks: global ranks of the mesh, ascending.
    rank: this process.
    group: its `torch.distributed` process group; `None` on a mesh of one device.
    device: where this mesh's tensors live (NCCL moves nothing else).
    """

    ranks: tuple[int, ...]
    rank: int
    group: Any = None
    device: torch.device = torch.device("cpu")

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This process's place in the mesh; its data-parallel rank where tp = pp = 1."""
        return self.ranks.index(self.rank)

    @property
    def is_leader(self) -> bool:
        return self.rank == self.ranks[0]

    def max(self, number: int) -> int:
        if self.size == 1:
            return number
        box = torch.tensor(number, device=self.device)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.group)
        return int(box)

    def sum_(self, tensors: Iterable[Tensor], bucket_bytes: int = 64 << 20) -> None:
        """Sum tensors in place over the mesh, flattened into buckets: one message per 64 MiB instead of per tensor."""
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        room = bucket_bytes
        for tensor in tensors:
            if bucket and (room < tensor.nbytes or tensor.dtype != bucket[0].dtype):
                self._sum_bucket(bucket)
                bucket, room = [], bucket_bytes
            bucket.append(tensor)
            room -= tensor.nbytes
        if bucket:
            self._sum_bucket(bucket)

    def _sum_bucket(self, bucket: list[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=self.group)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)
