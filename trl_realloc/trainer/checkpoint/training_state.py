"""Saves and loads the training state of policy and critic by torch.distributed.checkpoint (DCP), each rank its part.

A checkpoint of one plan loads under another, and on any number of processes: tensors are named by role, parameter and
key (`policy/model.norm.weight/exp_avg`) and stored in chunks, and a rank reads the chunks that its boxes overlap.
The folder is in DCP's format; its planning is done here over the job's gloo group. The models in the format of
`from_pretrained` are in `models`.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemReader, FileSystemWriter, _StorageInfo
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
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ...algorithms.nonfinite import all_finite
from ...engines.base import TrainingEngine
from ...engines.training_state import MASTER, StateTensor, TensorSpec, TrainingState
from ...plan.dataflow import Role
from ...realloc.layout import Box, split_box, volume
from ...realloc.transfer import find
from ...runtime.placement import Placement
from ...runtime.process_groups import at_first_rank, to_each_rank
from . import METADATA, STATE_FOLDER, CheckpointError
from .write_errors import WriteErrors, need_room


ROLES = {Role.ACTOR: "policy", Role.CRITIC: "critic"}  # the names of the trained roles in the checkpoint
CHUNK_BYTES = 64 << 20  # of the tensors that are written, and so the memory that reading takes beyond the parts
_PROGRESS, _SCALARS = "progress", "scalars"

# What a rank contributes to a checkpoint, by name: tensors in parts, and values that are stored by torch.save.
Entries = dict[str, Any]


def entries_of(role: str, state: TrainingState) -> Entries:
    """The training state of a role by the names of the checkpoint."""
    entries: Entries = {f"{role}/{_PROGRESS}": {"version": state.version, "scaler": state.scaler}}
    for name, tensors in state.tensors.items():
        entries |= {f"{role}/{name}/{key}": tensor for key, tensor in tensors.items()}
    return entries | {f"{role}/{name}/{_SCALARS}": values for name, values in state.scalars.items() if values}


class StateWrite:
    """The training state of every trained role while it is written. Making it and `finish` are collective over the
    job. Every rank writes one file, and the first one the list of what is in them. Of equal replicas each part is
    written by one.

    Args:
        in_background: copy what this rank writes to host memory, and write it in a thread while training goes on.
            Otherwise it is written at once.
    """

    def __init__(
        self, placement: Placement, folder: Path, problems: WriteErrors, *, in_background: bool = False
    ) -> None:
        self.folder, self.problems = folder / STATE_FOLDER, problems
        entries: Entries = {}
        for role, engine in _trained(placement):
            entries |= entries_of(role, engine.training_state())
        self._planner, self._writer = _Saving(entries), _Writer(self.folder)
        self._metadata: Metadata | None = None  # on the first rank
        self._plan = self._agree()
        self._path = self.folder / self._writer.file_of(self._plan) if self._plan.items else None
        self._results: list[WriteResult] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        if self._path is None:
            return
        try:
            need_room(self._path, _bytes(self._plan))
            self.folder.mkdir(parents=True, exist_ok=True)
            if in_background:
                self._planner.copy_to_host(self._plan)
                self._thread.start()
            else:
                self._write()
        except Exception as error:  # raised by `finish`, because the other ranks wait for this one there
            self._error = error

    def _agree(self) -> SavePlan:
        """What this rank writes."""
        plans = at_first_rank(self._planner.create_local_plan(), self.problems.control)
        if plans:
            empty = [SavePlan([])] * len(plans)
            with self.problems.trying(self.folder):
                plans, self._metadata = self._planner.create_global_plan(plans)
                plans = self._writer.prepare_global_plan(plans)
            plans = plans if self._metadata is not None else empty
        plan: SavePlan = to_each_rank(plans, self.problems.control)
        return plan

    def _write(self) -> None:
        try:
            self._results = self._writer.write_data(self._plan, self._planner).value()
        except Exception as error:  # raised by `finish`
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until this rank's file is written, and write the list of all files. Errors are collected."""
        if self._thread.is_alive():
            self._thread.join()
        if self._path is not None:
            with self.problems.writing(self._path, _bytes(self._plan)):
                if self._error is not None:
                    raise self._error
        rank_results = at_first_rank(self._results, self.problems.control)
        if self._metadata is not None:
            with self.problems.writing(self.folder / Path(METADATA).name):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._writer.finish(self._metadata, rank_results)
        self._planner.entries.clear()


def load_training_state(placement: Placement, folder: Path, fetch: Callable[[Collection[str]], None]) -> None:
    """Load what `StateWrite` wrote into the engines of this placement. Every rank reads its own parts.
    Collective over the job.

    Args:
        fetch: called with the files that this rank reads, on every rank; gets those that its host lacks.

    Raises:
        CheckpointError: a number is not finite, or a file cannot be read.
        EngineError: the state is of another model.
    """
    reader = Reader(folder)
    with _refusing(folder):
        metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, False)
    with contextlib.ExitStack() as engines:
        states = {
            role: engines.enter_context(engine.loading(specs_of(metadata, role)))
            for role, engine in _trained(placement)
        }
        planners = {role: _Loading(role, state, metadata) for role, state in states.items()}
        plans = {role: planner.create_local_plan() for role, planner in planners.items()}
        items = [item for plan in plans.values() for item in plan.items]
        fetch({f"{STATE_FOLDER}/{reader.storage_data[item.storage_index].relative_path}" for item in items})
        for role, planner in planners.items():
            with _refusing(folder):
                reader.read_data(plans[role], planner)
                planner.finish()


@contextlib.contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Around reading files of a checkpoint: on damaged bytes a reader may raise any error."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"cannot resume from {folder}: {str(error) or repr(error)}") from error


def specs_of(metadata: Metadata, role: str) -> dict[str, dict[str, TensorSpec]]:
    """Shape and dtype of each tensor of a role in a checkpoint, by parameter name and key."""
    specs: dict[str, dict[str, TensorSpec]] = {}
    for full_name, stored in metadata.state_dict_metadata.items():
        owner, _, rest = full_name.partition("/")
        if owner == role and isinstance(stored, TensorStorageMetadata):
            name, _, key = rest.rpartition("/")
            specs.setdefault(name, {})[key] = TensorSpec(tuple(stored.size), stored.properties.dtype)
    return specs


def saved_shapes(metadata: Metadata) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shape of each trained parameter in a checkpoint, by role and name.

    Raises:
        ValueError: the checkpoint has no state of a role, or a parameter without its weight.
    """
    shapes = {}
    for role in ROLES.values():
        specs = specs_of(metadata, role)
        without = [name for name, tensors in specs.items() if MASTER not in tensors]
        if not specs or without or f"{role}/{_PROGRESS}" not in metadata.state_dict_metadata:
            raise ValueError(f"it has no weight of {without[0]}" if without else f"it has no {role}")
        shapes[role] = {name: tensors[MASTER].shape for name, tensors in specs.items()}
    return shapes


def _trained(placement: Placement) -> Iterator[tuple[str, TrainingEngine]]:
    """The trained roles of which this rank has an engine."""
    for role, name in ROLES.items():
        engine = placement.trained(role)
        if engine is not None:
            yield name, engine


def _bytes(plan: SavePlan) -> int:
    return sum(volume(_box(i.tensor_data.chunk)) * i.tensor_data.properties.dtype.itemsize for i in _tensors(plan))


def _tensors(plan: SavePlan) -> Iterator[Any]:
    yield from (item for item in plan.items if item.tensor_data is not None)


def _box(chunk: ChunkStorageMetadata) -> Box:
    return tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(start for start, _ in box), torch.Size(stop - start for start, stop in box))


# --- DCP's planners and storage over parts in boxes -------------------------------------------------------------------


class _Saving(DefaultSavePlanner):
    """Plans the writing of one rank's entries. The first rank removes what several ranks have, and divides it among
    them by bytes (DCP's planner)."""

    def __init__(self, entries: Entries) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.entries = entries
        self._copies: dict[MetadataIndex, Tensor | io.BytesIO] = {}

    def create_local_plan(self) -> SavePlan:
        return SavePlan([item for name, entry in self.entries.items() for item in self._items(name, entry)])

    def _items(self, name: str, entry: Any) -> Iterator[WriteItem]:
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
        """Replace the entries by copies of what this rank writes, in host memory, and check them."""
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


class _Writer(FileSystemWriter):
    """Writes the file of one rank. DCP's own `write_data` keeps a copy in host memory of every tensor that it has
    written until its file is complete; this one has one chunk at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)  # `WriteErrors.flush` does it for the list

    def storage_meta(self) -> None:
        """Nothing: the folder is renamed when it is complete."""

    def file_of(self, plan: SavePlan) -> str:
        return f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, results = self.file_of(plan), []
        with (Path(self.path) / name).open("wb") as file:
            for item in plan.items:
                start, data = file.tell(), planner.resolve_data(item)
                if torch.is_tensor(data):
                    torch.save(_compact(data), file)
                else:
                    file.write(data.getbuffer())
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            file.flush()
            os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _compact(tensor: Tensor) -> Tensor:
    """A tensor in host memory whose storage has nothing else, because `torch.save` writes whole storages."""
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


class _Loading(DefaultLoadPlanner):
    """Plans and does the reading of one rank's part of a role's training state into its tensors."""

    def __init__(self, role: str, state: TrainingState, metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.role, self.state, self.stored = role, state, metadata.state_dict_metadata
        # what is no tensor is replaced by what is read
        self.entries = entries_of(role, state) | {f"{role}/{name}/{_SCALARS}": {} for name in state.scalars}

    def finish(self) -> None:
        """Set what is no tensor, after everything has been read."""
        progress = self.entries[f"{self.role}/{_PROGRESS}"]
        self.state.version, self.state.scaler = progress["version"], progress["scaler"]
        self.state.scalars = {name: self.entries[f"{self.role}/{name}/{_SCALARS}"] for name in self.state.scalars}

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for name, entry in self.entries.items() for item in self._items(name, entry)])

    def _items(self, name: str, entry: Any) -> Sequence[ReadItem]:
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


class Reader(FileSystemReader):
    """Reads the training state of a checkpoint's folder. DCP reads its metadata by pickle, which runs whatever code a
    file names; this one makes the classes of DCP's metadata alone."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint / STATE_FOLDER)
        self._file = checkpoint / METADATA

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors, their chunks, and the files of these.

        Raises:
            ValueError: the file is not DCP's metadata.
            OSError: the file cannot be read.
        """
        with self._file.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise ValueError("it is no list of a training state")
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Refuses every class that DCP's metadata does not have."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) in _METADATA_CLASSES:
            return super().find_class(module, name)
        raise ValueError(f"it names {module}.{name}, which is no part of a training state")


_METADATA_CLASSES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}  # fmt: skip
