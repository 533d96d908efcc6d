"""Makes the copies of a role's model equal: the parameters and persistent buffers of every rank become those of one.

Only tensors that differ travel; they are found by their digests. Whether copies stay equal while they are trained is
`runtime/replica_check`'s business.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base import EngineError
from ..buckets import in_buckets
from ..mesh_group import BUCKET_BYTES, MeshGroup


_ByteRange = tuple[int, int, int]  # number of a tensor, first byte, end
_SLICE = 1 << 19  # elements whose digest is taken at once: two working copies of 4 MiB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: Tensor) -> Tensor:
    """A 64-bit digest of a tensor's bits, 0-dimensional int64 on the tensor's device: a sum of the elements, each
    weighted by its place, modulo 2^64. Integer sums do not depend on their order, so equal bits give equal digests on
    every device."""
    flat = tensor.detach().reshape(-1)
    flat = flat.view(_INTEGERS[flat.element_size()])
    weights = _weights(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, part in enumerate(flat.split(_SLICE)):
        total += (part.long() * weights[: len(part)]).sum() * (2 * number + 1)
    return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """An odd number for each place of a slice; of the places' numbers every bit counts."""
    weights = torch.arange(1, _SLICE + 1, device=device) * -7046029254386353131  # splitmix64's constant, signed
    return (weights ^ (weights >> 29)) | 1


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers that have memory in this process, by name. A parameter that DeepSpeed has
    partitioned already is left out: its partitions come from one rank."""
    parameters = dict(model.named_parameters())
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: t for name, t in model.state_dict().items() if name not in known and torch.is_tensor(t)}
    named = {name: p.data for name, p in parameters.items() if not hasattr(p, "ds_id")} | buffers
    return {name: tensor for name, tensor in named.items() if not tensor.is_meta and tensor.numel()}


def equalize(model: nn.Module | None, group: MeshGroup, role: str) -> list[str]:
    """Make every rank's model that of the mesh's first rank, in place. Collective over the mesh.

    Args:
        model: whole, on any device; `None` on a rank that has none (the first rank has one).
        role: for the message.

    Returns:
        The names of the tensors that differed on some rank.

    Raises:
        EngineError: the models have different parameters; on every rank.
    """
    if group.size == 1:
        return []
    named = model_tensors(model) if model is not None else {}
    header = _from_first(torch.tensor([len(named), _structure(named)]), group).tolist()
    differs = model is not None and header != [len(named), _structure(named)]
    if group.max(int(differs)):
        raise EngineError(
            f"the {role}'s model has other parameters, shapes or dtypes on one rank than on rank {group.ranks[0]}; "
            f"give every rank the same model."
        )
    if not header[0]:
        return []
    mine = torch.zeros((header[0], 2), dtype=torch.int64)
    for row, tensor in enumerate(named.values()):
        mine[row, 0], mine[row, 1] = _digest_on(tensor, group.device), tensor.nbytes
    theirs = _from_first(mine, group)
    changed = (mine != theirs).any(1) if model is not None else torch.zeros(header[0], dtype=torch.bool)
    counts = changed.long().to(group.device)
    group.sum_([counts])
    rows = counts.nonzero().flatten().tolist()
    names, own = list(named), list(named.values())
    sizes = theirs[:, 1].tolist()
    changed_pieces = (piece for row in rows for piece in _in_pieces(row, sizes[row]))
    for pieces in in_buckets(changed_pieces, lambda piece: piece[2] - piece[1], BUCKET_BYTES):
        flat = torch.empty(sum(stop - start for _, start, stop in pieces), dtype=torch.uint8, device=group.device)
        if group.is_leader:
            _pack(flat, own, pieces)
        dist.broadcast(flat, group.ranks[0], group=group.group)
        if model is not None and not group.is_leader:
            _unpack(flat, own, pieces)
    return [names[row] for row in rows] if names else []


def follow(model: Any, source: int, target: int, rank: int, control: Any, *, adapted: bool = False) -> None:
    """Make the tensors of the target rank's model those of the source rank's, where both have one of that name and
    shape; point to point, on the host, and only what differs. The other ranks do not call this.

    Args:
        model: this rank's: the source's or the target's.
        control: a gloo group that holds both ranks.
        adapted: the source's model has adapters, and the target's is its base.
    """
    if rank == target:
        held = model_tensors(model)
        wanted = {name: (tuple(t.shape), t.dtype, int(digest(t.cpu()))) for name, t in held.items()}
        dist.send_object_list([wanted], source, group=control)
        answer: list[Any] = [None]
        dist.recv_object_list(answer, source, group=control)
        for name in answer[0]:
            received = torch.empty(held[name].shape, dtype=held[name].dtype)
            for part in _slices(received):
                dist.recv(part, source, group=control)
            held[name].copy_(received)
        return
    box: list[Any] = [None]
    dist.recv_object_list(box, target, group=control)
    named = base_names(model) if adapted else model_tensors(model)
    changed = {}
    for name, (shape, dtype, known) in box[0].items():
        own = named.get(name)
        if own is not None and tuple(own.shape) == shape and int(digest(own.to("cpu", dtype))) != known:
            changed[name] = dtype
    dist.send_object_list([list(changed)], target, group=control)
    for name, dtype in changed.items():
        for part in _slices(named[name].to("cpu", dtype).contiguous()):
            dist.send(part, target, group=control)


def copy_tensors(source: Any, target: Any, *, adapted: bool = False) -> None:
    """As `follow`, within one process."""
    named = base_names(source) if adapted else model_tensors(source)
    for name, tensor in model_tensors(target).items():
        own = named.get(name)
        if own is not None and own.shape == tensor.shape:
            tensor.copy_(own)


def base_names(model: Any) -> dict[str, Tensor]:
    """The tensors of a model with adapters under the names that they have in its base."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", ""): tensor
        for name, tensor in model_tensors(model).items()
    }


def _structure(named: Mapping[str, Tensor]) -> int:
    return zlib.crc32(repr([(name, tuple(t.shape), t.dtype) for name, t in named.items()]).encode())


def _from_first(numbers: Tensor, group: MeshGroup) -> Tensor:
    """The first rank's int64 tensor on every rank, on the host; all know its shape."""
    box = numbers.to(group.device)
    if not group.is_leader:
        box = torch.empty_like(box)
    dist.broadcast(box, group.ranks[0], group=group.group)
    return box.cpu()


def _digest_on(tensor: Tensor, device: torch.device) -> int:
    """A tensor's digest, computed where the mesh computes."""
    return int(digest(tensor.to(device)))


def _in_pieces(row: int, size: int) -> Iterator[_ByteRange]:
    """A tensor of `size` bytes in pieces of at most `BUCKET_BYTES`."""
    for start in range(0, size, BUCKET_BYTES):
        yield row, start, min(start + BUCKET_BYTES, size)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _pack(flat: Tensor, tensors: Sequence[Tensor], pieces: Sequence[_ByteRange]) -> None:
    at = 0
    for row, start, stop in pieces:
        flat[at : at + stop - start].copy_(_bytes(tensors[row])[start:stop])
        at += stop - start


def _unpack(flat: Tensor, tensors: Sequence[Tensor], pieces: Sequence[_ByteRange]) -> None:
    at = 0
    for row, start, stop in pieces:
        whole = _bytes(tensors[row])  # the tensor's memory, or a copy where that is not contiguous
        whole[start:stop].copy_(flat[at : at + stop - start])
        if not tensors[row].is_contiguous():
            tensors[row].copy_(whole.view(tensors[row].dtype).view(tensors[row].shape))
        at += stop - start


def _slices(tensor: Tensor) -> Iterator[Tensor]:
    flat = _bytes(tensor)
    for start in range(0, flat.numel(), BUCKET_BYTES):
        yield flat[start : start + BUCKET_BYTES]
