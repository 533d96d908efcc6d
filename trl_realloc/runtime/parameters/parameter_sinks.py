"""Sources and destinations of a reallocation's parameters: an engine in place, a generation engine, or full tensors in
new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from ...engines.base import Bucket, GenerationEngine, ScoringEngine
from ...realloc.layout import Box, whole
from ...realloc.transfer import Parts


def load_merged(generator: GenerationEngine, engine: ScoringEngine) -> None:
    """Load an engine's parameters into a generation engine, with adapters merged and without those that the generation
    engine has. Not for parameters that ranks hold in parts."""
    frozen = engine.source_digests()
    generator.load(engine.export(without=generator.kept(frozen)), engine.version, frozen)


STALE = -1  # the version of parameters that are absent or incomplete


class Holder(Protocol):
    """An engine that has parameters, or parts of them, in this process."""

    version: int

    def parts(self) -> Parts:
        """The parameters that training changes; for a frozen role all parameters. Live tensors, the same ones for the
        engine's life."""


class Sink(Protocol):
    """Receives one rank's parts of the target layout."""

    @property
    def version(self) -> int:
        """The version of its parameters; `STALE` without parameters."""

    def boxes(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Sequence[Box]]:
        """The parts of these parameters that this rank holds in the target layout."""

    def narrower(self, dtypes: Mapping[str, torch.dtype]) -> Mapping[str, torch.dtype]:
        """Parameters and their dtypes where the sink's dtype is narrower than the source's. They are sent in it."""

    def tensors(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> Parts:
        """The tensors of these parameters' parts, to be filled."""

    def receive(self, stream: Iterator[Parts], version: int) -> None:
        """Iterate over a whole transfer. Sets `version` when all tensors have arrived and were accepted; it is `STALE`
        until then."""


class FullTensorSink:
    """Receives every tensor whole, in new memory on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._shapes: Mapping[str, tuple[int, ...]] = {}

    def boxes(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Sequence[Box]]:
        self._shapes = dict(shapes)
        return {name: [whole(shape)] for name, shape in shapes.items()}

    def narrower(self, dtypes: Mapping[str, torch.dtype]) -> Mapping[str, torch.dtype]:
        return {}

    def tensors(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> Parts:
        shapes = {name: self._shapes[name] for name in names}
        return {
            name: [(whole(s), torch.empty(s, dtype=dtypes[name], device=self.device))] for name, s in shapes.items()
        }


class PartsSink:
    """Receives a rank's parts in place. Subclasses define `receive` and `version`.

    Args:
        parts: live tensors, which are overwritten.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def boxes(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Sequence[Box]]:
        return {name: [box for box, _ in self._parts.get(name, ())] for name in shapes}

    def narrower(self, dtypes: Mapping[str, torch.dtype]) -> Mapping[str, torch.dtype]:
        local_dtypes = {name: self._parts[name][0][1].dtype for name in dtypes if self._parts.get(name)}
        return {name: dtype for name, dtype in local_dtypes.items() if dtype.itemsize < dtypes[name].itemsize}

    def tensors(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> Parts:
        return {name: self._parts[name] for name in names if name in self._parts}


class EngineSink(PartsSink):
    """Receives parameters into another engine of the role, in place."""

    def __init__(self, engine: Holder) -> None:
        self.engine = engine
        engine.version = STALE
        super().__init__(engine.parts())

    @property
    def version(self) -> int:
        return self.engine.version

    def receive(self, stream: Iterator[Parts], version: int) -> None:
        self.engine.version = STALE
        for _ in stream:
            pass
        self.engine.version = version


class GeneratorSink(FullTensorSink):
    """Passes full tensors to a generation engine bucket by bucket, so this process never holds a whole model.

    Args:
        to_checkpoint_names: renames a bucket from the module's names to the names in checkpoints of the model family.
        device: device of the buckets.
        buffers: the model's persistent buffers, which transfers do not contain.
    """

    def __init__(
        self,
        generator: GenerationEngine,
        to_checkpoint_names: Callable[[list[tuple[str, Tensor]]], Bucket],
        device: torch.device,
        buffers: Mapping[str, Tensor],
    ) -> None:
        super().__init__(device)
        self.generator, self.to_checkpoint_names, self.buffers = generator, to_checkpoint_names, buffers

    def narrower(self, dtypes: Mapping[str, torch.dtype]) -> Mapping[str, torch.dtype]:
        return self.generator.narrower(dtypes)

    @property
    def version(self) -> int:
        return self.generator.version

    def receive(self, stream: Iterator[Parts], version: int) -> None:
        sent = ([(name, tensor) for name, [(_, tensor)] in parts.items()] for parts in stream)
        others = [list(self.buffers.items())] if self.buffers else []
        try:
            self.generator.load(map(self.to_checkpoint_names, chain(sent, others)), version)
        finally:
            for _ in stream:  # otherwise the senders would wait for a rank whose engine refused a tensor
                pass


class CopiedEngineSink(EngineSink):
    """Receives parameters into a copy of the role's model, and loads them from there into this rank's generation
    engine. For generation by Transformers in the copy itself, and for adapters, which are merged into the copy's
    weights."""

    def __init__(self, engine: Any, generator: GenerationEngine) -> None:
        super().__init__(engine)
        self.copied_engine, self.generator = engine, generator

    @property
    def version(self) -> int:
        return self.generator.version

    def receive(self, stream: Iterator[Parts], version: int) -> None:
        super().receive(stream, version)
        load_merged(self.generator, self.copied_engine)
