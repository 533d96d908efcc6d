"""`WeightFiles`: writes a model's weights to the safetensors files of `save_pretrained`, tensor by tensor.

The headers are written first, from names, shapes and dtypes, so that every tensor can be written to its place when it
arrives. `save_pretrained` would need the whole model in memory.
"""

from __future__ import annotations

import inspect
import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ...engines.parameter_pieces import Assembly, Piece
from ...engines.training_state import TensorSpec


Convert = Callable[[list[tuple[str, Tensor]]], Any]

MAX_SHARD_SIZE = inspect.signature(PreTrainedModel.save_pretrained).parameters["max_shard_size"].default

# The dtypes of safetensors in reverse order of storage.
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3", torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip


class WeightFiles:
    """Creates the files with their headers.

    Args:
        folder: existing folder.
        specs: all parameters and persistent buffers by module name, in the model's order.
        convert: converts tensors by module name to tensors by checkpoint name.
        max_shard_size: maximum size of a file, as in `save_pretrained`.
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        convert: Convert,
        max_shard_size: int | str = MAX_SHARD_SIZE,
    ) -> None:
        self.folder, self.convert = folder, convert
        self._open: BinaryIO | None = None
        meta = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
        # not the converted tensors: an expert's is a view, which would be counted with the memory of all experts
        stored = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in dict(convert(list(meta.items()))).items()
        }
        self._groups = _groups(meta, stored, convert)
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._assembly = Assembly(specs)
        self._renamed = _renamed(meta, self._groups, convert)
        self._missing = {name: math.prod(specs[name].shape) for name in self._renamed}  # elements not yet written
        pattern = SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors")
        split = split_torch_state_dict_into_shards(stored, filename_pattern=pattern, max_shard_size=max_shard_size)
        self._places: dict[str, tuple[Path, int]] = {}  # checkpoint name -> file and offset of the first byte
        self._specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()}
        # an earlier save may have had another number of files
        for stale in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
            (folder / stale).unlink(missing_ok=True)
        for file, names in split.filename_to_tensors.items():
            self._create(folder / file, {name: self._specs[name] for name in names})
        if split.is_sharded:
            total = sum(math.prod(spec.shape) for spec in specs.values())
            index = {
                "metadata": {"total_parameters": total, **split.metadata},
                "weight_map": split.tensor_to_filename,
            }
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _create(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        """Write one file's header: its tensors by descending dtype, then by name, like safetensors."""
        order = list(_DTYPES)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in sorted(specs, key=lambda name: (-order.index(specs[name].dtype), name.encode())):
            spec = specs[name]
            header[name] = {
                "dtype": _DTYPES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.bytes],
            }
            offset += spec.bytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        for name in specs:
            self._places[name] = (path, 8 + len(text) + header[name]["data_offsets"][0])

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors by module name. Tensors that the checkpoint computes from several of the module's are held
        until all of these have arrived.

        Raises:
            OSError: the file cannot be written.
        """
        complete: list[tuple[str, Tensor]] = []
        for name, tensor in tensors.items():
            members = self._groups[name]
            if len(members) == 1:
                complete.append((name, tensor))
                continue
            waiting = self._waiting.setdefault(members[0], {})
            waiting[name] = tensor.clone()
            if len(waiting) == len(members):
                complete += self._waiting.pop(members[0]).items()
        for name, tensor in dict(self.convert(complete)).items() if complete else ():
            spec = self._specs[name]
            if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                raise OSError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not {spec.shape} {spec.dtype}")
            self._store(*self._places.pop(name), tensor)

    def write_piece(self, piece: Piece) -> None:
        """Write a range of a parameter. If the checkpoint stores the parameter unchanged, the range is written at once;
        otherwise its pieces are first assembled.

        Raises:
            OSError: the file cannot be written.
        """
        stored = self._renamed.get(piece.name)
        if stored is None:
            tensor = self._assembly.add(piece)
            if tensor is not None:
                self.write({piece.name: tensor})
            return
        dtype = self._specs[stored].dtype
        if piece.values.dtype != dtype:
            raise OSError(f"{stored} is {piece.values.dtype}, not {dtype}")
        path, start = self._places[stored]
        self._store(path, start + piece.start * dtype.itemsize, piece.values)
        self._missing[piece.name] -= piece.values.numel()
        if not self._missing[piece.name]:
            del self._places[stored]

    def _store(self, path: Path, start: int, tensor: Tensor) -> None:
        """Overwrite the bytes of a file from `start` on. The file stays open for the next tensor, which most often
        belongs there too, because a network file system sends its data when a file is closed."""
        if self._open is None or Path(self._open.name) != path:
            self.close()
            self._open = path.open("r+b")
        self._open.seek(start)
        self._open.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Close the open file. May be called twice. Raises `OSError` if something cannot be written."""
        file, self._open = self._open, None
        if file is not None:
            file.close()

    def finish(self) -> None:
        """Raises `OSError` if a tensor was not or cannot be written."""
        self.close()
        if self._places:
            raise OSError(f"{next(iter(self._places))} and {len(self._places) - 1} more tensors did not arrive")


def _renamed(meta: Mapping[str, Tensor], groups: Mapping[str, list[str]], convert: Convert) -> dict[str, str]:
    """The checkpoint names, by module name, of the tensors that the checkpoint stores unchanged."""
    names: dict[str, str] = {}
    for name, tensor in meta.items():
        converted = list(dict(convert([(name, tensor)])).items()) if groups[name] == [name] else []
        if len(converted) == 1 and converted[0][1] is tensor:
            names[name] = converted[0][0]
    return names


def _groups(meta: Mapping[str, Tensor], stored: Mapping[str, Tensor], convert: Convert) -> dict[str, list[str]]:
    """For every tensor of the module, the tensors that must be converted together with it: itself alone, its layer, or
    all; the smallest group that gives the checkpoint's tensors. Tested on tensors without memory."""
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}
    for group_of in (lambda name: name, _layer_of, lambda name: ""):
        members: dict[str, list[str]] = {}
        for name in meta:
            members.setdefault(group_of(name), []).append(name)
        specs: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for names in members.values():
            converted = dict(convert([(name, meta[name]) for name in names]))
            specs |= {name: (tensor.shape, tensor.dtype) for name, tensor in converted.items()}
        if specs == expected:
            return {name: names for names in members.values() for name in names}
    raise OSError("the model's weights cannot be converted to the names of its family's checkpoints")


def _layer_of(name: str) -> str:
    """The name up to its first number, which identifies a layer."""
    parts = name.split(".")
    position = next((position for position, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: position + 1])
