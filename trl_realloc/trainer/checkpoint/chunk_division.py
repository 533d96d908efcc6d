"""Divides the chunks of a training state among the ranks that have them, and makes the list of all chunks that a
checkpoint of torch.distributed.checkpoint (DCP) has.

A state of 70 billion parameters on 88 ranks has 800,000 chunks. DCP's own planner sends an object for each between the
ranks, three times, which takes minutes; here the chunks of a rank are one array. The chunks of one rank are planned in
`chunk_plans`, the files are in `state_storage`.
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
    """A tensor of a training state of which a rank has chunks, or a value that is stored by torch.save.

    Args:
        shape: of the whole tensor.
        dtype: `None` for a value.
        chunks: how many of them follow each other in the rank's `Chunks`; of a value 1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    chunks: int


@dataclass(frozen=True)
class Chunks:
    """The chunks of a training state that a rank could write, in order.

    Args:
        boxes: (n,) int64; for each chunk of a tensor, its first index in each dimension, then its size in each
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
        at = 0
        for entry in self.entries:
            d = len(entry.shape)
            rows = self.boxes[at : at + 2 * d * entry.chunks].reshape(entry.chunks, 2 * d).tolist()
            at += 2 * d * entry.chunks
            yield from ((entry, tuple(row[:d]), tuple(row[d:])) for row in rows)


@dataclass(frozen=True)
class Division:
    """An assignment of every chunk to one rank, which writes it.

    Args:
        of_ranks: for each rank, the chunks that it has.
        kept: for each rank, the positions in its `Chunks` of the chunks that it writes, ascending.
        metadata: the list of all chunks, without the files that they are in.
    """

    of_ranks: tuple[Chunks, ...]
    kept: tuple[Counts, ...]
    metadata: Metadata

    @staticmethod
    def of(of_ranks: Sequence[Chunks]) -> Division:
        """Each chunk is written once, by the rank that writes the fewest bytes of those that have it.

        Raises:
            ValueError: the chunks of a tensor are not all of it.
        """
        metadata = Metadata({})
        holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        sizes: list[int] = []  # bytes of each chunk, in the order of `holders`
        held: dict[str, int] = defaultdict(int)
        for rank, chunks in enumerate(of_ranks):
            for entry, start, size in chunks.each():
                known = holders.setdefault((entry.name, start), [])
                known.append(rank)
                if len(known) > 1:
                    continue
                sizes.append(0 if entry.dtype is None else prod(size) * entry.dtype.itemsize)
                held[entry.name] += prod(size)
                _note(metadata, entry, start, size)
        for name, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata) and held[name] != prod(stored.size):
                raise ValueError(f"the ranks have {held[name]} of {prod(stored.size)} elements of {name}")
        return Division(tuple(of_ranks), _kept(of_ranks, holders, sizes), metadata)

    def is_written(self, lengths: Sequence[Counts]) -> bool:
        """True if every rank has written all of its chunks.

        Args:
            lengths: see `results`.
        """
        return all(len(own) == len(kept) for own, kept in zip(lengths, self.kept, strict=True))

    def results(self, lengths: Sequence[Counts], files: Sequence[str]) -> list[list[WriteResult]]:
        """The file, offset and size of each chunk that a rank has written, for every rank. A rank writes its chunks one
        after the other into one file.

        Args:
            lengths: for each rank, the size in bytes of each chunk in its file.
            files: for each rank, the name of its file.
        """
        return [list(self._results(rank, lengths[rank].tolist(), files[rank])) for rank in range(len(self.kept))]

    def _results(self, rank: int, lengths: list[int], file: str) -> Iterator[WriteResult]:
        written, start = set(self.kept[rank].tolist()), 0
        mine = (chunk for at, chunk in enumerate(self.of_ranks[rank].each()) if at in written)
        for (entry, offsets, _), length in zip(mine, lengths, strict=True):
            index = MetadataIndex(entry.name) if entry.dtype is None else MetadataIndex(entry.name, torch.Size(offsets))
            yield WriteResult(index, length, StorageInfo(file, start, length))
            start += length


def _note(metadata: Metadata, entry: Entry, start: tuple[int, ...], size: tuple[int, ...]) -> None:
    """Add a chunk to the list."""
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
    of_ranks: Sequence[Chunks], holders: dict[tuple[str, tuple[int, ...]], list[int]], sizes: Sequence[int]
) -> tuple[Counts, ...]:
    """The numbers of the chunks that each rank writes.

    Args:
        holders: of each chunk the ranks that have it.
        sizes: bytes of each chunk, in that order.
    """
    load = [0] * len(of_ranks)
    for ranks, size in zip(holders.values(), sizes, strict=True):
        if len(ranks) == 1:
            load[ranks[0]] += size
    writer: dict[tuple[str, tuple[int, ...]], int] = {}
    for (key, ranks), size in zip(holders.items(), sizes, strict=True):
        chosen = ranks[0] if len(ranks) == 1 else min(ranks, key=lambda rank: (load[rank], rank))
        load[chosen] += size if len(ranks) > 1 else 0
        writer[key] = chosen
    kept = []
    for rank, chunks in enumerate(of_ranks):
        own = [at for at, (entry, start, _) in enumerate(chunks.each()) if writer[entry.name, start] == rank]
        kept.append(np.array(own, dtype=np.int64))
    return tuple(kept)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Inside, Python does not collect cyclic garbage: it would search very many new objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


__all__ = ["Chunks", "Division", "Entry", "without_collection"]
