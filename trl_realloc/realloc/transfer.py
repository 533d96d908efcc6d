"""Executes one transfer schedule between processes: bucket by bucket, each message under a time limit.

Owns the wire and nothing behind it: whose parameters these are, and when they are moved, its caller says. Point to
point on one process group, on the CPU (gloo) or on GPUs (NCCL; not run there by this project's tests).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Box
from .schedule import Message, Step, TransferSchedule


# What a process holds of some parameters: for each, boxes with live tensors of exactly their shapes (`engines.Parts`).
Parts = Mapping[str, Sequence[tuple[Box, Tensor]]]

BUCKET_BYTES = 256 << 20
TIMEOUT_S = 120.0
_CHECKSUM_BYTES = 8


class TransferError(RuntimeError):
    """A transfer did not come to its end. The message names the edge, both ranks and the parameters."""


@dataclass
class _Open:
    """A bucket under way: this rank's steps of it, what has been posted, and where its parts go."""

    steps: Sequence[Step]
    source: Parts
    target: Parts
    receiving: dict[int, list[tuple[Message, Tensor, Any]]] = field(default_factory=dict)  # by wave
    sending: list[tuple[Message, Tensor, Any]] = field(default_factory=list)


class Transfer:
    """One rank's side of moving parameters along one edge.

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
        # one batch for all of a wave: NCCL wants sends and receives of two ranks posted together
        self._batched = dist.is_initialized() and group is not None and dist.get_backend(group) == "nccl"

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
        operations: list[tuple[list[tuple[Message, Tensor, Any]], Any, Message, Tensor, int]] = []
        for step in bucket.steps:
            if step.wave != wave:
                continue
            receiving = bucket.receiving.setdefault(wave, [])
            tag = step.bucket * self._waves + wave
            for message in step.receives:
                buffer = torch.empty(self._size(message), dtype=torch.uint8, device=self.device)
                operations.append((receiving, dist.irecv, message, buffer, tag))
                if not self._batched:
                    self._issue(operations)
            for message in step.sends:
                buffer = self._pack(message, bucket)
                self.sent_bytes += buffer.numel()
                operations.append((bucket.sending, dist.isend, message, buffer, tag))
                if not self._batched:
                    self._issue(operations)
        self._issue(operations)

    def _issue(self, operations: list[tuple[list[tuple[Message, Tensor, Any]], Any, Message, Tensor, int]]) -> None:
        peers = [m.source if call is dist.irecv else m.target for _, call, m, _, _ in operations]
        if self._batched and operations:
            batch = [
                dist.P2POp(call, buffer, peer, self.group)
                for (_, call, _, buffer, _), peer in zip(operations, peers, strict=True)
            ]
            works = dist.batch_isend_irecv(batch)
            works = works if len(works) == len(batch) else works * len(batch)  # NCCL gives one for the batch
        else:
            works = []
            for (_, call, message, buffer, tag), peer in zip(operations, peers, strict=True):
                with self._named(message):
                    works.append(call(buffer, peer, group=self.group, tag=tag))
        for (where, _, message, buffer, _), work in zip(operations, works, strict=True):
            where.append((message, buffer, work))
        operations.clear()

    def _finish(self, bucket: _Open) -> Parts:
        for wave in range(self._waves):
            if wave:
                self._post(bucket, wave)
            for message, buffer, work in bucket.receiving.pop(wave, ()):
                self._wait(message, work)
                self._unpack(message, buffer, bucket)
        for message, _, work in bucket.sending:
            self._wait(message, work)
        return bucket.target

    def _wait(self, message: Message, work: Any) -> None:
        with self._named(message):
            work.wait(timedelta(seconds=self.timeout_s))

    def _named(self, message: Message) -> _Named:
        return _Named(self, message)

    # --- messages as bytes ----------------------------------------------------------------------------------------

    def _places(self, message: Message) -> Iterator[tuple[str, Box, torch.dtype, tuple[int, ...], int, int]]:
        """For each piece: parameter, box, dtype, shape, and its first and last byte in the message."""
        at = 0
        for piece in message.pieces:
            dtype = self.dtypes[piece.parameter]
            shape = tuple(stop - start for start, stop in piece.box)
            at += -at % dtype.itemsize  # a tensor can be seen in bytes only from a multiple of its element's size
            end = at + math.prod(shape) * dtype.itemsize
            yield piece.parameter, piece.box, dtype, shape, at, end
            at = end

    def _size(self, message: Message) -> int:
        end = 0
        for *_, end in self._places(message):  # noqa: B007
            pass
        return end + (_CHECKSUM_BYTES if self.checksum else 0)

    def _pack(self, message: Message, bucket: _Open) -> Tensor:
        buffer = torch.empty(self._size(message), dtype=torch.uint8, device=self.device)
        for name, box, dtype, shape, start, end in self._places(message):
            part = find(bucket.source, name, box)
            if part is None:
                part = find(bucket.target, name, box)  # passed on from where it came in an earlier wave
            if part is None:
                raise TransferError(f"{self.name}: rank {self.rank} is to send {name} {box} and does not hold it.")
            buffer[start:end].view(dtype).view(shape).copy_(part)
        if self.checksum:
            buffer[-_CHECKSUM_BYTES:] = _checksum(buffer[:-_CHECKSUM_BYTES])
        return buffer

    def _unpack(self, message: Message, buffer: Tensor, bucket: _Open) -> None:
        if self.checksum and not torch.equal(
            buffer[-_CHECKSUM_BYTES:], _checksum(buffer[:-_CHECKSUM_BYTES]).to(buffer.device)
        ):
            raise TransferError(f"{self._about(message)}: the checksum differs from what was sent.")
        for name, box, dtype, shape, start, end in self._places(message):
            part = find(bucket.target, name, box)
            if part is None:
                raise TransferError(f"{self.name}: rank {self.rank} got {name} {box} and has no place for it.")
            part.copy_(buffer[start:end].view(dtype).view(shape))

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


def _checksum(payload: Tensor) -> Tensor:
    """CRC-32, as 8 bytes."""
    value = zlib.crc32(payload.cpu().numpy().tobytes())
    return torch.tensor(list(value.to_bytes(_CHECKSUM_BYTES, "little")), dtype=torch.uint8)
