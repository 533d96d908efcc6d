"""`Reallocation`: moves a trained role's parameters from the layout of their training to another call's layout.

It decides when parameters move, and makes sure that all ranks accept an update or none does. `realloc.schedule` decides
which rank sends what, `realloc.transfer` sends it, and `parameter_sinks` receive it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from ...engines.base import EngineError
from ...plan.cluster import Cluster
from ...plan.model_spec import ModelSpec
from ...realloc.layout import Box, Layout
from ...realloc.schedule import TransferSchedule, make_schedule
from ...realloc.transfer import Parts, Transfer, TransferError, TransferOptions
from ..messages import GlooMessages, all_reduce
from ..process_groups import ReallocationGroups
from .copy_digests import CopyDigests, DigestSums
from .layout_agreement import HeldParts, agree_on_parts
from .parameter_sinks import STALE, Holder, Sink


T = TypeVar("T")


AGREEMENT_TAG = 1 << 28  # above the tags of a transfer's messages, which may use the same group


@dataclass(frozen=True)
class Moved:
    """A finished reallocation: bytes sent by all ranks, and this rank's start and end in seconds since the epoch."""

    name: str
    bytes: int
    start: float
    end: float


class _Versions(NamedTuple):
    """The ranks' versions of the source (version -> a rank that has it) and of the target."""

    of_source: dict[int, int]
    of_target: set[int]

    def plus(self, other: _Versions) -> _Versions:
        return _Versions({**other.of_source, **self.of_source}, self.of_target | other.of_target)


class _Outcome(NamedTuple):
    """Result of a transfer on some ranks: reasons of a refusal, bytes sent, and digests of the ranks' parameters."""

    problems: tuple[str, ...]
    sent_bytes: int
    digests: DigestSums

    def plus(self, other: _Outcome) -> _Outcome:
        digests = self.digests.plus(other.digests)
        return _Outcome(self.problems + other.problems, self.sent_bytes + other.sent_bytes, digests)


class Reallocation:
    """One rank's side of one reallocation. The constructor and `refresh` are collective over `groups.ranks`.

    Args:
        groups: the calls, ranks and process groups of the reallocation.
        holder: this rank's training engine; `None` on a rank that does not train the role.
        sink: receives this rank's parts of the target layout; `None` on a rank without parts.
        options: message settings; the same on every rank.
    """

    def __init__(
        self,
        groups: ReallocationGroups,
        cluster: Cluster,
        rank: int,
        *,
        holder: Holder | None,
        sink: Sink | None,
        options: TransferOptions,
    ) -> None:
        self.name, self.rank = f"{groups.source} -> {groups.target}", rank
        self.ranks, self.control = groups.ranks, groups.control
        self._messages = GlooMessages(groups.control)
        self.holder, self.sink = holder, sink
        self.version = STALE  # the version that all ranks agreed on
        self._is_complete = False  # whether this rank has sent and received all of the latest transfer
        self._is_proven = True  # whether all copies were equal to the source after the latest transfer
        self.schedule, self._dtypes = self._agree_on_layouts(cluster)
        self._digests = CopyDigests(self.schedule.source, self.schedule.target, rank, self._dtypes)
        self.transfer = Transfer(self.name, self.schedule, rank, groups.tensors, groups.device, self._dtypes, options)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the moved parameters."""
        return tuple(self._dtypes)

    def refresh(self) -> Moved | None:
        """Move the parameters, if the target does not have the source's version; otherwise return `None`.

        Raises:
            TransferError: a message of the transfer failed, or ranks of the source hold different versions.
            EngineError: a rank's engine did not accept its parameters, or a copy differs from the source. Raised on
                every rank. After either error the target has no version and cannot be used.
        """
        wanted, current = self._agree_on_versions()
        self.version = wanted
        if current == wanted:
            return None
        start, problem = time.time(), ""
        self._is_complete = False
        stream = self._stream()
        digests = self._digests.of_source(self.holder.parts()) if self.holder else DigestSums()
        try:
            if self.sink is None:
                for _ in stream:
                    pass
            else:
                self.sink.receive(stream, wanted)
        except Exception as error:
            if not self._is_complete:  # other ranks wait for this rank's messages; only the job's alarm reaches them
                self.version = STALE
                raise
            # sent to all ranks below: none may use an update that not all ranks accepted
            problem = f"rank {self.rank}: {error}"
        digests = digests.plus(self._digests.of_target())
        local_outcome = _Outcome((problem,) if problem else (), self.transfer.sent_bytes, digests)
        outcome = self._combined(local_outcome, _Outcome.plus)
        difference = None if outcome.problems else self._digests.difference(outcome.digests)
        self._is_proven = difference is None
        if outcome.problems or difference is not None:
            self.version = STALE
            reasons = difference or "; ".join(outcome.problems)
            raise EngineError(f"{self.name}: the update to version {wanted} was rejected: {reasons}")
        return Moved(self.name, outcome.sent_bytes, start, time.time())

    def _stream(self) -> Iterator[Parts]:
        """The transfer's buckets. Sets `_is_complete` at the end."""
        for parts in self.transfer.run(self.holder.parts() if self.holder else {}, self._target_parts):
            self._digests.add_target(parts)
            yield parts
        self._is_complete = True

    def check(self) -> None:
        """Raise `EngineError` if this rank's copy does not have the version that all ranks agreed on."""
        if self.sink is not None and (self.version == STALE or self.sink.version != self.version):
            raise EngineError(
                f"{self.name}: rank {self.rank} holds version {self.sink.version} of the parameters, not "
                f"{self.version}; they were not refreshed, or the last update failed."
            )

    def _target_parts(self, names: Sequence[str]) -> Parts:
        return self.sink.tensors(names, self._dtypes) if self.sink else {}

    # --- agreement between the ranks --------------------------------------------------------------------------------

    def _agree_on_versions(self) -> tuple[int, int]:
        """(source's version, target's version): the latter is `STALE` if any rank's differs from the source's."""
        local_versions = _Versions(
            {self.holder.version: self.rank} if self.holder else {},
            {self.sink.version if self._is_proven else STALE} if self.sink else set(),
        )
        versions = self._combined(local_versions, _Versions.plus)
        if len(versions.of_source) != 1:
            which = {rank: version for version, rank in versions.of_source.items()}
            raise TransferError(f"{self.name}: the ranks of the source hold different versions: {which}.")
        (wanted,) = versions.of_source
        return wanted, wanted if versions.of_target == {wanted} else STALE

    def _combined(self, value: T, combine: Callable[[T, T], T]) -> T:
        result = all_reduce(self._messages, self.ranks, self.rank, value, combine, AGREEMENT_TAG)
        self._messages.flush()
        return result

    def _agree_on_layouts(self, cluster: Cluster) -> tuple[TransferSchedule, dict[str, torch.dtype]]:
        """The schedule, and the dtype in which every parameter is sent. All ranks derive them from the ranks' parts, so
        that any model family and a user's adapters can be moved."""
        parts = self.holder.parts() if self.holder else {}
        own_dtypes = {name: cells[0][1].dtype for name, cells in parts.items() if cells}
        own_boxes = {name: [box for box, _ in parts[name]] for name in own_dtypes}
        source, dtypes = self._agree_on_parts(self.holder, own_boxes, own_dtypes)
        shapes: dict[str, tuple[int, ...]] = {}
        for name in dtypes:
            boxes = [box for rank_boxes in source.values() for box in rank_boxes.get(name, ())]
            shapes[name] = tuple(max(stop for _, stop in ranges) for ranges in zip(*boxes, strict=True))
        wanted = None if self.sink is None else self.sink.boxes(shapes)
        narrower = {} if self.sink is None else self.sink.narrower(dtypes)
        target, taken = self._agree_on_parts(self.sink, wanted, {**dtypes, **narrower})
        dtypes = {**dtypes, **taken}
        spec = ModelSpec.of_shapes(
            list(shapes.items()), bytes_per_element=max((dtype.itemsize for dtype in dtypes.values()), default=1)
        )
        return make_schedule(cluster, Layout.of_parts(spec, source), Layout.of_parts(spec, target)), dtypes

    def _agree_on_parts(
        self, side: Holder | Sink | None, boxes: Mapping[str, Sequence[Box]] | None, dtypes: Mapping[str, torch.dtype]
    ) -> tuple[dict[int, dict[str, list[Box]]], dict[str, torch.dtype]]:
        """All ranks' boxes in one of the layouts, and the dtypes. `side` is `None` on a rank outside the layout."""
        held = None
        if side is not None and boxes is not None:
            engine: Any = getattr(side, "engine", side)
            specs = getattr(engine, "parameter_specs", {})
            held = HeldParts(
                boxes,
                {name: dtypes[name] for name in boxes},
                getattr(engine, "flat_partition", None),
                {name: tuple(spec.shape) for name, spec in specs.items()},
            )
        agreed = agree_on_parts(self._messages, self.ranks, self.rank, held, AGREEMENT_TAG)
        self._messages.flush()
        return agreed
