"""Reads the parameters of a model from the safetensors files of its checkpoint, part by part. The engine decides which
part of a parameter its rank reads (`weight_source.fill`).
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ...realloc.layout import Box
from ..transformers_compat import Conversion
from .weight_source import Read


_SAMPLES, _SAMPLE_BYTES = 4, 4096  # per tensor in `CheckpointFiles.fingerprint`


class CheckpointFiles:
    """The safetensors files of one checkpoint, as the source of a model's parameters.

    Args:
        files: paths of the files.
        keys: name in the model -> name in the checkpoint, of the parameters that are read unchanged.
        aliases: other names of tied parameters -> name in `keys` or `conversions`. A pipeline stage may have a tied
            parameter under the name that the checkpoint lacks.
        conversions: name in the model -> computation of the parameter.
        structure: unsplit model on the meta device; needed for conversions.
    """

    def __init__(
        self,
        files: Sequence[str],
        keys: Mapping[str, str],
        aliases: Mapping[str, str],
        conversions: Mapping[str, Conversion],
        structure: PreTrainedModel | None,
    ) -> None:
        self.files, self._structure = tuple(files), structure
        self._keys, self._aliases, self._conversions = keys, aliases, conversions
        self.fingerprint = _fingerprint(self.files)

    def __deepcopy__(self, memo: object) -> CheckpointFiles:
        return self  # copies of a model read the same files

    def names(self) -> Sequence[str]:
        return [*self._keys, *self._aliases, *self._conversions]

    @contextlib.contextmanager
    def reading(self) -> Iterator[Read]:
        computed: dict[str, Tensor] = {}  # results of the latest conversion, perhaps several parameters
        sources: tuple[tuple[str, str], ...] = ()  # the tensors that they were computed from
        with opened(self.files) as handles:

            def read(name: str, box: Box, target: Tensor) -> None:
                nonlocal sources
                if not target.numel():
                    return
                index = tuple(slice(start, stop) for start, stop in box) or ...
                name = self._aliases.get(name, name)
                if (key := self._keys.get(name)) is not None:
                    target.copy_(handles[key].get_slice(key)[index])
                    return
                (low, high), *others = box
                conversion, first = self._conversions[name].of_rows(low, high)
                if name not in computed or sources != conversion.sources:
                    assert self._structure is not None, "a model with conversions keeps its structure"
                    computed.clear()
                    whole_tensor = lambda key: handles[key].get_tensor(key)  # noqa: E731
                    computed.update(conversion.compute(whole_tensor, self._structure))
                    sources = conversion.sources
                part = computed[name][low - first : high - first]
                target.copy_(part[(slice(None), *(slice(start, stop) for start, stop in others))])

            yield read


@contextlib.contextmanager
def opened(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The open file of each tensor of a checkpoint, by the tensor's name in the checkpoint."""
    with contextlib.ExitStack() as stack:
        handles: dict[str, Any] = {}
        for file in files:
            handle = stack.enter_context(safe_open(file, framework="pt"))
            handles |= dict.fromkeys(handle.keys(), handle)
        yield handles


def _fingerprint(files: Sequence[str]) -> int:
    """Positive int64 computed from the names, sizes and headers of files and from samples of every tensor. Most data is
    not read, and ranks with copies of the same files in different folders agree."""
    digest = 0
    for file in sorted(files, key=os.path.basename):
        with open(file, "rb") as content:
            header = content.read(int.from_bytes(content.read(8), "little"))
            name = f"{os.path.basename(file)} {os.path.getsize(file)} "
            digest = zlib.crc32(name.encode() + header, digest)
            first = content.tell()
            for tensor, described in json.loads(header).items():
                if tensor == "__metadata__":
                    continue
                begin, end = described["data_offsets"]
                for number in range(_SAMPLES):  # the last one ends with the tensor
                    place = begin + max(0, end - begin - _SAMPLE_BYTES) * number // max(1, _SAMPLES - 1)
                    content.seek(first + place)
                    digest = zlib.crc32(content.read(min(_SAMPLE_BYTES, end - place)), digest)
    return 1 + digest
