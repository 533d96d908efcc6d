"""The ranks of one device mesh as a process group, with the collectives that engines use, and buckets of tensors
for them. On a mesh of one rank the collectives do nothing. `runtime/process_groups` makes the process groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .device import is_accelerator


Item = TypeVar("Item")

COLLECTIVE_BYTES = 64 << 20  # bytes of tensors per collective, which are copied into one flat tensor


def in_buckets(
    items: Iterable[Item],
    bytes_of: Callable[[Item], int],
    bucket_bytes: int,
    kind_of: Callable[[Item], Hashable] = lambda item: None,
) -> Iterator[list[Item]]:
    """Yield consecutive items in lists, in order. A bucket ends where the next item would exceed `bucket_bytes` or is
    of another kind (such as the dtype, where a bucket is sent as one flat tensor). A larger item is a bucket by itself.

    The grouping depends on the items' sizes and kinds alone, so ranks with the same items have the same buckets.
    `items` is read at most one item beyond the bucket that is yielded.
    """
    bucket: list[Item] = []
    filled = 0
    for item in items:
        size = bytes_of(item)
        if bucket and (filled + size > bucket_bytes or kind_of(item) != kind_of(bucket[0])):
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size
    if bucket:
        yield bucket


@dataclass(frozen=True)
class MeshGroup:
    """The ranks of a device mesh and the collectives between them.

    Args:
        ranks: global ranks of the mesh, ascending; in a reversed pipeline, descending.
        rank: global rank of this process.
        group: `torch.distributed` process group; `None` on a mesh of one device.
        device: device of the tensors that the collectives send; a GPU with NCCL.
        agree: returns the largest of the ranks' numbers through host memory, without a time limit on the wait. `None`:
            `max` is a collective of `group`, with its time limit.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None
    device: torch.device = torch.device("cpu")
    agree: Callable[[int], int] | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """The index of this process among `ranks`; with tp = pp = 1 its data-parallel rank."""
        return self.ranks.index(self.rank)

    @property
    def is_leader(self) -> bool:
        return self.rank == self.ranks[0]

    def max(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.size == 1:
            return number
        if self.agree is not None:
            return self.agree(number)
        largest = torch.tensor(number, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return int(largest)

    def host_barrier(self) -> None:
        """Wait until all ranks have come here. Call it before several collectives: a device counts the time that it
        waits for another rank in a collective, and ends the job at its limit (`ddp_timeout`)."""
        self.max(0)

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors in place over the mesh. Every rank passes tensors of the same shapes and dtypes."""
        for bucket, flat in self._flat_buckets(tensors):
            dist.all_reduce(flat, group=self.group)
            _copy_back(flat, bucket)

    def sum_to(self, tensors: Iterable[Tensor], index: int) -> None:
        """Sum tensors over the mesh, in place on the rank with this index alone; the others keep theirs."""
        for bucket, flat in self._flat_buckets(tensors, copies=True):  # gloo changes what is reduced on all ranks
            dist.reduce(flat, self.ranks[index], group=self.group)
            if self.index == index:
                _copy_back(flat, bucket)

    def broadcast(self, tensors: Iterable[Tensor], index: int) -> None:
        """Overwrite the tensors of every rank with those of the rank at this index."""
        for bucket, flat in self._flat_buckets(tensors):
            dist.broadcast(flat, self.ranks[index], group=self.group)
            if self.index != index:
                _copy_back(flat, bucket)

    def _flat_buckets(
        self, tensors: Iterable[Tensor], *, copies: bool = False
    ) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
        """Tensors in buckets of one dtype, each bucket with a flat copy; nothing on a mesh of one rank. Without
        `copies`, a single contiguous tensor, which may be a large embedding, comes as a flat view with an empty
        bucket."""
        if self.size > 1:
            for bucket in in_buckets(tensors, lambda t: t.nbytes, COLLECTIVE_BYTES, lambda t: t.dtype):
                if len(bucket) == 1 and bucket[0].is_contiguous() and not copies:
                    yield (), bucket[0].detach().view(-1)
                else:
                    yield bucket, torch.cat([tensor.reshape(-1) for tensor in bucket])

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in the order of `ranks`. All have the same shape."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor, device=self.device) for _ in self.ranks]
        dist.all_gather(parts, tensor.to(self.device), group=self.group)
        return parts if self.ranks[0] < self.ranks[-1] else parts[::-1]

    def share(self, tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
        """The tensors of the rank at this index, in host memory, on every rank; the other ranks' are ignored. They are
        sent as bytes with a JSON header, because a pickled object would need a process group in host memory."""
        if self.size == 1:
            return dict(tensors)
        header, payload = b"", torch.zeros(0, dtype=torch.uint8)
        if self.index == index:
            header = json.dumps({n: [str(t.dtype).rpartition(".")[2], *t.shape] for n, t in tensors.items()}).encode()
            contents = [_bytes_of(tensor) for tensor in tensors.values()]
            payload = torch.cat([torch.frombuffer(bytearray(header), dtype=torch.uint8), *contents])
        sizes = torch.tensor([len(header), payload.numel()], device=self.device)
        dist.broadcast(sizes, self.ranks[index], group=self.group)
        length, total = sizes.tolist()
        buffer = payload.to(self.device) if self.index == index else payload.new_empty(total, device=self.device)
        dist.broadcast(buffer, self.ranks[index], group=self.group)
        received, shared = buffer.cpu(), dict[str, Tensor]()
        for name, (dtype, *shape) in json.loads(received[:length].numpy().tobytes()).items():
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            _bytes_of(tensor).copy_(received[length : length + tensor.nbytes])
            shared[name], length = tensor, length + tensor.nbytes
        return shared

    def send(self, tensor: Tensor, index: int) -> None:
        """Send a tensor to the rank at this index, which calls `receive`, and wait on the host until it is sent.
        Without the wait, hundreds of messages would queue on the device while NCCL counts the time of each."""
        self._message(dist.isend, tensor.to(self.device).contiguous(), index)
        if is_accelerator(self.device):
            torch.accelerator.current_stream(self.device).synchronize()

    def receive(self, tensor: Tensor, index: int) -> None:
        """Overwrite a tensor on the mesh's device with the message of the rank at this index."""
        self._message(dist.irecv, tensor, index)

    def _message(self, kind: Callable[..., object], tensor: Tensor, index: int) -> None:
        """Batched, because NCCL creates a communicator for each pair of ranks that exchange a single message."""
        for work in dist.batch_isend_irecv([dist.P2POp(kind, tensor, self.ranks[index], self.group)]):
            work.wait()

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)


def _bytes_of(tensor: Tensor) -> Tensor:
    """(bytes,) uint8 in host memory; a view if the tensor is contiguous there."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    if tensors:
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


@dataclass(frozen=True)
class SplitGroups:
    """The process groups of a mesh that is split into data x pipeline x tensor ranks: device `(d * pp + p) * tp + t`
    has tensor rank t in stage p of replica d.

    Args:
        mesh: all ranks.
        dp: ranks with this rank's t and p.
        tp: ranks with its d and p.
        pp: ranks with its d and t, in the order of the stages.
        ends: first and last stage of its pipeline; this rank may be neither.
    """

    mesh: MeshGroup
    dp: MeshGroup
    tp: MeshGroup
    pp: MeshGroup
    ends: MeshGroup

    def reversed(self) -> SplitGroups:
        """The same process groups with the stages in the opposite direction: this rank has stage `pp - 1 - p`."""
        pp, ends = (replace(group, ranks=group.ranks[::-1]) for group in (self.pp, self.ends))
        return replace(self, pp=pp, ends=ends)


def split_ranks(ranks: tuple[int, ...], tp: int, pp: int) -> Mapping[str, list[tuple[int, ...]]]:
    """The ranks of all `dp`, `tp`, `pp` and `ends` groups of a mesh, in the order in which every rank creates them."""
    inner = tp * pp
    starts = range(0, len(ranks), inner)
    pipelines = [tuple(ranks[d + t : d + inner : tp]) for d in starts for t in range(tp)]
    return {
        "dp": [tuple(ranks[i::inner]) for i in range(inner)],
        "tp": [tuple(ranks[i : i + tp]) for i in range(0, len(ranks), tp)],
        "pp": pipelines,
        "ends": [(line[0], line[-1]) if pp > 1 else (line[0],) for line in pipelines],
    }
