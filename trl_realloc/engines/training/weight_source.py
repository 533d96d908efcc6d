"""Parameters that are read once an engine knows its rank's part of them. Until then the model is on the meta device and
notes their source (`WeightSource`).

An engine splits the model on the meta device; `fill` then allocates and reads the remaining parameters. Reading a
checkpoint's files is in `checkpoint_files`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...realloc.layout import Box
from ..base import EngineError
from .packed_attention import base_of
from .tensor_parallel import base_name, box_of


if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Writes a box of a parameter, by its name in the model, into a tensor of the box's shape.
Read = Callable[[str, Box, Tensor], None]

_SOURCE = "weight_source"  # attribute of a model whose parameters are on the meta device


class WeightSource(Protocol):
    """Source of the parameters of a model on the meta device.

    Attributes:
        fingerprint: positive int64 that identifies the parameters' values; equal on ranks that read equal files.
    """

    @property
    def fingerprint(self) -> int: ...

    def names(self) -> Sequence[str]:
        """The names in the model of the parameters that `reading` can read."""

    def reading(self) -> AbstractContextManager[Read]:
        """The context in which parameters are read."""


def source_of(model: PreTrainedModel) -> WeightSource | None:
    """Source of the parameters of a model that are not read yet; `None` for a model in memory."""
    source: WeightSource | None = getattr(base_of(model), _SOURCE, None)
    return source


def set_source(model: nn.Module, source: WeightSource) -> None:
    """Set the source of the model's parameters, also for copies of the model."""
    setattr(model, _SOURCE, source)


# --- the parameters of a model that are to be read --------------------------------------------------------------------


@dataclass
class Unread:
    """One parameter of a model on the meta device that a source has.

    Args:
        name: name in the source.
        parameter: parameter as the engine split it; may be a DTensor.
        places: modules that have it, with its name in each; several if it is tied.
    """

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def replace(self, memory: Tensor) -> nn.Parameter:
        """Put a parameter with this memory, (local shape), into the modules."""
        old = self.parameter
        if isinstance(old, DTensor):
            memory = DTensor.from_local(
                memory, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
            )
        new = nn.Parameter(memory, requires_grad=old.requires_grad)
        for module, leaf in self.places:
            module._parameters[leaf] = new
        return new


def unread(model: nn.Module, source: WeightSource) -> list[Unread]:
    """The parameters of a model that are on the meta device, each once, in the order of `named_parameters`.

    Raises:
        EngineError: the source lacks one.
    """
    stored = frozenset(source.names())
    items: dict[nn.Parameter, Unread] = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            name = base_name(f"{prefix}.{leaf}" if prefix else leaf)
            item = items.setdefault(parameter, Unread(name, parameter))
            item.places.append((module, leaf))
            if item.name not in stored:
                item.name = name
    lost = [item.name for item in items.values() if item.name not in stored]
    if lost:
        raise EngineError(f"the checkpoint has no values for {lost[0]} ({len(lost)} parameters are missing).")
    return list(items.values())


def fill(model: nn.Module, device: torch.device) -> None:
    """Allocate every parameter of the model that is on the meta device on `device`, and read it, or this rank's part of
    a DTensor. Does nothing for a model in memory. Parameters in memory and buffers stay where they are."""
    with reading(model) as (parameters, read), torch.no_grad():
        for item in parameters:
            box = box_of(item.parameter)
            memory = torch.empty([stop - start for start, stop in box], dtype=item.parameter.dtype, device=device)
            read(item.name, box, memory)
            item.replace(memory)


def to_device(module: nn.Module, device: torch.device) -> None:
    """Move a module's parameters and buffers that are in memory to a device. A split parameter is there already."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta and not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)


@contextlib.contextmanager
def reading(model: nn.Module) -> Iterator[tuple[list[Unread], Read]]:
    """The parameters of a model that are to be read, and the function that reads them. The model's source is removed at
    the end."""
    source = source_of(model)
    if source is None:
        yield [], _nothing
        return
    with source.reading() as read:
        yield unread(model, source), read
    delattr(base_of(model), _SOURCE)


def _nothing(name: str, box: Box, target: Tensor) -> None:
    """Reads nothing."""


@dataclass(frozen=True)
class Uninitialized:
    """The source of a model whose parameters are filled later, by a reallocation."""

    parameter_names: tuple[str, ...]
    fingerprint: int = 1

    def names(self) -> Sequence[str]:
        return self.parameter_names

    @contextlib.contextmanager
    def reading(self) -> Iterator[Read]:
        yield _nothing


# --- adapters on a model on the meta device ---------------------------------------------------------------------------


def stand_in(model: nn.Module) -> None:
    """Replace the parameters on the meta device by zeros in host memory that share one element, so that adapters are
    created on the CPU. `forget_stand_ins` undoes it."""
    source = source_of(model)
    for item in unread(model, source) if source is not None else ():
        item.replace(torch.zeros((), dtype=item.parameter.dtype).expand(item.parameter.shape))


def forget_stand_ins(model: nn.Module) -> None:
    """Put the parameters of the model's source back onto the meta device, and the copies of them that adapters train
    (`modules_to_save`)."""
    source = source_of(model)
    if source is None:
        return
    stored, meta = frozenset(source.names()), dict[nn.Parameter, nn.Parameter]()
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and base_name(f"{prefix}.{leaf}" if prefix else leaf) in stored:
                new = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                module._parameters[leaf] = meta.setdefault(parameter, new)
