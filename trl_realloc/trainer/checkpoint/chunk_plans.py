"""Plans which chunks of a training state a rank writes and reads, for torch.distributed.checkpoint (DCP).

Tensors are named by role, parameter and key (`policy/model.norm.weight/exp_avg`). A rank writes its boxes in chunks,
and reads the chunks that overlap its boxes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ...algorithms.nonfinite import all_finite
from ...engines.training_state import MASTER, StateTensor, TensorSpec, TrainingState
from ...plan.dataflow import Role
from ...realloc.layout import Box, split_box, volume
from ...realloc.transfer import find
from . import STATE_FOLDER


ROLES = {Role.ACTOR: "policy", Role.CRITIC: "critic"}  # names of the trained roles in checkpoints
CHUNK_BYTES = 64 << 20  # size of a chunk, and so the extra memory that reading needs
_PROGRESS, _SCALARS, _GROUPS = "progress", "scalars", "groups"

# A rank's contribution to a checkpoint, by name: parts of tensors, and values stored with torch.save.
Entries = dict[str, Any]


def entries_of(role: str, state: TrainingState) -> Entries:
    """The training state of a role under its names in the checkpoint."""
    entries: Entries = {f"{role}/{_PROGRESS}": {"version": state.version, "scaler": state.scaler}}
    for name, tensors in state.tensors.items():
        entries |= {f"{role}/{name}/{key}": tensor for key, tensor in tensors.items()}
    entries |= {f"{role}/{name}/{_SCALARS}": values for name, values in state.scalars.items() if values}
    return entries | {f"{role}/{_GROUPS}/{number}": ids for number, ids in state.group_numbers.items() if ids}


def specs_of(metadata: Metadata, role: str) -> dict[str, dict[str, TensorSpec]]:
    """The shape and dtype of each tensor of a role in a checkpoint, by parameter name and key."""
    specs: dict[str, dict[str, TensorSpec]] = {}
    for full_name, stored in metadata.state_dict_metadata.items():
        owner, _, rest = full_name.partition("/")
        if owner == role and isinstance(stored, TensorStorageMetadata):
            name, _, key = rest.rpartition("/")
            specs.setdefault(name, {})[key] = TensorSpec(tuple(stored.size), stored.properties.dtype)
    return specs


def saved_roles(metadata: Metadata) -> list[str]:
    """The names of the trained roles in a checkpoint."""
    return [role for role in ROLES.values() if f"{role}/{_PROGRESS}" in metadata.state_dict_metadata]


def saved_shapes(metadata: Metadata, roles: Sequence[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shape of each trained parameter in a checkpoint, by role and name.

    Args:
        roles: roles that the checkpoint must have.

    Raises:
        ValueError: the checkpoint has no state of a role, or a parameter without its weight.
    """
    shapes = {}
    for role in roles:
        specs = specs_of(metadata, role)
        without = [name for name, tensors in specs.items() if MASTER not in tensors]
        if not specs or without or f"{role}/{_PROGRESS}" not in metadata.state_dict_metadata:
            raise ValueError(f"it has no weight of {without[0]}" if without else f"it has no {role}")
        shapes[role] = {name: tensors[MASTER].shape for name, tensors in specs.items()}
    return shapes


class Saving(DefaultSavePlanner):
    """Plans the writing of one rank's entries. If several ranks hold a chunk, `chunk_division` chooses one to write
    it."""

    def __init__(self, entries: Entries) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.entries = entries
        self._copies: dict[MetadataIndex, Tensor | io.BytesIO] = {}

    def create_local_plan(self) -> SavePlan:
        return SavePlan([item for name, entry in self.entries.items() for item in self._items(name, entry)])

    def _items(self, name: str, entry: object) -> Iterator[WriteItem]:
        if not isinstance(entry, StateTensor):
            yield WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
            return
        properties = TensorProperties(dtype=entry.spec.dtype)
        for box, _ in entry.cells:
            for part in split_box(box, CHUNK_BYTES // entry.spec.dtype.itemsize):
                chunk = _chunk(part)
                data = TensorWriteData(chunk, properties, torch.Size(entry.spec.shape))
                yield WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def copy_to_host(self, plan: SavePlan) -> None:
        """Replace the entries by host-memory copies of what this rank writes, and check them."""
        copies: dict[MetadataIndex, Tensor | io.BytesIO] = {}
        for item in plan.items:
            data = self.resolve_data(item)
            copies[item.index] = data.detach().to("cpu", copy=True) if isinstance(data, Tensor) else data
        self.entries.clear()
        self._copies = copies

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.index in self._copies:
            return self._copies.pop(write_item.index)
        entry = self.entries[write_item.index.fqn]
        if write_item.tensor_data is None:
            content = io.BytesIO()
            torch.save(entry, content)
            return content
        part = find({"": entry.cells}, "", _box(write_item.tensor_data.chunk))
        assert part is not None, "the rank has planned to write only what it has"
        if not all_finite([part]):
            raise OSError("the weights or the optimizer's state are not finite")
        return part


class Loading(DefaultLoadPlanner):
    """Plans and performs the reading of one rank's part of a role's training state into its tensors."""

    def __init__(self, role: str, state: TrainingState, metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.role, self.state, self.stored = role, state, metadata.state_dict_metadata
        # values that are not tensors are replaced when read
        self.entries = entries_of(role, state) | {f"{role}/{name}/{_SCALARS}": {} for name in state.scalars}
        self.entries |= {f"{role}/{_GROUPS}/{number}": {} for number in state.group_numbers}

    def finish(self) -> None:
        """Set the values that are not tensors, after everything has been read."""
        progress = self.entries[f"{self.role}/{_PROGRESS}"]
        self.state.version, self.state.scaler = progress["version"], progress["scaler"]
        self.state.scalars = {name: self.entries[f"{self.role}/{name}/{_SCALARS}"] for name in self.state.scalars}
        self.state.group_numbers = {n: self.entries[f"{self.role}/{_GROUPS}/{n}"] for n in self.state.group_numbers}

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for name, entry in self.entries.items() for item in self._items(name, entry)])

    def _items(self, name: str, entry: object) -> Sequence[ReadItem]:
        stored = self.stored.get(name)
        if isinstance(entry, StateTensor) and isinstance(stored, TensorStorageMetadata):
            return create_read_items_for_chunk_list(name, stored, [_chunk(box) for box, _ in entry.cells])
        if stored is None:
            return ()
        nothing = torch.Size((0,))
        index = MetadataIndex(name)
        return [ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.entries[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        entry, offset = self.entries[read_item.dest_index.fqn], tuple(read_item.dest_index.offset or ())
        cell: Tensor = next(cell for box, cell in entry.cells if tuple(start for start, _ in box) == offset)
        ranges = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return cell[tuple(slice(start, start + length) for start, length in ranges)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if not all_finite([tensor]):
            raise ValueError(f"{STATE_FOLDER} holds NaN or infinity in {read_item.dest_index.fqn}.")


def planned_bytes(plan: SavePlan) -> int:
    return sum(volume(_box(i.tensor_data.chunk)) * i.tensor_data.properties.dtype.itemsize for i in _tensors(plan))


def _tensors(plan: SavePlan) -> Iterator[Any]:
    yield from (item for item in plan.items if item.tensor_data is not None)


def _box(chunk: ChunkStorageMetadata) -> Box:
    return tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(start for start, _ in box), torch.Size(stop - start for start, stop in box))
