"""The ranks of one device mesh as a process group: the collectives an engine needs, and nothing for a mesh of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import in_buckets


BUCKET_BYTES = 64 << 20  # of the tensors that one collective sends; a flat copy of them is made


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

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors in place over the mesh. Every rank passes tensors of the same shapes and dtypes."""
        for bucket, flat in self._flat_buckets(tensors):
            dist.all_reduce(flat, group=self.group)
            _copy_back(flat, bucket)

    def sum_to(self, tensors: Iterable[Tensor], index: int) -> None:
        """Sum tensors over the mesh, in place on the rank with this index alone; the others keep theirs."""
        for bucket, flat in self._flat_buckets(tensors):
            dist.reduce(flat, self.ranks[index], group=self.group)
            if self.index == index:
                _copy_back(flat, bucket)

    def broadcast(self, tensors: Iterable[Tensor], index: int) -> None:
        """Overwrite the tensors of every rank with those of the rank with this index."""
        for bucket, flat in self._flat_buckets(tensors):
            dist.broadcast(flat, self.ranks[index], group=self.group)
            if self.index != index:
                _copy_back(flat, bucket)

    def _flat_buckets(self, tensors: Iterable[Tensor]) -> Iterator[tuple[list[Tensor], Tensor]]:
        """The tensors in buckets of one dtype, each with a flat copy; none on a mesh of one rank."""
        if self.size > 1:
            for bucket in in_buckets(tensors, lambda t: t.nbytes, BUCKET_BYTES, lambda t: t.dtype):
                yield bucket, torch.cat([tensor.reshape(-1) for tensor in bucket])

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor of one shape, in the order of `ranks`."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor, device=self.device) for _ in self.ranks]
        dist.all_gather(parts, tensor.to(self.device), group=self.group)
        return parts

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)


def _copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


@dataclass(frozen=True)
class SplitGroups:
    """A mesh as tensor groups inside pipelines inside replicas: its device `(d * pp + p) * tp + t` has tensor rank t
    of stage p of replica d.

    Args:
        mesh: all of it.
        dp: the ranks with this one's t and p; tp: those with its d and p; pp: those with its d and t.
        ends: of its pipeline the first and the last stage (of which this rank need not be one).
    """

    mesh: MeshGroup
    dp: MeshGroup
    tp: MeshGroup
    pp: MeshGroup
    ends: MeshGroup


def split_ranks(ranks: tuple[int, ...], tp: int, pp: int) -> Mapping[str, list[tuple[int, ...]]]:
    """The ranks of every `dp`, `tp`, `pp` and `ends` group of a mesh, in one order for all that make them."""
    inner = tp * pp
    starts = range(0, len(ranks), inner)
    pipelines = [tuple(ranks[d + t : d + inner : tp]) for d in starts for t in range(tp)]
    return {
        "dp": [tuple(ranks[i::inner]) for i in range(inner)],
        "tp": [tuple(ranks[i : i + tp]) for i in range(0, len(ranks), tp)],
        "pp": pipelines,
        "ends": [(line[0], line[-1]) if pp > 1 else (line[0],) for line in pipelines],
    }
