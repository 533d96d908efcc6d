"""Counts the bytes that are read from safetensors files."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trl_realloc.engines.training import checkpoint_files


PIECES: list[int] = []  # bytes of every piece that was read
_opens = checkpoint_files.safe_open


class _Slice:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        piece: Tensor = self.tensor[index]
        PIECES.append(piece.nbytes)
        return piece


class CountedFile:
    """Replaces `safe_open` in `checkpoint_files`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.file = _opens(*args, **kwargs)
        self.keys, self.metadata = self.file.keys, self.file.metadata

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self.file.get_slice(name))

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[...]

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)
