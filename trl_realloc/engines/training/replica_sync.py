"""Makes the copies of a role's model equal before training: copies parameters and persistent buffers from one rank.

Only tensors whose digests differ are sent. Parameters that are read later from a checkpoint's files are not sent, but
the ranks must have the same files.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base import EngineError
from ..device import group_device
from ..mesh_group import COLLECTIVE_BYTES, MeshGroup, in_buckets
from ..quantized import quantized_layers, stored
from ..weight_digest import digest
from .deepspeed_compat import is_partitioned
from .weight_source import source_of


if TYPE_CHECKING:
    from transformers import PreTrainedModel


_ByteRange = tuple[int, int, int]  # number of a tensor, first byte, end


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters, persistent buffers and scales of quantized weights that have memory in this process, by name.
    Parameters that DeepSpeed has partitioned are left out: their partitions come from one rank, so they are
    consistent."""
    parameters = dict(model.named_parameters())
    parameter_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    layers = dict(quantized_layers(model))
    buffers = {
        name: tensor
        for name, tensor in model.state_dict().items()
        # bitsandbytes makes some tensors of a quantized layer anew for its state dict
        if name not in parameter_names and torch.is_tensor(tensor) and not _is_of(name, layers)
    }
    scales = {f"{name}.{n}": t for name, layer in layers.items() for n, t in enumerate(stored(layer)) if n}
    named = {name: p.data for name, p in parameters.items() if not is_partitioned(p)} | buffers | scales
    return {name: tensor for name, tensor in named.items() if not tensor.is_meta and tensor.numel()}


def _is_of(name: str, layers: Mapping[str, nn.Module]) -> bool:
    """True if a tensor of a state dict is of one of these layers: `weight.absmax`, `SCB` and the like."""
    return name.rpartition(".")[0] in layers or name.partition(".weight.")[0] in layers


def equalize(model: nn.Module | None, group: MeshGroup, role: str) -> list[str]:
    """Overwrite every rank's model with that of the mesh's first rank, in place. Collective over the mesh.

    Args:
        model: full model on any device, or to be read from files; `None` on a rank without one. The first rank has one.
        role: name of the role in error messages.

    Returns:
        The names of the tensors that differed on some rank.

    Raises:
        EngineError: the models have different parameters, or are read from different files; on every rank.
    """
    if group.size == 1:
        return []
    named = model_tensors(model) if model is not None else {}
    local_header = [len(named), _structure(named), fingerprint(model)]
    header = _from_first(torch.tensor(local_header), group).tolist()
    differs = 0
    if model is not None and header != local_header:
        differs = 2 if header[2] != local_header[2] else 1
    if (differs := group.max(differs)) == 2:
        raise EngineError(_other_files(role))
    if differs:
        raise EngineError(
            f"the {role}'s model has other parameters, shapes or dtypes on one rank than on rank {group.ranks[0]}; "
            f"give every rank the same model."
        )
    if not header[0]:
        return []
    local_digests = torch.zeros((header[0], 2), dtype=torch.int64)
    for row, tensor in enumerate(named.values()):
        local_digests[row, 0], local_digests[row, 1] = _digest_on(tensor, group.device), tensor.nbytes
    digests = _from_first(local_digests, group)
    changed = (local_digests != digests).any(1) if model is not None else torch.zeros(header[0], dtype=torch.bool)
    counts = changed.long().to(group.device)
    group.sum_([counts])
    rows = counts.nonzero().flatten().tolist()
    names, tensors = list(named), list(named.values())
    sizes = digests[:, 1].tolist()
    changed_pieces = (piece for row in rows for piece in _in_pieces(row, sizes[row]))
    for pieces in in_buckets(changed_pieces, lambda piece: piece[2] - piece[1], COLLECTIVE_BYTES):
        flat = torch.empty(sum(stop - start for _, start, stop in pieces), dtype=torch.uint8, device=group.device)
        if group.is_leader:
            _pack(flat, tensors, pieces)
        dist.broadcast(flat, group.ranks[0], group=group.group)
        if model is not None and not group.is_leader:
            _unpack(flat, tensors, pieces)
    return [names[row] for row in rows] if names else []


def follow(
    model: PreTrainedModel,
    source: int,
    target: int,
    rank: int,
    control: dist.ProcessGroup | None,
    role: str,
    *,
    adapted: bool = False,
) -> None:
    """Copy the tensors of the source rank's model to those of the same name and shape in the target rank's. Only
    tensors that differ are sent, from rank to rank over the host. Digests are computed on each rank's accelerator.
    Called by these two ranks alone.

    Args:
        model: this rank's model.
        source, target, rank: global ranks; `rank` is this process.
        control: a gloo group with both ranks.
        role: name of the role in error messages.
        adapted: whether the source's model has adapters and the target's has none.

    Raises:
        EngineError: the models are read from different files; on both ranks.
    """
    device = group_device()
    if rank == target:
        tensors = model_tensors(model)
        described = {name: (tuple(t.shape), t.dtype, _digest_on(t, device)) for name, t in tensors.items()}
        dist.send_object_list([described, fingerprint(model)], source, group=control)
        answer: list[Any] = [None]
        dist.recv_object_list(answer, source, group=control)
        if answer[0] is None:
            raise EngineError(_other_files(role))
        for name in answer[0]:
            received = torch.empty(tensors[name].shape, dtype=tensors[name].dtype)
            for part in _slices(received):
                dist.recv(part, source, group=control)
            tensors[name].copy_(received)
        return
    request: list[Any] = [None, None]
    dist.recv_object_list(request, target, group=control)
    if request[1] != fingerprint(model):
        dist.send_object_list([None], target, group=control)
        raise EngineError(_other_files(role))
    named = base_names(model) if adapted else model_tensors(model)
    changed = {}
    for name, (shape, dtype, target_digest) in request[0].items():
        tensor = named.get(name)
        if (
            tensor is not None
            and tuple(tensor.shape) == shape
            and int(digest(tensor.to(device, dtype))) != target_digest
        ):
            changed[name] = dtype
    dist.send_object_list([list(changed)], target, group=control)
    for name, dtype in changed.items():
        for part in _slices(named[name].to("cpu", dtype).contiguous()):
            dist.send(part, target, group=control)


def fingerprint(model: PreTrainedModel) -> int:
    """Fingerprint of the files that the model's parameters will be read from; 0 for a model in memory and `None`."""
    source = source_of(model)
    return 0 if source is None else source.fingerprint


def _other_files(role: str) -> str:
    return (
        f"the {role}'s model is not the same on all ranks: they read different files under its name or path, or some "
        f"received a loaded model; put the same checkpoint on every host."
    )


def copy_tensors(source: Any, target: Any, *, adapted: bool = False) -> None:
    """Copy tensors like `follow`, between two models of this process."""
    named = base_names(source) if adapted else model_tensors(source)
    for name, tensor in model_tensors(target).items():
        original = named.get(name)
        if original is not None and original.shape == tensor.shape:
            tensor.copy_(original)


def base_names(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a model with adapters, under their names in the base model."""
    wrappers = re.compile(r"^base_model\.model\.|\.(base_layer|original_module|token_adapter)(?=\.)")
    return {wrappers.sub("", name): tensor for name, tensor in model_tensors(model).items()}


def _structure(named: Mapping[str, Tensor]) -> int:
    return zlib.crc32(repr([(name, tuple(t.shape), t.dtype) for name, t in named.items()]).encode())


def _from_first(numbers: Tensor, group: MeshGroup) -> Tensor:
    """The first rank's int64 tensor on every rank, on the CPU. All ranks pass a tensor of the same shape."""
    received = numbers.to(group.device)
    if not group.is_leader:
        received = torch.empty_like(received)
    dist.broadcast(received, group.ranks[0], group=group.group)
    return received.cpu()


def _digest_on(tensor: Tensor, device: torch.device) -> int:
    return int(digest(tensor.to(device)))


def _in_pieces(row: int, size: int) -> Iterator[_ByteRange]:
    """A tensor of `size` bytes in pieces of at most `COLLECTIVE_BYTES`."""
    for start in range(0, size, COLLECTIVE_BYTES):
        yield row, start, min(start + COLLECTIVE_BYTES, size)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _pack(flat: Tensor, tensors: Sequence[Tensor], pieces: Sequence[_ByteRange]) -> None:
    offset = 0
    for row, start, stop in pieces:
        flat[offset : offset + stop - start].copy_(_bytes(tensors[row])[start:stop])
        offset += stop - start


def _unpack(flat: Tensor, tensors: Sequence[Tensor], pieces: Sequence[_ByteRange]) -> None:
    offset = 0
    for row, start, stop in pieces:
        whole = _bytes(tensors[row])  # the tensor's memory, or a copy if it is not contiguous
        whole[start:stop].copy_(flat[offset : offset + stop - start])
        if not tensors[row].is_contiguous():
            tensors[row].copy_(whole.view(tensors[row].dtype).view(tensors[row].shape))
        offset += stop - start


def _slices(tensor: Tensor) -> Iterator[Tensor]:
    flat = _bytes(tensor)
    for start in range(0, flat.numel(), COLLECTIVE_BYTES):
        yield flat[start : start + COLLECTIVE_BYTES]
