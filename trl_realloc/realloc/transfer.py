"""`Transfer`: sends and receives the messages of one transfer schedule, bucket by bucket, under a time limit each.

Point to point on one process group, from host memory (gloo) or from an accelerator's (NCCL; the tests run it on a
stand-in). Whose parameters these are and when they are moved is in `runtime.parameters.reallocation`.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .flat_runs import MessageViews, copy_all
from .layout import Box, volume
from .schedule import Message, ParameterBox, TransferSchedule, TransferStep


# The parts of some parameters that a process holds: for each, boxes with live tensors of exactly their shapes.
Parts = Mapping[str, Sequence[tuple[Box, Tensor]]]
_Post = Callable[..., dist.Work | None]  # `isend` or `irecv`

TRANSFER_BUCKET_BYTES = 256 << 20
MESSAGE_POLL_S = 2e-4
LARGE_BYTES = 1 << 20  # parts of so many bytes are sent and received in place, without packing
TIMEOUT_S = 120.0
_CHECKSUM_BYTES = 8


class TransferError(RuntimeError):
    """A transfer failed. The message names the parameter edge, both ranks and the parameters."""


@dataclass(frozen=True)
class TransferOptions:
    """Limits and checks of a transfer's messages.

    Args:
        bucket_bytes: most bytes that a rank receives in one bucket, unless a single parameter is larger. Two buckets
            are in flight at a time, each with its buffers.
        timeout_s: for each message.
        checksum: send a CRC-32 with every message and compare it, to find a faulty network.
    """

    bucket_bytes: int = TRANSFER_BUCKET_BYTES
    timeout_s: float = TIMEOUT_S
    checksum: bool = False


@dataclass
class _Flight:
    """Bytes in flight: a message's small parts packed together, or one large part in place.

    Args:
        tensor: (n,) uint8, sent from or received into.
        unpack: called when the bytes have arrived; copies them to the parameters. `None` where they arrive in place.
        buffer: the packed bytes' memory, to be used again afterwards; `None` for bytes in place.
        work: the handle of the send or receive.
    """

    message: Message
    tensor: Tensor
    unpack: Callable[[], None] | None = None
    buffer: Tensor | None = None
    work: dist.Work | None = None


@dataclass
class _BucketInFlight:
    """A bucket in flight: this rank's steps, its parts in both layouts, and the sends and receives that it has
    posted."""

    steps: Sequence[TransferStep]
    source: Parts
    target: Parts
    receiving: dict[int, list[_Flight]] = field(default_factory=dict)  # by wave
    sending: list[_Flight] = field(default_factory=list)


class Transfer:
    """One rank's side of moving parameters between two layouts. Made on all ranks of the schedule together.

    Args:
        name: of the parameter edge, for messages: `actor.train -> actor.generate`.
        schedule: the same on every rank.
        rank: this process.
        group: the process group of all ranks of the schedule. It must not be used by others while a transfer runs.
        device: of message buffers; the group's backend must be able to send from it.
        dtypes: of every parameter.
        options: the same on every rank.
    """

    def __init__(
        self,
        name: str,
        schedule: TransferSchedule,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        dtypes: Mapping[str, torch.dtype],
        options: TransferOptions = TransferOptions(),
    ) -> None:
        self.name, self.schedule, self.rank, self.group, self.device = name, schedule, rank, group, device
        self.dtypes, self.timeout_s, self.checksum = dtypes, options.timeout_s, options.checksum
        self.sent_bytes = 0  # by this rank in the latest run
        self._buckets = schedule.buckets(options.bucket_bytes)
        self._steps: dict[int, list[TransferStep]] = {}
        for step in schedule.steps(rank, options.bucket_bytes):
            self._steps.setdefault(step.bucket, []).append(step)
        self._waves = schedule.waves
        self._kept: dict[str, list[Box]] = {}
        for piece in schedule.kept(rank):
            self._kept.setdefault(piece.parameter, []).append(piece.box)
        self._views = MessageViews(dtypes)
        # message buffers, on a CPU kept between runs: allocating memory costs more than copying into it
        self._free_buffers: list[Tensor] = []
        # an accelerator's backend, such as NCCL, needs the sends and receives of two ranks posted together, so those of
        # a wave are one batch
        self._batched = group is not None and device.type != "cpu"
        self.polls = self._batched and dist.get_backend(group) == "nccl"
        if self._batched:  # it connects a group in its first operation, in which all of its ranks must take part
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def run(self, source: Parts, target: Callable[[Sequence[str]], Parts]) -> Iterator[Parts]:
        """Move all parameters once. Every rank of the schedule must iterate to the end; otherwise the others wait until
        their time limit. While one bucket is sent and received, the next one is packed.

        Args:
            source: the parts of the source layout that this rank holds; may be empty.
            target: parameter names -> this rank's parts of them in the target layout, to be filled. These are live
                parameters or tensors made for the bucket. Not called on a rank that has no part of the target.

        Yields:
            The filled target parts of one bucket; an empty mapping on a rank that has none.

        Raises:
            TransferError: a message was not sent or received within the time limit, a peer is gone, or a checksum
                differs.
        """
        self.sent_bytes = 0
        is_receiver = self.rank in self.schedule.target_devices
        in_flight: list[_BucketInFlight] = []
        for number, names in enumerate(self._buckets):
            bucket = _BucketInFlight(self._steps.get(number, ()), source, target(names) if is_receiver else {})
            self._copy_kept(names, bucket)
            self._post(bucket, 0)
            in_flight.append(bucket)
            if len(in_flight) == 2:
                yield self._finish(in_flight.pop(0))
        while in_flight:
            yield self._finish(in_flight.pop(0))
        if self.device.type != "cpu":  # torch keeps an accelerator's memory, and what is held here others lack
            self._free_buffers.clear()

    def _copy_kept(self, names: Sequence[str], bucket: _BucketInFlight) -> None:
        """Copy the parts that this rank holds in both layouts."""
        for name in names:
            for box in self._kept.get(name, ()):
                source, target = find(bucket.source, name, box), find(bucket.target, name, box)
                if target is not None and source is not None and target.data_ptr() != source.data_ptr():
                    target.copy_(source)

    def _post(self, bucket: _BucketInFlight, wave: int) -> None:
        """Post this rank's messages of one wave: the receives first, then each send as soon as it is packed."""
        unposted: list[tuple[_Flight, _Post, int]] = []
        for step in bucket.steps:
            if step.wave != wave:
                continue
            tag = (
                step.bucket * self._waves + wave
            )  # several flights of one message arrive in the order in which they were sent
            for post, messages in ((dist.irecv, step.receives), (dist.isend, step.sends)):
                for message in messages:
                    is_send = post is dist.isend
                    for flight in self._outgoing(message, bucket) if is_send else self._incoming(message, bucket):
                        (bucket.sending if is_send else bucket.receiving.setdefault(wave, [])).append(flight)
                        self.sent_bytes += flight.tensor.numel() if is_send else 0
                        unposted.append((flight, post, tag))
                        if not self._batched:
                            self._issue(unposted)
        self._issue(unposted)

    def _issue(self, unposted: list[tuple[_Flight, _Post, int]]) -> None:
        """Post flights, each given with `irecv` or `isend` and its tag, and clear the list."""
        peers = [f.message.source if post is dist.irecv else f.message.target for f, post, _ in unposted]
        if self._batched and unposted:
            batch = [
                dist.P2POp(post, flight.tensor, peer, self.group)
                for (flight, post, _), peer in zip(unposted, peers, strict=True)
            ]
            works = dist.batch_isend_irecv(batch)
            for at, (flight, _, _) in enumerate(unposted):
                flight.work = works[min(at, len(works) - 1)]  # NCCL returns one handle for the batch
        else:
            for (flight, post, tag), peer in zip(unposted, peers, strict=True):
                with self._error_context(flight.message):
                    flight.work = post(flight.tensor, peer, group=self.group, tag=tag)
        unposted.clear()

    def _finish(self, bucket: _BucketInFlight) -> Parts:
        """Wait for a bucket's messages, and post and wait for its later waves. Returns the filled target parts."""
        received: list[_Flight] = []
        for wave in range(self._waves):
            if wave:
                self._post(bucket, wave)
            received += bucket.receiving.get(wave, ())
            for flight in bucket.receiving.get(wave, ()):
                self.wait(flight)
                if flight.unpack is not None:
                    flight.unpack()
        for flight in bucket.sending:
            self.wait(flight)
        self._free_buffers += [f.buffer for f in (*bucket.sending, *received) if f.buffer is not None]
        bucket.sending.clear()
        bucket.receiving.clear()
        return bucket.target

    def wait(self, flight: _Flight) -> None:
        """Wait until a message is done.

        Raises:
            TransferError: it failed, or was not done within the time limit.
        """
        assert flight.work is not None, "posted before it is waited for"
        with self._error_context(flight.message):
            if self.polls:
                self._poll(flight.work)
                flight.work.wait()
            else:
                flight.work.wait(timedelta(seconds=self.timeout_s))
            flight.work = None  # gloo aborts where a handle outlives its group

    def _poll(self, work: dist.Work) -> None:
        """Wait on the host until a device has done a message. NCCL would look for it every 10 ms, which is longer than
        most buckets take, and without a time limit only make the device's stream wait."""
        deadline = time.monotonic() + self.timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("nothing came")
            time.sleep(MESSAGE_POLL_S)

    @contextlib.contextmanager
    def _error_context(self, message: Message) -> Iterator[None]:
        """Turn an error in the block into a `TransferError` that names the edge, the ranks and the parameters."""
        try:
            yield
        except TransferError:
            raise
        except RuntimeError as error:
            limit = f" (time limit {self.timeout_s:g} s)"
            raise TransferError(f"{self._describe(message)} failed{limit}: {error}") from error

    def _buffer(self, size: int) -> Tensor:
        """(size,) uint8 in the smallest free buffer that is large enough. Otherwise a new buffer, and one that is free
        is given up."""
        large = [at for at, free in enumerate(self._free_buffers) if free.untyped_storage().nbytes() >= size]
        if large:
            at = min(large, key=lambda at: self._free_buffers[at].untyped_storage().nbytes())
            storage = self._free_buffers.pop(at).untyped_storage()
            empty = torch.empty(0, dtype=torch.uint8, device=self.device)
            empty.set_(storage, 0, (size,))  # type: ignore[call-overload]
            return empty
        if self._free_buffers:
            self._free_buffers.pop()
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    # --- messages as bytes ----------------------------------------------------------------------------------------

    def _split(self, message: Message) -> tuple[list[ParameterBox], list[ParameterBox]]:
        """(large, small) parts of a message. Sender and receiver split it alike.

        Of a batch each message is one operation. A batch is one NCCL group, whose operations NCCL may cut into kernels
        otherwise on each rank when they are some hundreds, so that ranks wait for each other (pytorch#174288); with one
        for each large part there were 488 from 32 devices to 32 others.
        """
        if self.checksum or (self._batched and len(message.pieces) > 1):
            return [], list(message.pieces)
        large = [p for p in message.pieces if volume(p.box) * self.dtypes[p.parameter].itemsize >= LARGE_BYTES]
        return large, [piece for piece in message.pieces if piece not in large] if large else list(message.pieces)

    def _offsets(self, pieces: Sequence[ParameterBox]) -> tuple[list[tuple[ParameterBox, int, int]], int]:
        """Each part with its first byte in one buffer and the byte after its last, and the buffer's size."""
        placed, at = [], 0
        for piece in pieces:
            size = self.dtypes[piece.parameter].itemsize
            at += -at % size  # a tensor's view of bytes must start at a multiple of its element's size
            placed.append((piece, at, at + volume(piece.box) * size))
            at = placed[-1][2]
        return placed, at

    def _outgoing(self, message: Message, bucket: _BucketInFlight) -> Iterator[_Flight]:
        large, small = self._split(message)
        for piece in large:
            part = self._source_tensor(piece, bucket)
            if self._is_sent_in_place(part, self.dtypes[piece.parameter]):
                yield _Flight(message, _bytes(part))
            else:
                yield self._packed(message, [piece], bucket)
        if small:
            yield self._packed(message, small, bucket)

    def _packed(self, message: Message, pieces: Sequence[ParameterBox], bucket: _BucketInFlight) -> _Flight:
        placed, size = self._offsets(pieces)
        buffer = self._buffer(size + (_CHECKSUM_BYTES if self.checksum else 0))
        held, tensor_of = bucket.source, partial(self._source_tensor, bucket=bucket)
        in_buffer, parts = self._views.of(message, buffer, placed, held, tensor_of)
        copy_all(in_buffer, parts)
        if self.checksum:
            buffer[size:] = _checksum(buffer[:size])
        return _Flight(message, buffer, buffer=buffer)

    def _source_tensor(self, piece: ParameterBox, bucket: _BucketInFlight) -> Tensor:
        part = find(bucket.source, piece.parameter, piece.box)
        if part is None:
            part = find(bucket.target, piece.parameter, piece.box)  # it was received in an earlier wave and is sent on
        if part is None:
            raise TransferError(f"{self.name}: rank {self.rank} must send {piece}, which it does not hold.")
        return part

    def _incoming(self, message: Message, bucket: _BucketInFlight) -> Iterator[_Flight]:
        large, small = self._split(message)
        for piece in large:
            part = self._target_tensor(piece, bucket)
            if self._is_sent_in_place(part, self.dtypes[piece.parameter]):
                yield _Flight(message, _bytes(part))
            else:
                yield self._unpacked(message, [piece], bucket)
        if small:
            yield self._unpacked(message, small, bucket)

    def _unpacked(self, message: Message, pieces: Sequence[ParameterBox], bucket: _BucketInFlight) -> _Flight:
        placed, size = self._offsets(pieces)
        buffer = self._buffer(size + (_CHECKSUM_BYTES if self.checksum else 0))

        def unpack() -> None:
            if self.checksum and not torch.equal(buffer[size:], _checksum(buffer[:size]).to(buffer.device)):
                raise TransferError(f"{self._describe(message)}: the checksum differs from what was sent.")
            held, tensor_of = bucket.target, partial(self._target_tensor, bucket=bucket)
            in_buffer, parts = self._views.of(message, buffer, placed, held, tensor_of)
            copy_all(parts, in_buffer)

        return _Flight(message, buffer, unpack, buffer)

    def _is_sent_in_place(self, part: Tensor, dtype: torch.dtype) -> bool:
        """True if the tensor's memory can be sent from or received into without a buffer.

        Args:
            dtype: in which its parameter is sent.
        """
        return part.is_contiguous() and part.device.type == self.device.type and part.dtype == dtype

    def _target_tensor(self, piece: ParameterBox, bucket: _BucketInFlight) -> Tensor:
        part = find(bucket.target, piece.parameter, piece.box)
        if part is None:
            raise TransferError(
                f"{self.name}: rank {self.rank} receives {piece}, which is not in its part of the target layout."
            )
        return part

    def _describe(self, message: Message) -> str:
        names = list(dict.fromkeys(piece.parameter for piece in message.pieces))
        what = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} parameters)"
        return f"{self.name}: rank {self.rank}, message from rank {message.source} to rank {message.target} with {what}"


def find(parts: Parts, name: str, box: Box) -> Tensor | None:
    """A view of `box` of a parameter, if one of the parts contains all of it; else `None`."""
    for outer, tensor in parts.get(name, ()):
        if all(a <= start and stop <= b for (a, b), (start, stop) in zip(outer, box, strict=True)):
            return tensor[tuple(slice(start - a, stop - a) for (a, _), (start, stop) in zip(outer, box, strict=True))]
    return None


def _bytes(part: Tensor) -> Tensor:
    """(n,) uint8, a view of a contiguous tensor."""
    return part.view(-1).view(torch.uint8)


def _checksum(payload: Tensor) -> Tensor:
    """CRC-32 of (n,) uint8, as (8,) uint8."""
    value = zlib.crc32(payload.cpu().numpy().tobytes())
    return torch.tensor(list(value.to_bytes(_CHECKSUM_BYTES, "little")), dtype=torch.uint8)
