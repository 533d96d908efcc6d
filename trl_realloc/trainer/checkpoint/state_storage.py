"""Writes and reads the files of a training state: a storage of torch.distributed.checkpoint (DCP) in a folder, with
less memory during writing, and without running code from the files that it reads."""

from __future__ import annotations

import os
import pickle
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ...engines.torch_compat import CHECKPOINT_METADATA_CLASSES, StorageInfo
from . import METADATA, STATE_FOLDER
from .chunk_division import without_collection


class Writer(FileSystemWriter):
    """Writes one rank's file. DCP's `write_data` keeps a host-memory copy of every written tensor until its file is
    complete; this one holds one chunk at a time."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, sync_files=False)  # `WriteErrors.flush` syncs the files
        self.file = file_of(rank)

    def storage_meta(self) -> None:
        """Does nothing: the folder is renamed when it is complete."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, results = self.file, []
        with (Path(self.path) / name).open("wb") as file:
            for item in plan.items:
                start, data = file.tell(), planner.resolve_data(item)
                if torch.is_tensor(data):
                    torch.save(_compact(data), file)
                else:
                    file.write(data.getbuffer())
                length = file.tell() - start
                results.append(WriteResult(item.index, length, StorageInfo(name, start, length)))
            file.flush()
            os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def file_of(rank: int) -> str:
    """DCP's name for the file of a rank's chunks."""
    return f"__{rank}_0{DEFAULT_SUFFIX}"


def _compact(tensor: Tensor) -> Tensor:
    """A host-memory tensor with a storage of its size, because `torch.save` writes whole storages."""
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


class Reader(FileSystemReader):
    """Reads the training state in a checkpoint's folder. DCP reads its metadata with pickle, which runs any code that a
    file names; this one only creates the classes of DCP's metadata."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint / STATE_FOLDER)
        self._file = checkpoint / METADATA

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """The tensors, their chunks, and the chunks' files.

        Raises:
            ValueError: the file is not DCP's metadata.
            OSError: the file cannot be read.
        """
        with self._file.open("rb") as file, without_collection():
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise ValueError("it is no list of a training state")
        return metadata


def _member(kind: object, name: str) -> Enum:
    """The enum member of this name. Raises `ValueError` for an attribute of anything else."""
    if not (isinstance(kind, EnumType) and name in kind.__members__):
        raise ValueError("it needs an attribute of an object that is no enum")
    member: Enum = kind[name]
    return member


class _MetadataUnpickler(pickle.Unpickler):
    """Refuses every class that is not in DCP's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) in CHECKPOINT_METADATA_CLASSES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle enum members with it
            return _member
        raise ValueError(f"it names {module}.{name}, which is no part of a training state")
