"""`Quantization`: how bitsandbytes stores the weights of a model that trains adapters (QLoRA), and their bytes.

Pure. The layers themselves are loaded and read by `engines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any


BLOCK = 64  # elements with a common float32 scale, in 4 bits
NESTED_BLOCK = 256  # of these scales, elements with a common scale, if they are quantized too


@dataclass(frozen=True)
class Quantization:
    """The format of a model's linear layers. The embedding, the norms and the head keep the model's dtype.

    Args:
        bits: 4 (nf4 or fp4) or 8 (int8).
        nested: the scales of 4-bit blocks are quantized to 8 bits (`bnb_4bit_use_double_quant`).
    """

    bits: int = 4
    nested: bool = False

    @staticmethod
    def of(settings: Any) -> Quantization | None:
        """The format that a `quantization_config` asks for, an object of Transformers or a mapping. `None` for `None`,
        and for formats of other libraries."""

        def read(name: str) -> object:
            return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)

        if read("load_in_8bit"):
            return Quantization(8)
        return Quantization(4, bool(read("bnb_4bit_use_double_quant"))) if read("load_in_4bit") else None

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a linear layer's weight of this shape, with its scales: one for each row in 8 bits, and one for each
        block in 4 bits."""
        rows, columns = shape
        elements = rows * columns
        if self.bits == 8:
            return elements + 4 * rows
        blocks = ceil(elements / BLOCK)
        return ceil(elements / 2) + (blocks + 4 * ceil(blocks / NESTED_BLOCK) if self.nested else 4 * blocks)
