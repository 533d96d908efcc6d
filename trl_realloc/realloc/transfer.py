"""Executes one transfer schedule between processes: bucket by bucket, each message under a time limit.

Owns the wire and nothing behind it: whose parameters these are, and when they are moved, its caller says. Point to
point on one process group, on the CPU (gloo) or on GPUs (NCCL; not run there by this project's tests).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Box, volume
from .schedule import Message, Piece, Step, TransferSchedule


# What a process holds of some parameters: for each, boxes with live tensors of exactly their shapes (`engines.Parts`).
Parts = Mapping[str, Sequence[tuple[Box, Tensor]]]

BUCKET_BYTES = 256 << 20
LARGE = 1 << 20  # pieces of so many bytes go from where they lie to where they belong, and are not packed
TIMEOUT_S = 120.0
_CHECKSUM_BYTES = 8


class TransferError(RuntimeError):
    """A transfer did not come to its end. The message names the edge, both ranks and the parameters."""


@dataclass
class _Flight:
    """Bytes under way: a message's small pieces packed together, or one large piece where it lies in memory.

    Args:
        tensor: (n,) uint8, what is sent from or received into.
        land: to be called when it has come; puts the bytes where they belong.
        buffer: to be used again after, if the bytes do not lie in a parameter.
    """

    message: Message
    tensor: Tensor
    land: Callable[[], None] | None = None
    buffer: Tensor | None = None
    work: Any = None


@dataclass
class _Open:
    """A bucket under way: this rank's steps of it, what has been posted, and where its parts go."""

    steps: Sequence[Step]
    source: Parts
    target: Parts
    receiving: dict[int, list[_Flight]] = field(default_factory=dict)  # by wave
    sending: list[_Flight] = field(default_factory=list)


class Transfer:
    """One rank's side of moving parameters along one edge. Made on all ranks of the schedule together.

    Args:
        name: of the edge, for messages: `actor.train -> actor.generate`.
        schedule: the same on every rank.
        rank: this process.
        group: the process group of all ranks of the schedule; used for nothing else while a transfer runs.
        device: where message buffers lie; what the group's backend can send from.
        dtypes: of every parameter.
        bucket_bytes: most bytes that a rank receives in one bucket (a larger parameter is one by itself). Two buckets
            are under way at a time, each with its buffers.
        timeout_s: for each message.
        checksum: send a CRC-32 with every message and compare it; for hunting a broken wire.
    """

    def __init__(
        self,
        name: str,
        schedule: TransferSchedule,
        rank: int,
        group: Any,
        device: torch.device,
        dtypes: Mapping[str, torch.dtype],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
        checksum: bool = False,
    ) -> None:
        self.name, self.schedule, self.rank, self.group, self.device = name, schedule, rank, group, device
        self.dtypes, self.timeout_s, self.checksum = dtypes, timeout_s, checksum
        self.sent_bytes = 0  # of the latest run, counted where they are sent
        self._buckets = schedule.buckets(bucket_bytes)
        self._steps: dict[int, list[Step]] = {}
        for step in schedule.steps(rank, bucket_bytes):
            self._steps.setdefault(step.bucket, []).append(step)
        self._waves = schedule.waves
        self._kept: dict[str, list[Box]] = {}
        for piece in schedule.kept(rank):
            self._kept.setdefault(piece.parameter, []).append(piece.box)
        # message buffers, kept from run to run: new memory costs more than the copy into it
        self._free: list[Tensor] = []
        # one batch for all of a wave: NCCL wants sends and receives of two ranks posted together
        self._batched = dist.is_initialized() and group is not None and dist.get_backend(group) == "nccl"
        if self._batched:  # NCCL connects a group with its first operation, at which all of its ranks must be
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def run(self, source: Parts, target: Callable[[Sequence[str]], Parts]) -> Iterator[Parts]:
        """Move everything once. Every rank of the schedule iterates to the end; else the others wait in vain.

        While one bucket is sent and received the next one is packed.

        Args:
            source: what this rank holds of the source layout; empty where it holds nothing.
            target: from parameter names to this rank's parts of them in the target layout, to be filled: live
                parameters, or tensors made for the bucket. Not called on a rank that the target leaves out.

        Yields:
            The target's parts of one bucket, complete; on a rank without such parts an empty mapping.

        Raises:
            TransferError: a message did not come or go within the time limit, a peer is gone, or a checksum differs.
        """
        self.sent_bytes = 0
        receives = self.rank in self.schedule.target_devices
        under_way: list[_Open] = []
        for number, names in enumerate(self._buckets):
            bucket = _Open(self._steps.get(number, ()), source, target(names) if receives else {})
            self._keep(names, bucket)
            self._post(bucket, 0)
            under_way.append(bucket)
            if len(under_way) == 2:
                yield self._finish(under_way.pop(0))
        while under_way:
            yield self._finish(under_way.pop(0))

    def _keep(self, names: Sequence[str], bucket: _Open) -> None:
        """What this rank has in both layouts goes from one to the other without a wire."""
        for name in names:
            for box in self._kept.get(name, ()):
                here, there = find(bucket.source, name, box), find(bucket.target, name, box)
                if there is not None and here is not None and there.data_ptr() != here.data_ptr():
                    there.copy_(here)

    def _post(self, bucket: _Open, wave: int) -> None:
        """Post this rank's messages of one wave: receives first, then each send as soon as it is packed."""
        waiting: list[tuple[_Flight, Any, int]] = []
        for step in bucket.steps:
            if step.wave != wave:
                continue
            tag = step.bucket * self._waves + wave  # flights of one message come in the order they were sent
            for call, messages in ((dist.irecv, step.receives), (dist.isend, step.sends)):
                for message in messages:
                    sends = call is dist.isend
                    for flight in self._outgoing(message, bucket) if sends else self._incoming(message, bucket):
                        (bucket.sending if sends else bucket.receiving.setdefault(wave, [])).append(flight)
                        self.sent_bytes += flight.tensor.numel() if sends else 0
                        waiting.append((flight, call, tag))
                        if not self._batched:
                            self._issue(waiting)
        self._issue(waiting)

    def _issue(self, waiting: list[tuple[_Flight, Any, int]]) -> None:
        peers = [f.message.source if call is dist.irecv else f.message.target for f, call, _ in waiting]
        if self._batched and waiting:
            batch = [
                dist.P2POp(call, flight.tensor, peer, self.group)
                for (flight, call, _), peer in zip(waiting, peers, strict=True)
            ]
            works = dist.batch_isend_irecv(batch)
            for at, (flight, _, _) in enumerate(waiting):
                flight.work = works[min(at, len(works) - 1)]  # NCCL gives one for the batch
        else:
            for (flight, call, tag), peer in zip(waiting, peers, strict=True):
                with self._named(flight.message):
                    flight.work = call(flight.tensor, peer, group=self.group, tag=tag)
        waiting.clear()

    def _finish(self, bucket: _Open) -> Parts:
        landed: list[_Flight] = []
        for wave in range(self._waves):
            if wave:
                self._post(bucket, wave)
            landed += bucket.receiving.get(wave, ())
            for flight in bucket.receiving.get(wave, ()):
                self._wait(flight)
                if flight.land is not None:
                    flight.land()
        for flight in bucket.sending:
            self._wait(flight)
        self._free += [f.buffer for f in (*bucket.sending, *landed) if f.buffer is not None]
        bucket.sending.clear()
        bucket.receiving.clear()
        return bucket.target

    def _wait(self, flight: _Flight) -> None:
        with self._named(flight.message):
            flight.work.wait(timedelta(seconds=self.timeout_s))
            flight.work = None  # held until the process ends it would outlive its group, and gloo aborts then

    def _named(self, message: Message) -> _Named:
        return _Named(self, message)

    def _buffer(self, size: int) -> Tensor:
        """(size,) uint8 of the smallest free buffer that is large enough; else a new one, in place of a free one."""
        large = [at for at, free in enumerate(self._free) if free.untyped_storage().nbytes() >= size]
        if large:
            at = min(large, key=lambda at: self._free[at].untyped_storage().nbytes())
            storage = self._free.pop(at).untyped_storage()
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (size,))  # type: ignore[call-overload]
        if self._free:
            self._free.pop()
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    # --- messages as bytes ----------------------------------------------------------------------------------------

    def _split(self, message: Message) -> tuple[list[Piece], list[Piece]]:
        """(large, small) pieces of a message; the same at both of its ends."""
        if self.checksum:
            return [], list(message.pieces)
        large = [p for p in message.pieces if volume(p.box) * self.dtypes[p.parameter].itemsize >= LARGE]
        return large, [piece for piece in message.pieces if piece not in large] if large else list(message.pieces)

    def _places(self, pieces: Sequence[Piece]) -> tuple[list[tuple[Piece, int, int]], int]:
        """Each piece with its first and last byte in one buffer, and the buffer's size."""
        placed, at = [], 0
        for piece in pieces:
            size = self.dtypes[piece.parameter].itemsize
            at += -at % size  # a tensor can be seen in bytes only from a multiple of its element's size
            placed.append((piece, at, at + volume(piece.box) * size))
            at = placed[-1][2]
        return placed, at

    def _outgoing(self, message: Message, bucket: _Open) -> Iterator[_Flight]:
        large, small = self._split(message)
        for piece in large:
            part = self._held(piece, bucket)
            if self._goes_as_it_lies(part):
                yield _Flight(message, _bytes(part))
            else:
                yield self._packed(message, [piece], bucket)
        if small:
            yield self._packed(message, small, bucket)

    def _packed(self, message: Message, pieces: Sequence[Piece], bucket: _Open) -> _Flight:
        placed, size = self._places(pieces)
        buffer = self._buffer(size + (_CHECKSUM_BYTES if self.checksum else 0))
        for piece, start, end in placed:
            part = self._held(piece, bucket)
            buffer[start:end].view(part.dtype).view(part.shape).copy_(part)
        if self.checksum:
            buffer[size:] = _checksum(buffer[:size])
        return _Flight(message, buffer, buffer=buffer)

    def _held(self, piece: Piece, bucket: _Open) -> Tensor:
        part = find(bucket.source, piece.parameter, piece.box)
        if part is None:
            part = find(bucket.target, piece.parameter, piece.box)  # it came in an earlier wave and is passed on
        if part is None:
            raise TransferError(f"{self.name}: rank {self.rank} is to send {piece} and does not hold it.")
        return part

    def _incoming(self, message: Message, bucket: _Open) -> Iterator[_Flight]:
        large, small = self._split(message)
        for piece in large:
            place = self._place(piece, bucket)
            if self._goes_as_it_lies(place):
                yield _Flight(message, _bytes(place))
            else:
                yield self._unpacked(message, [piece], bucket)
        if small:
            yield self._unpacked(message, small, bucket)

    def _unpacked(self, message: Message, pieces: Sequence[Piece], bucket: _Open) -> _Flight:
        placed, size = self._places(pieces)
        buffer = self._buffer(size + (_CHECKSUM_BYTES if self.checksum else 0))

        def land() -> None:
            if self.checksum and not torch.equal(buffer[size:], _checksum(buffer[:size]).to(buffer.device)):
                raise TransferError(f"{self._about(message)}: the checksum differs from what was sent.")
            for piece, start, end in placed:
                place = self._place(piece, bucket)
                place.copy_(buffer[start:end].view(place.dtype).view(place.shape))

        return _Flight(message, buffer, land, buffer)

    def _goes_as_it_lies(self, part: Tensor) -> bool:
        return part.is_contiguous() and part.device.type == self.device.type

    def _place(self, piece: Piece, bucket: _Open) -> Tensor:
        place = find(bucket.target, piece.parameter, piece.box)
        if place is None:
            raise TransferError(f"{self.name}: rank {self.rank} is to get {piece} and has no place for it.")
        return place

    def _about(self, message: Message) -> str:
        names = list(dict.fromkeys(piece.parameter for piece in message.pieces))
        what = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} parameters)"
        return f"{self.name}: rank {self.rank}, message from rank {message.source} to rank {message.target} with {what}"


class _Named:
    """Whatever goes wrong inside with a message is told with the edge, the ranks and the tensors."""

    def __init__(self, transfer: Transfer, message: Message) -> None:
        self.transfer, self.message = transfer, message

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, TransferError):
            limit = f" (time limit {self.transfer.timeout_s:g} s)"
            raise TransferError(f"{self.transfer._about(self.message)} failed{limit}: {error}") from error


def find(parts: Parts, name: str, box: Box) -> Tensor | None:
    """A view of `box` of a parameter, if one of the parts holds all of it."""
    for held, tensor in parts.get(name, ()):
        if all(a <= start and stop <= b for (a, b), (start, stop) in zip(held, box, strict=True)):
            return tensor[tuple(slice(start - a, stop - a) for (a, _), (start, stop) in zip(held, box, strict=True))]
    return None


def _bytes(part: Tensor) -> Tensor:
    return part.view(-1).view(torch.uint8)


def _checksum(payload: Tensor) -> Tensor:
    """CRC-32, as 8 bytes."""
    value = zlib.crc32(payload.cpu().numpy().tobytes())
    return torch.tensor(list(value.to_bytes(_CHECKSUM_BYTES, "little")), dtype=torch.uint8)
