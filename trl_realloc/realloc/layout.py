"""Parts of parameters on every device, as boxes, computed from a model's spec and a parallel strategy.

Pure: no process group, so a layout of 1,024 devices can be made on a laptop. Transfers between layouts are in
`schedule`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ..common.errors import PlanError
from ..plan.assignment import Assignment
from ..plan.cluster import DeviceMesh
from ..plan.model_spec import VOCABULARY_PADDING, ModelSpec
from ..plan.parameter_spec import Cut, ParameterSpec


# One half-open interval of indices for each dimension of the parameter; empty for a scalar.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PlacedBox:
    """A box of a parameter, and the devices that hold it in ascending order."""

    box: Box
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The parts of every parameter of a model and the devices that hold them.

    Args:
        parameters: boxes that cover each parameter without overlap. Parameters with equal placements share one tuple
            object, because the schedule groups them by its identity.
    """

    spec: ModelSpec
    parameters: Mapping[str, tuple[PlacedBox, ...]]

    @cached_property
    def devices(self) -> frozenset[int]:
        """All devices that hold parts."""
        return frozenset(d for key in set(map(id, self.parameters.values())) for d in self._devices_of[key])

    @cached_property
    def _devices_of(self) -> Mapping[int, frozenset[int]]:
        """The devices of each placement, by the identity of its tuple."""
        by_id = {id(boxes): boxes for boxes in self.parameters.values()}
        return {key: frozenset(d for placed in boxes for d in placed.devices) for key, boxes in by_id.items()}

    def parts(self, device: int) -> dict[str, tuple[Box, ...]]:
        """A device's boxes by parameter name."""
        return {
            name: tuple(placed.box for placed in boxes if device in placed.devices)
            for name, boxes in self.parameters.items()
            if device in self._devices_of[id(boxes)]
        }

    def bytes(self, device: int) -> int:
        """Bytes of a device's boxes."""
        elements = sum(volume(box) for boxes in self.parts(device).values() for box in boxes)
        return elements * self.spec.bytes_per_element

    @staticmethod
    def of_parts(spec: ModelSpec, parts: Mapping[int, Mapping[str, Sequence[Box]]]) -> Layout:
        """The layout in which each device holds the given boxes.

        Args:
            parts: device -> parameter name -> boxes.
        """
        shared: dict[tuple[PlacedBox, ...], tuple[PlacedBox, ...]] = {}
        parameters = {}
        for parameter in spec.parameters:
            holders: dict[Box, list[int]] = {}
            for device in sorted(parts):
                for box in parts[device].get(parameter.name, ()):
                    holders.setdefault(box, []).append(device)
            placed = tuple(PlacedBox(box, tuple(devices)) for box, devices in sorted(holders.items()))
            parameters[parameter.name] = shared.setdefault(placed, placed)
        return Layout(spec, parameters)


def volume(box: Box) -> int:
    """Number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole parameter."""
    return tuple((0, size) for size in shape)


def split_box(box: Box, most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements that cover a box without overlap, in ascending order. They are cut along the
    first dimensions; equal boxes give equal parts."""
    if volume(box) <= most:
        if volume(box):
            yield box
        return
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    low, high = box[dim]
    step = max(1, most // (volume(box) // (high - low)))
    for start in range(low, high, step):
        yield from split_box((*box[:dim], (start, min(start + step, high)), *box[dim + 1 :]), most)


MAX_KEEPERS = 64  # maximum number of devices that divide a box; each piece is sent to all holders of the box


def held_once(parts: Mapping[int, Mapping[str, Sequence[Box]]]) -> dict[int, dict[str, list[Box]]]:
    """The parts that each device keeps so that every element is kept once. A box on several devices is divided among
    at most `MAX_KEEPERS` of them, as evenly as whole rows allow.

    Args:
        parts: device -> parameter name -> boxes. Boxes of a parameter are equal or do not overlap.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    for device in sorted(parts):
        for name, boxes in parts[device].items():
            for box in boxes:
                holders.setdefault((name, box), []).append(device)
    loads = dict.fromkeys(parts, 0)
    assigned: dict[int, dict[str, list[Box]]] = {device: {} for device in parts}
    # boxes with one holder first, because the others can balance the loads afterwards
    for (name, box), devices in sorted(holders.items(), key=lambda item: len(item[1])):
        keepers = devices
        if len(devices) > MAX_KEEPERS:
            keepers = heapq.nsmallest(MAX_KEEPERS, devices, key=loads.__getitem__)
        for part in split_box(box, max(1, -(-volume(box) // len(keepers)))):
            device = min(keepers, key=loads.__getitem__)
            loads[device] += volume(part)
            assigned[device].setdefault(name, []).append(part)
    return assigned


def layout_of(assignment: Assignment, spec: ModelSpec, *, is_reversed: bool = False) -> Layout:
    """The layout of a call's parameters under its assignment.

    The layout of a vLLM engine is that of its inputs: full tensors on the first device of each tensor group. The slices
    in the engine are in `vllm_layout`.

    Args:
        is_reversed: `ExecutionPlan.is_reversed` of the call.

    Raises:
        PlanError: the model cannot be split by the assignment's tp or pp.
    """
    mesh, strategy = assignment.mesh, assignment.strategy
    match assignment.engine:
        case "megatron":
            return megatron_layout(spec, mesh, strategy.tp, strategy.pp, is_reversed=is_reversed)
        case "vllm":
            return owners_layout(spec, mesh, strategy.tp)
        case "zero" if strategy.zero_stage == 3:
            return zero3_layout(spec, mesh)
        case _:
            return replicated_layout(spec, mesh)


def replicated_layout(spec: ModelSpec, mesh: DeviceMesh) -> Layout:
    """Full parameters on every device: data parallelism, and ZeRO stages 0 to 2."""
    return _replicate(spec, tuple(mesh.devices))


def owners_layout(spec: ModelSpec, mesh: DeviceMesh, tp: int) -> Layout:
    """Full parameters on the first device of each group of `tp`, which feeds a generation engine."""
    return _replicate(spec, tuple(mesh.devices)[::tp])


def _replicate(spec: ModelSpec, devices: tuple[int, ...]) -> Layout:
    placement_of = lru_cache(None)(lambda shape: (PlacedBox(whole(shape), devices),))
    return Layout(spec, {p.name: placement_of(p.shape) for p in spec.parameters})


def zero3_layout(spec: ModelSpec, mesh: DeviceMesh) -> Layout:
    """DeepSpeed's stage 3: each parameter is flattened, padded to a multiple of the mesh's size and cut into equal
    ranges, one per device. Boxes do not contain the padding."""

    @lru_cache(None)
    def partition(shape: tuple[int, ...]) -> tuple[PlacedBox, ...]:
        elements = math.prod(shape)
        length = -(-elements // mesh.size)
        return tuple(
            PlacedBox(box, (device,))
            for index, device in enumerate(mesh.devices)
            for box in flat_boxes(shape, index * length, min((index + 1) * length, elements))
        )

    return Layout(spec, {p.name: partition(p.shape) for p in spec.parameters})


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The elements start … stop - 1 of a flattened parameter as boxes, in ascending order: for a matrix at most three
    (the end of a row, whole rows, the beginning of a row), for d dimensions at most 2d - 1."""
    if start >= stop:
        return ()
    if not shape:
        return ((),)
    if len(shape) == 1:
        return (((start, stop),),)
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows

    def within_row(index: int, low: int, high: int) -> Iterator[Box]:
        for box in flat_boxes(shape[1:], low - index * row, high - index * row):
            yield ((index, index + 1), *box)

    if first > last:  # within one row
        return tuple(within_row(last, start, stop))
    boxes: list[Box] = []
    if start < first * row:
        boxes += within_row(first - 1, start, first * row)
    if first < last:
        boxes.append(((first, last), *whole(shape[1:])))
    if last * row < stop:
        boxes += within_row(last, last * row, stop)
    return tuple(boxes)


def megatron_layout(spec: ModelSpec, mesh: DeviceMesh, tp: int, pp: int, *, is_reversed: bool = False) -> Layout:
    """Tensor and pipeline parallelism: device `(d * pp + p) * tp + t` of the mesh has tensor rank t of stage p of
    data-parallel replica d.

    Args:
        is_reversed: the device has stage `pp - 1 - p` instead.

    Raises:
        PlanError: the model cannot be split by tp or pp, or the mesh's size is not a multiple of tp x pp.
    """
    spec.check_strategy(tp, pp)
    if mesh.size % (tp * pp):
        raise PlanError(f"tp {tp} x pp {pp} does not divide the {mesh.size} devices of mesh {mesh}.")

    def holders(stages: tuple[int, ...], tensor: int) -> list[int]:
        places = [pp - 1 - stage if is_reversed else stage for stage in stages]
        return [mesh.first + (d * pp + p) * tp + tensor for d in range(mesh.size // (tp * pp)) for p in places]

    return _cut_layout(spec, tp, lambda parameter: spec.stages_of(parameter, pp), holders, lambda parameter: chunks)


def vllm_layout(spec: ModelSpec, mesh: DeviceMesh, tp: int) -> Layout:
    """The parameter slices in vLLM engines of `tp` devices each. Key/value heads are repeated if there are fewer than
    tp, the vocabulary is padded before it is cut, and each expert's channels are divided.

    Raises:
        PlanError: vLLM cannot divide the model by tp.
    """
    if tp > 1 and not spec.heads:
        raise PlanError(f"vLLM's division of a model over tp {tp} is not known for a model with parameter shapes only.")
    spec.check_generation(tp)

    def holders(_: tuple[int, ...], tensor: int) -> list[int]:
        return list(mesh.devices)[tensor::tp]

    def slices(parameter: ParameterSpec) -> Callable[[int, int, int], list[tuple[int, int]]]:
        if parameter.layer in (-1, spec.layers):
            return padded_chunks
        if parameter.cut is not None and parameter.shape[parameter.cut.dim] == spec.kv_heads * spec.head_dim != (
            spec.heads * spec.head_dim
        ):
            return repeated_chunks
        return even_chunks

    return _cut_layout(spec, tp, lambda parameter: (0,), holders, slices, _of_channels)


def _of_channels(parameter: ParameterSpec) -> tuple[Cut | None, int]:
    """vLLM's cut of a parameter: that of the spec; for experts by their channels, of gate and up apart."""
    if not parameter.is_of_experts:
        return parameter.cut, 1
    return (Cut(1), 2) if parameter.name.endswith("gate_up_proj") else (Cut(2), 1)


def _cut_layout(
    spec: ModelSpec,
    tp: int,
    stages_of: Callable[[ParameterSpec], tuple[int, ...]],
    holders: Callable[[tuple[int, ...], int], list[int]],
    slices: Callable[[ParameterSpec], Callable[[int, int, int], list[tuple[int, int]]]],
    cut_of: Callable[[ParameterSpec], tuple[Cut | None, int]] = lambda parameter: (parameter.cut, 1),
) -> Layout:
    """A layout in which each of `tp` tensor ranks has a slice of the parameters with a cut, and the others in full.

    Args:
        stages_of: returns the pipeline stages of a parameter.
        holders: returns the devices of a tensor rank in these stages.
        slices: returns the function (size, parts, unit) -> intervals that cuts a parameter's dimension.
        cut_of: returns the cut of a parameter, and the number of equal blocks of the dimension that are each cut.
    """

    @lru_cache(None)
    def placement(
        shape: tuple[int, ...],
        cut: Cut | None,
        blocks: int,
        stages: tuple[int, ...],
        cut_into: Callable[[int, int, int], list[tuple[int, int]]],
    ) -> tuple[PlacedBox, ...]:
        boxes: dict[Box, set[int]] = {}
        for tensor, block in itertools.product(range(tp), range(blocks)):
            box = whole(shape)
            if cut is not None:
                size = shape[cut.dim] // blocks
                low, high = (block * size + index for index in cut_into(size, tp, cut.unit)[tensor])
                box = (*box[: cut.dim], (low, high), *box[cut.dim + 1 :])
            if volume(box):
                boxes.setdefault(box, set()).update(holders(stages, tensor))
        return tuple(PlacedBox(box, tuple(sorted(devices))) for box, devices in boxes.items())

    return Layout(spec, {p.name: placement(p.shape, *cut_of(p), stages_of(p), slices(p)) for p in spec.parameters})


def chunks(size: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Intervals as in DTensor's `Shard` and `torch.chunk`: of equal length, except that the last ones may be shorter or
    empty. In a valid strategy `unit` divides their length."""
    length = -(-size // parts)
    return [(min(part * length, size), min((part + 1) * length, size)) for part in range(parts)]


def even_chunks(size: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """`chunks` without a condition on `unit`."""
    return chunks(size, parts)


def padded_chunks(size: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """vLLM's intervals of a vocabulary: the padded size is divided, so the last intervals are shorter."""
    length = -(-size // VOCABULARY_PADDING) * VOCABULARY_PADDING // parts
    return [(min(part * length, size), min((part + 1) * length, size)) for part in range(parts)]


def repeated_chunks(size: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """vLLM's intervals of key/value heads of `unit` indices. With more parts than heads, neighbouring parts share a
    head."""
    heads = size // unit
    if parts <= heads:
        return chunks(size, parts)
    return [(part * heads // parts * unit, (part * heads // parts + 1) * unit) for part in range(parts)]
