"""Divides the chunks of a training state among the ranks that hold them, and lists all chunks of a checkpoint of
torch.distributed.checkpoint (DCP).

A state of 70 billion parameters on 88 ranks has 800,000 chunks. DCP's planner sends an object for each between the
ranks, three times, which takes minutes; here the chunks of a rank are one array. `chunk_plans` plans the chunks of one
rank, `state_storage` writes and reads the files.
"""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ...engines.torch_compat import StorageInfo


Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Entry:
    """A tensor of a training state, some of whose chunks a rank holds, or a value stored with torch.save.

    Args:
        shape: shape of the whole tensor.
        dtype: dtype of the tensor; `None` for a value.
        chunks: number of consecutive chunks in the rank's `Chunks`; 1 for a value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    chunks: int


@dataclass(frozen=True)
class Chunks:
    """The chunks of a training state that a rank could write, in order.

    Args:
        boxes: (n,) int64; for each chunk of a tensor, the first index in each dimension, then the size in each
            dimension.
    """

    entries: tuple[Entry, ...]
    boxes: Counts

    @staticmethod
    def of(plan: SavePlan) -> Chunks:
        entries: list[Entry] = []
        numbers: list[int] = []
        for item in plan.items:
            data = item.tensor_data
            if entries and data is not None and entries[-1].name == item.index.fqn:
                last = entries[-1]
                entries[-1] = Entry(last.name, last.shape, last.dtype, last.chunks + 1)
            elif data is not None:
                entries.append(Entry(item.index.fqn, tuple(data.size), data.properties.dtype, 1))
            else:
                entries.append(Entry(item.index.fqn, (), None, 1))
            if data is not None:
                numbers += [*data.chunk.offsets, *data.chunk.sizes]
        return Chunks(tuple(entries), np.array(numbers, dtype=np.int64))

    def each(self) -> Iterator[tuple[Entry, tuple[int, ...], tuple[int, ...]]]:
        """The entry, the first indices and the sizes of each chunk."""
        offset = 0
        for entry in self.entries:
            d = len(entry.shape)
            rows = self.boxes[offset : offset + 2 * d * entry.chunks].reshape(entry.chunks, 2 * d).tolist()
            offset += 2 * d * entry.chunks
            yield from ((entry, tuple(row[:d]), tuple(row[d:])) for row in rows)


@dataclass(frozen=True)
class Division:
    """Assigns every chunk to the one rank that writes it.

    Args:
        per_rank: chunks that each rank holds.
        kept: ascending positions, in each rank's `Chunks`, of the chunks that it writes.
        metadata: list of all chunks, without their files.
    """

    per_rank: tuple[Chunks, ...]
    kept: tuple[Counts, ...]
    metadata: Metadata

    @staticmethod
    def of(per_rank: Sequence[Chunks]) -> Division:
        """Assign each chunk to the holder that writes the fewest bytes.

        Raises:
            ValueError: the chunks of a tensor do not cover it.
        """
        metadata = Metadata({})
        holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        sizes: list[int] = []  # bytes of each chunk, in the order of `holders`
        held: dict[str, int] = defaultdict(int)
        for rank, chunks in enumerate(per_rank):
            for entry, start, size in chunks.each():
                chunk_holders = holders.setdefault((entry.name, start), [])
                chunk_holders.append(rank)
                if len(chunk_holders) > 1:
                    continue
                sizes.append(0 if entry.dtype is None else prod(size) * entry.dtype.itemsize)
                held[entry.name] += prod(size)
                _note(metadata, entry, start, size)
        for name, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata) and held[name] != prod(stored.size):
                raise ValueError(f"the ranks have {held[name]} of {prod(stored.size)} elements of {name}")
        return Division(tuple(per_rank), _kept(per_rank, holders, sizes), metadata)

    def is_written(self, lengths: Sequence[Counts]) -> bool:
        """True if every rank has written all of its chunks.

        Args:
            lengths: see `results`.
        """
        return all(len(done) == len(todo) for done, todo in zip(lengths, self.kept, strict=True))

    def results(self, lengths: Sequence[Counts], files: Sequence[str]) -> list[list[WriteResult]]:
        """For every rank, the file, offset and size of each chunk it has written. A rank writes its chunks
        consecutively into one file.

        Args:
            lengths: sizes in bytes of each rank's chunks in its file.
            files: name of each rank's file.
        """
        return [list(self._results(rank, lengths[rank].tolist(), files[rank])) for rank in range(len(self.kept))]

    def _results(self, rank: int, lengths: list[int], file: str) -> Iterator[WriteResult]:
        written, start = set(self.kept[rank].tolist()), 0
        rank_chunks = (chunk for position, chunk in enumerate(self.per_rank[rank].each()) if position in written)
        for (entry, offsets, _), length in zip(rank_chunks, lengths, strict=True):
            index = MetadataIndex(entry.name) if entry.dtype is None else MetadataIndex(entry.name, torch.Size(offsets))
            yield WriteResult(index, length, StorageInfo(file, start, length))
            start += length


def _note(metadata: Metadata, entry: Entry, start: tuple[int, ...], size: tuple[int, ...]) -> None:
    listed = metadata.state_dict_metadata
    if entry.dtype is None:
        listed[entry.name] = BytesStorageMetadata()
        return
    if entry.name not in listed:
        properties = TensorProperties(dtype=entry.dtype)
        listed[entry.name] = TensorStorageMetadata(properties, torch.Size(entry.shape), [])
    stored = listed[entry.name]
    assert isinstance(stored, TensorStorageMetadata), "a name is one of a tensor or of a value"
    stored.chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(size)))


def _kept(
    per_rank: Sequence[Chunks], holders: dict[tuple[str, tuple[int, ...]], list[int]], sizes: Sequence[int]
) -> tuple[Counts, ...]:
    """The positions of the chunks that each rank writes.

    Args:
        holders: ranks that hold each chunk.
        sizes: bytes of each chunk, in the order of `holders`.
    """
    load = [0] * len(per_rank)
    for ranks, size in zip(holders.values(), sizes, strict=True):
        if len(ranks) == 1:
            load[ranks[0]] += size
    writer: dict[tuple[str, tuple[int, ...]], int] = {}
    for (key, ranks), size in zip(holders.items(), sizes, strict=True):
        chosen = ranks[0] if len(ranks) == 1 else min(ranks, key=lambda rank: (load[rank], rank))
        load[chosen] += size if len(ranks) > 1 else 0
        writer[key] = chosen
    positions_of_ranks = []
    for rank, chunks in enumerate(per_rank):
        indices = [i for i, (entry, start, _) in enumerate(chunks.each()) if writer[entry.name, start] == rank]
        positions_of_ranks.append(np.array(indices, dtype=np.int64))
    return tuple(positions_of_ranks)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Context without Python's cyclic garbage collection, which would scan a very large number of new objects
    repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


__all__ = ["Chunks", "Division", "Entry", "without_collection"]
