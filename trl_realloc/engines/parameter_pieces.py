"""Ranges of flattened parameters that are written to files, so that no rank needs a large parameter whole.

An engine makes them (`base.TrainingEngine.pieces`); `trainer/checkpoint` writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .training_state import TensorSpec


@dataclass(frozen=True)
class Piece:
    """A range of one flattened parameter.

    Args:
        name: name of the parameter in the module.
        start: the range's first element.
        values: (n,) elements; may be live memory.
    """

    name: str
    start: int
    values: Tensor


class Assembly:
    """Assembles whole tensors from pieces in host memory. Holds the tensors whose pieces are incomplete.

    Args:
        specs: shape and dtype of the whole tensors, by name.
    """

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = specs
        self._unfinished: dict[str, tuple[Tensor, int]] = {}  # flat tensor and number of elements received

    def add(self, piece: Piece) -> Tensor | None:
        """The whole tensor if this is its last piece, otherwise `None`. A piece that is the whole is not copied."""
        shape = self._specs[piece.name].shape
        size, count = math.prod(shape), piece.values.numel()
        if count == size:
            return piece.values.view(shape)
        default = (torch.empty(0, dtype=piece.values.dtype), 0)
        flat, filled = self._unfinished.pop(piece.name, default)
        flat = flat if filled else flat.new_empty(size)
        flat[piece.start : piece.start + count] = piece.values
        if filled + count == size:
            return flat.view(shape)
        self._unfinished[piece.name] = flat, filled + count
        return None
