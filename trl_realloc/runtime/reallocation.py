"""Keeps a call's copy of a trained role's parameters at the training's version: one object for each parameter edge of
the plan whose two layouts differ.

Owns when parameters move and that an update is taken whole or not at all. What moves to whom is the schedule's
business, the wire the transfer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..engines.base import Bucket, EngineError, GenerationEngine
from ..plan.cluster import Cluster
from ..plan.model_spec import ModelSpec
from ..realloc.layout import Box, Layout, whole
from ..realloc.schedule import TransferSchedule, make_schedule
from ..realloc.transfer import BUCKET_BYTES, TIMEOUT_S, Parts, Transfer, TransferError


STALE = -1  # the version of parameters that are none yet, or only in part


class Holder(Protocol):
    """An engine whose parameters lie in this process, in part or whole."""

    version: int

    def parts(self) -> Parts:
        """What training changes of them, or of a frozen engine all: live tensors, the same for the engine's life."""


class Sink(Protocol):
    """Where one rank's parts of the target layout go."""

    @property
    def version(self) -> int: ...

    def boxes(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Sequence[Box]]:
        """Which part of each of these parameters this rank holds in the target layout."""

    def places(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> Parts: ...

    def take(self, stream: Iterator[Parts], version: int) -> None:
        """Go through a whole transfer. `version` is set only when all of it is here and accepted; `STALE` till then."""


class WholeSink:
    """Wants every tensor whole, in new memory.

    Args:
        device: where they are put together.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._shapes: Mapping[str, tuple[int, ...]] = {}

    def boxes(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Sequence[Box]]:
        self._shapes = dict(shapes)
        return {name: [whole(shape)] for name, shape in shapes.items()}

    def places(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> Parts:
        shapes = {name: self._shapes[name] for name in names}
        return {
            name: [(whole(s), torch.empty(s, dtype=dtypes[name], device=self.device))] for name, s in shapes.items()
        }


class ShadowSink:
    """Parameters of a second engine of the role, filled in place."""

    def __init__(self, engine: Holder) -> None:
        self.engine = engine
        engine.version = STALE
        self._parts = engine.parts()

    @property
    def version(self) -> int:
        return self.engine.version

    def boxes(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Sequence[Box]]:
        return {name: [box for box, _ in self._parts.get(name, ())] for name in shapes}

    def places(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> Parts:
        return {name: self._parts[name] for name in names if name in self._parts}

    def take(self, stream: Iterator[Parts], version: int) -> None:
        self.engine.version = STALE
        for _ in stream:
            pass
        self.engine.version = version


class GeneratorSink(WholeSink):
    """A generation engine that takes full tensors, bucket by bucket: never a whole model in one place here.

    Args:
        named: a bucket under the module's names -> under the names of the family's checkpoints.
        device: where a bucket is put together.
    """

    def __init__(
        self,
        generator: GenerationEngine,
        named: Callable[[list[tuple[str, Tensor]]], Bucket],
        device: torch.device,
    ) -> None:
        super().__init__(device)
        self.generator, self.named = generator, named

    @property
    def version(self) -> int:
        return self.generator.version

    def take(self, stream: Iterator[Parts], version: int) -> None:
        try:
            self.generator.load(
                (self.named([(name, tensor) for name, [(_, tensor)] in parts.items()]) for parts in stream), version
            )
        finally:
            for _ in stream:  # the senders must not wait for a rank whose engine refused a tensor
                pass


class FeedingSink(ShadowSink):
    """A copy of the role's model here, from which the generation engine of this rank is fed: where generation is by
    Transformers in the copy itself, or where adapters alone move and are merged into the frozen weights here."""

    def __init__(self, engine: Any, generator: GenerationEngine) -> None:
        super().__init__(engine)
        self.copy, self.generator = engine, generator

    @property
    def version(self) -> int:
        return self.generator.version

    def take(self, stream: Iterator[Parts], version: int) -> None:
        super().take(stream, version)
        self.generator.load(self.copy.export(), version)


@dataclass(frozen=True)
class Moved:
    """One reallocation that took place: bytes on the wire of all ranks, and this rank's start and end."""

    name: str
    bytes: int
    start: float
    end: float


class Reallocation:
    """One edge, on one rank of either end. Making it and `refresh` are collective over the ranks of both ends.

    Args:
        source, target: calls: a training, and the call that needs its parameters elsewhere.
        ranks: of both ends, ascending.
        control: a gloo group over them, used by this edge alone.
        wire: the group that tensors travel on; `control` where they lie on the host.
        holder: the training's engine on this rank, `None` at the other end.
        sink: this rank's end of the target, `None` where it has none.
    """

    def __init__(
        self,
        source: str,
        target: str,
        cluster: Cluster,
        ranks: Sequence[int],
        rank: int,
        *,
        control: Any,
        wire: Any,
        device: torch.device,
        holder: Holder | None,
        sink: Sink | None,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
        checksum: bool = False,
    ) -> None:
        self.name, self.rank, self.ranks, self.control = f"{source} -> {target}", rank, tuple(ranks), control
        self.holder, self.sink = holder, sink
        self.version = STALE  # that all ranks have agreed on
        self._complete = False  # the latest transfer
        self.schedule, self._dtypes = self._agree_on_layouts(cluster)
        self.transfer = Transfer(
            self.name,
            self.schedule,
            rank,
            wire,
            device,
            self._dtypes,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            checksum=checksum,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that it moves."""
        return tuple(self._dtypes)

    def refresh(self) -> Moved | None:
        """Bring the target to the source's version, if it holds another. Returns what was moved.

        Raises:
            TransferError: a message of the transfer failed, or the ranks of one end hold different versions.
            EngineError: a rank's engine did not take its parameters; on every rank, with that rank's reason.
                After either the target holds no version, and nothing can be generated or scored with it.
        """
        wanted, current = self._versions()
        self.version = wanted
        if current == wanted:
            return None
        start, problem = time.time(), ""
        self._complete = False
        stream = self._stream()
        try:
            if self.sink is None:
                for _ in stream:
                    pass
            else:
                self.sink.take(stream, wanted)
        except Exception as error:
            if not self._complete:  # the others wait for messages of this rank: only the job's alarm reaches them
                self.version = STALE
                raise
            problem = f"rank {self.rank}: {error}"  # told to all below: they must not use an update not taken by all
        told = self._tell((problem, self.transfer.sent_bytes))
        problems = [text for text, _ in told if text]
        if problems:
            self.version = STALE
            raise EngineError(f"{self.name}: the update to version {wanted} was not taken: {'; '.join(problems)}")
        return Moved(self.name, sum(sent for _, sent in told), start, time.time())

    def _stream(self) -> Iterator[Parts]:
        """The transfer; notes when this rank has sent and received everything."""
        yield from self.transfer.run(self.holder.parts() if self.holder else {}, self._places)
        self._complete = True

    def check(self) -> None:
        """Raises `EngineError` where this rank's copy is not of the version that all have agreed on."""
        if self.sink is not None and (self.version == STALE or self.sink.version != self.version):
            raise EngineError(
                f"{self.name}: rank {self.rank} holds version {self.sink.version} of the parameters, not "
                f"{self.version}; they were not refreshed, or the last update failed."
            )

    def _places(self, names: Sequence[str]) -> Parts:
        return self.sink.places(names, self._dtypes) if self.sink else {}

    # --- agreement between the ranks --------------------------------------------------------------------------------

    def _tell(self, word: Any) -> list[Any]:
        """Every rank's word, in the order of `ranks`."""
        if len(self.ranks) == 1:
            return [word]
        words: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(words, word, group=self.control)
        return words

    def _versions(self) -> tuple[int, int]:
        """(the source's, the oldest of the target's)."""
        mine = (self.holder.version if self.holder else None, self.sink.version if self.sink else None)
        told = self._tell(mine)
        sources = {rank: version for rank, (version, _) in zip(self.ranks, told, strict=True) if version is not None}
        if len(set(sources.values())) != 1:
            raise TransferError(f"{self.name}: the ranks of the source hold different versions: {sources}.")
        targets = {version for _, version in told if version is not None}
        wanted = next(iter(sources.values()))
        return wanted, wanted if targets == {wanted} else STALE

    def _agree_on_layouts(self, cluster: Cluster) -> tuple[TransferSchedule, dict[str, torch.dtype]]:
        """Every rank says what it holds; all derive the same schedule from it. So a family that no table describes,
        or a user's adapters, can be moved as well."""
        held = self.holder.parts() if self.holder else {}
        said = self._tell(
            {name: (parts[0][1].dtype, [box for box, _ in parts]) for name, parts in held.items() if parts}
        )
        dtypes: dict[str, torch.dtype] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for words in said:
            for name, (dtype, boxes) in words.items():
                dtypes[name] = dtype
                ends = [shapes.get(name, tuple(0 for _ in boxes[0])), *(tuple(b for _, b in box) for box in boxes)]
                shapes[name] = tuple(map(max, zip(*ends, strict=True)))
        wants = self._tell(None if self.sink is None else self.sink.boxes(shapes))
        spec = ModelSpec.of_shapes(
            list(shapes.items()), bytes_per_element=max((dtype.itemsize for dtype in dtypes.values()), default=1)
        )
        holds = {r: {n: boxes for n, (_, boxes) in words.items()} for r, words in zip(self.ranks, said, strict=True)}
        lacks = {rank: want for rank, want in zip(self.ranks, wants, strict=True) if want is not None}
        return make_schedule(cluster, Layout.of_parts(spec, holds), Layout.of_parts(spec, lacks)), dtypes
