"""`Transfer`: sends and receives the messages of one transfer schedule, bucket by bucket, with a timeout per message.

Point to point on one process group, from host memory (gloo) or from an accelerator's memory (NCCL; simulated in the
tests). `runtime.parameters.reallocation` decides when parameters are moved.
"""

from __future__ import annotations

import contextlib
import time
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


# A process's parts of parameters: parameter name -> boxes with live tensors of the boxes' shapes.
Parts = Mapping[str, Sequence[tuple[Box, Tensor]]]
_Post = Callable[..., dist.Work | None]  # `isend` or `irecv`

TRANSFER_BUCKET_BYTES = 256 << 20
MESSAGE_POLL_S = 2e-4
LARGE_BYTES = 1 << 20  # parts of this size or more are sent and received in place, without packing
TIMEOUT_S = 120.0


class TransferError(RuntimeError):
    """A transfer failed. The message names the parameter edge, both ranks and the parameters."""


@dataclass(frozen=True)
class TransferOptions:
    """Limits of a transfer's messages.

    Args:
        bucket_bytes: maximum bytes that a rank receives in one bucket, unless a single parameter is larger. Two buckets
            are in flight at a time, each with its buffers.
    """

    bucket_bytes: int = TRANSFER_BUCKET_BYTES
    timeout_s: float = TIMEOUT_S


@dataclass
class _Flight:
    """Bytes in flight: a message's small parts packed together, or one large part in place.

    Args:
        tensor: (n,) uint8, sent from or received into.
        unpack: copies the received bytes to the parameters; `None` for bytes in place.
        buffer: reusable memory of packed bytes; `None` for bytes in place.
        work: the handle of the send or receive.
    """

    message: Message
    tensor: Tensor
    unpack: Callable[[], None] | None = None
    buffer: Tensor | None = None
    work: dist.Work | None = None


@dataclass
class _BucketInFlight:
    """A bucket in flight: this rank's steps, its parts in both layouts, and its posted sends and receives."""

    steps: Sequence[TransferStep]
    source: Parts
    target: Parts
    receiving: dict[int, list[_Flight]] = field(default_factory=dict)  # by wave
    sending: list[_Flight] = field(default_factory=list)


class Transfer:
    """One rank's side of moving parameters between two layouts. Made on all ranks of the schedule together.

    Args:
        name: name of the parameter edge in error messages: `actor.train -> actor.generate`.
        schedule: the schedule, the same on every rank.
        group: the process group of all ranks of the schedule. No other code may use it while a transfer runs.
        device: device of message buffers; the group's backend must be able to send from it.
        options: message settings, the same on every rank.
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
        self.dtypes, self.timeout_s = dtypes, options.timeout_s
        self.sent_bytes = 0  # this rank's bytes in the latest run
        self._buckets = schedule.buckets(options.bucket_bytes)
        self._steps: dict[int, list[TransferStep]] = {}
        for step in schedule.steps(rank, options.bucket_bytes):
            self._steps.setdefault(step.bucket, []).append(step)
        self._waves = schedule.waves
        self._kept: dict[str, list[Box]] = {}
        for piece in schedule.kept(rank):
            self._kept.setdefault(piece.parameter, []).append(piece.box)
        self._views = MessageViews(dtypes)
        # message buffers; on a CPU reused in later runs, because allocation costs more than copying
        self._free_buffers: list[Tensor] = []
        # NCCL and similar backends need the sends and receives of two ranks posted together, so a wave is one batch
        self._batched = group is not None and device.type != "cpu"
        self.polls = self._batched and dist.get_backend(group) == "nccl"
        if self._batched:  # NCCL connects a group in its first operation, which needs all of its ranks
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def run(self, source: Parts, target: Callable[[Sequence[str]], Parts]) -> Iterator[Parts]:
        """Move all parameters once. Every rank of the schedule must iterate to the end; otherwise the others wait until
        their timeout. While one bucket is sent and received, the next one is packed.

        Args:
            source: this rank's parts of the source layout; may be empty.
            target: parameter names -> this rank's parts of the target layout, to be filled: live parameters, or tensors
                made for the bucket. Not called on a rank without target parts.

        Yields:
            The filled target parts of one bucket; an empty mapping on a rank without target parts.

        Raises:
            TransferError: a message was not sent or received within the time limit, or a peer is gone.
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
        if self.device.type != "cpu":  # returns the memory to torch's caching allocator
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
            tag = step.bucket * self._waves + wave  # shared by the flights of a message, which arrive in order
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
        """Post (flight, `irecv` or `isend`, tag) items, and clear the list."""
        peers = [f.message.source if post is dist.irecv else f.message.target for f, post, _ in unposted]
        if self._batched and unposted:
            batch = [
                dist.P2POp(post, flight.tensor, peer, self.group)
                for (flight, post, _), peer in zip(unposted, peers, strict=True)
            ]
            works = dist.batch_isend_irecv(batch)
            for index, (flight, _, _) in enumerate(unposted):
                flight.work = works[min(index, len(works) - 1)]  # NCCL returns one handle for the batch
        else:
            for (flight, post, tag), peer in zip(unposted, peers, strict=True):
                with self._error_context(flight.message):
                    flight.work = post(flight.tensor, peer, group=self.group, tag=tag)
        unposted.clear()

    def _finish(self, bucket: _BucketInFlight) -> Parts:
        """Finish a bucket's messages, including later waves. Returns the filled target parts."""
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
            TransferError: the message failed, or exceeded the timeout.
        """
        assert flight.work is not None, "posted before it is waited for"
        with self._error_context(flight.message):
            if self.polls:
                self._poll(flight.work)
                flight.work.wait()
            else:
                flight.work.wait(timedelta(seconds=self.timeout_s))
            flight.work = None  # gloo aborts if a handle outlives its group

    def _poll(self, work: dist.Work) -> None:
        """Wait on the host until a device has finished a message. NCCL's wait would poll every 10 ms, longer than most
        buckets take, and without a timeout would block only the device's stream."""
        deadline = time.monotonic() + self.timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("no data arrived")
            time.sleep(MESSAGE_POLL_S)

    @contextlib.contextmanager
    def _error_context(self, message: Message) -> Iterator[None]:
        """Convert errors into a `TransferError` that names the edge, the ranks and the parameters."""
        try:
            yield
        except TransferError:
            raise
        except RuntimeError as error:
            limit = f" (time limit {self.timeout_s:g} s)"
            raise TransferError(f"{self._describe(message)} failed{limit}: {error}") from error

    def _buffer(self, size: int) -> Tensor:
        """(size,) uint8 in the smallest free buffer that is large enough. Otherwise in a new buffer, which replaces a
        free one."""
        large = [index for index, free in enumerate(self._free_buffers) if free.untyped_storage().nbytes() >= size]
        if large:
            index = min(large, key=lambda index: self._free_buffers[index].untyped_storage().nbytes())
            storage = self._free_buffers.pop(index).untyped_storage()
            empty = torch.empty(0, dtype=torch.uint8, device=self.device)
            empty.set_(storage, 0, (size,))  # type: ignore[call-overload]
            return empty
        if self._free_buffers:
            self._free_buffers.pop()
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    # --- messages as bytes ----------------------------------------------------------------------------------------

    def _split(self, message: Message) -> tuple[list[ParameterBox], list[ParameterBox]]:
        """(large, small) parts of a message. Sender and receiver split it alike.

        In a batch each message is one operation. A batch is one NCCL group. With hundreds of operations, NCCL may cut
        it into kernels differently on each rank, and ranks wait for each other (pytorch#174288). One operation per
        large part would give 488 from 32 devices to 32 others.
        """
        if self._batched and len(message.pieces) > 1:
            return [], list(message.pieces)
        large = [p for p in message.pieces if volume(p.box) * self.dtypes[p.parameter].itemsize >= LARGE_BYTES]
        return large, [piece for piece in message.pieces if piece not in large] if large else list(message.pieces)

    def _offsets(self, pieces: Sequence[ParameterBox]) -> tuple[list[tuple[ParameterBox, int, int]], int]:
        """((part, first byte, end byte) for each part, size of the buffer in bytes)."""
        placed, offset = [], 0
        for piece in pieces:
            size = self.dtypes[piece.parameter].itemsize
            offset += -offset % size  # a tensor's view of bytes must start at a multiple of its element's size
            placed.append((piece, offset, offset + volume(piece.box) * size))
            offset = placed[-1][2]
        return placed, offset

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
        buffer = self._buffer(size)
        held, tensor_of = bucket.source, partial(self._source_tensor, bucket=bucket)
        in_buffer, parts = self._views.of(message, buffer, placed, held, tensor_of)
        copy_all(in_buffer, parts)
        return _Flight(message, buffer, buffer=buffer)

    def _source_tensor(self, piece: ParameterBox, bucket: _BucketInFlight) -> Tensor:
        part = find(bucket.source, piece.parameter, piece.box)
        if part is None:
            part = find(bucket.target, piece.parameter, piece.box)  # a relay: received in an earlier wave
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
        buffer = self._buffer(size)

        def unpack() -> None:
            held, tensor_of = bucket.target, partial(self._target_tensor, bucket=bucket)
            in_buffer, parts = self._views.of(message, buffer, placed, held, tensor_of)
            copy_all(parts, in_buffer)

        return _Flight(message, buffer, unpack, buffer)

    def _is_sent_in_place(self, part: Tensor, dtype: torch.dtype) -> bool:
        """True if the tensor needs no buffer to be sent or received as `dtype`."""
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
    """A view of `box` of a parameter, if one of the parts contains the whole box; else `None`."""
    for outer, tensor in parts.get(name, ()):
        if all(a <= start and stop <= b for (a, b), (start, stop) in zip(outer, box, strict=True)):
            return tensor[tuple(slice(start - a, stop - a) for (a, _), (start, stop) in zip(outer, box, strict=True))]
    return None


def _bytes(part: Tensor) -> Tensor:
    """(n,) uint8, a view of a contiguous tensor."""
    return part.view(-1).view(torch.uint8)
