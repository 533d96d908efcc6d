"""One rank's part of the training state of a role: float32 weights, optimizer state, step count.

Tensors are named by parameter and key and divided into boxes, so a state saved in one layout can be loaded in another.
Checkpoints write and read it (`trainer/checkpoint`), and `runtime/placement/run_state` moves it to another plan.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..realloc.layout import Box, flat_boxes, whole


MASTER = "master"  # key of a parameter's float32 weight; the other keys are those of the optimizer

Cells = list[tuple[Box, Tensor]]  # boxes of a tensor that a rank holds, each with a live tensor of the box's shape


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# The tensors of a whole training state, by parameter name and key.
StateSpecs = Mapping[str, Mapping[str, TensorSpec]]


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the training state.

    Args:
        spec: shape and dtype of the whole tensor.
        cells: this rank's boxes; may be empty. Several ranks may have the same box, but no two boxes of a tensor
            overlap otherwise.
    """

    spec: TensorSpec
    cells: Cells

    @staticmethod
    def of(tensor: Tensor, shape: tuple[int, ...] | None = None, box: Box | None = None) -> StateTensor:
        """A tensor that is the whole, or the `box` of a whole tensor of `shape`. It stays live."""
        shape, box = tuple(tensor.shape) if shape is None else shape, whole(tensor.shape) if box is None else box
        cells = [(box, tensor.detach())] if tensor.numel() else []
        return StateTensor(TensorSpec(shape, tensor.dtype), cells)


@dataclass
class TrainingState:
    """One rank's part of a role's training state.

    Args:
        version: number of optimizer steps.
        tensors: tensors by parameter name and key, for every trained parameter with a part on this rank.
        scalars: the rest of the optimizer's state by parameter name, such as `step`. For loading: an empty dict for
            each name that this rank needs.
        group_numbers: numbers that the optimizer keeps in its parameter groups, by group number, for every group with a
            part on this rank. For loading: an empty dict for every group.
        scaler: state of the float16 loss scaler; empty without one.
    """

    version: int = 0
    tensors: dict[str, dict[str, StateTensor]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    group_numbers: dict[int, dict[str, Any]] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)

    def cells(self) -> Iterator[tuple[str, str, Box, Tensor]]:
        """(parameter name, key, box, live tensor) of everything that this rank holds."""
        for name, tensors in self.tensors.items():
            for key, tensor in tensors.items():
                for box, cell in tensor.cells:
                    yield name, key, box, cell


def is_elementwise(value: object) -> bool:
    """True if a value of an optimizer's state is a tensor with dimensions, not a scalar."""
    return torch.is_tensor(value) and value.dim() > 0


def scalars_of(values: Mapping[str, object]) -> dict[str, Any]:
    """Copies of the scalars of a parameter's optimizer state, in host memory."""
    scalars = {key: value for key, value in values.items() if not is_elementwise(value)}
    return {k: v.detach().to("cpu", copy=True) if torch.is_tensor(v) else copy.deepcopy(v) for k, v in scalars.items()}


def loaded_scalars(optimizer: torch.optim.Optimizer, weight: Tensor, scalars: Mapping[str, object]) -> dict[str, Any]:
    """Loaded scalars on the devices that this optimizer expects. Torch's fused and capturable optimizers have the step
    count on the weight's device, all others in host memory."""
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    device = weight.device if on_device else torch.device("cpu")
    return {key: value.to(device, copy=True) if torch.is_tensor(value) else value for key, value in scalars.items()}


def room_for(spec: TensorSpec, current: object, weight: Tensor, full_shape: tuple[int, ...]) -> Tensor:
    """A tensor to load this rank's part of an optimizer's tensor into: `current` if it fits, otherwise new memory.

    A floating-point tensor of the parameter's shape is divided like the parameter and gets the dtype of the weight.
    Others, such as quantized moments, their scales, and factored moments, keep their dtype.

    Args:
        weight: this rank's part of the float32 weight.
        full_shape: shape of the whole parameter.
    """
    shape = tuple(weight.shape) if spec.shape == full_shape else spec.shape
    dtype = weight.dtype if spec.dtype.is_floating_point and spec.shape == full_shape else spec.dtype
    if torch.is_tensor(current) and (tuple(current.shape), current.dtype) == (shape, dtype):
        return current.detach()
    return torch.empty(shape, dtype=dtype, device=weight.device)


def flat_cells(shape: tuple[int, ...], start: int, flat: Tensor) -> Cells:
    """The boxes of a contiguous range of a flattened tensor, with views of its memory.

    Args:
        shape: shape of the whole tensor.
        start: the first element of the range.
        flat: (n,) the range; elements beyond the end of the tensor are padding.
    """
    boxes = flat_boxes(shape, start, min(start + flat.numel(), math.prod(shape)))
    sizes = [math.prod(high - low for low, high in box) for box in boxes]
    pieces = flat[: sum(sizes)].split(sizes) if sizes else ()
    return [(box, p.view([high - low for low, high in box])) for box, p in zip(boxes, pieces, strict=True)]
