"""Parameters on their way to files, as ranges of the flattened tensors, so that no rank needs a large one whole.

An engine makes them (`base.TrainingEngine.pieces`), `trainer/checkpoint` writes them.
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
        name: of the parameter, as the module has it.
        start: the range's first element.
        values: (n,) elements; may be live memory.
    """

    name: str
    start: int
    values: Tensor


class Assembly:
    """Makes whole tensors of pieces, in host memory. Holds those of which pieces are missing.

    Args:
        specs: of the whole tensors, by name.
    """

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = specs
        self._unfinished: dict[str, tuple[Tensor, int]] = {}  # a flat tensor and how many elements it has

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


__all__ = ["Assembly", "Piece"]
