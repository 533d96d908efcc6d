"""Which device holds which part of which parameter, as boxes; from a model's spec and a strategy alone.

Pure: no process group, so that a layout of 1,024 devices is made on a laptop. What moves between two layouts is the
schedule's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ..common.errors import PlanError
from ..plan.assignment import Assignment
from ..plan.cluster import DeviceMesh
from ..plan.model_spec import Cut, ModelSpec, ParameterSpec


# Half-open intervals of indices, one for each dimension of the parameter; empty for a scalar.
Box = tuple[tuple[int, int], ...]

VOCABULARY_PADDING = 64  # vLLM rounds a vocabulary up to a multiple of this before it cuts it


@dataclass(frozen=True)
class Placed:
    """A box and all devices that hold it, ascending."""

    box: Box
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """For every parameter boxes that do not overlap and cover it, each with its holders. Parameters that lie alike
    share one tuple, by which the schedule knows them."""

    spec: ModelSpec
    parameters: Mapping[str, tuple[Placed, ...]]

    @cached_property
    def devices(self) -> frozenset[int]:
        return frozenset(d for placed in set(map(id, self.parameters.values())) for d in self._devices_of[placed])

    @cached_property
    def _devices_of(self) -> Mapping[int, frozenset[int]]:
        alike = {id(placed): placed for placed in self.parameters.values()}
        return {key: frozenset(d for cell in placed for d in cell.devices) for key, placed in alike.items()}

    def parts(self, device: int) -> dict[str, tuple[Box, ...]]:
        """What one device holds."""
        held = {
            name: tuple(cell.box for cell in placed if device in cell.devices)
            for name, placed in self.parameters.items()
            if device in self._devices_of[id(placed)]
        }
        return {name: boxes for name, boxes in held.items() if boxes}

    def bytes(self, device: int) -> int:
        elements = sum(volume(box) for boxes in self.parts(device).values() for box in boxes)
        return elements * self.spec.bytes_per_element

    @staticmethod
    def of_parts(spec: ModelSpec, held: Mapping[int, Mapping[str, Sequence[Box]]]) -> Layout:
        """From what each device says it holds."""
        known: dict[tuple[Placed, ...], tuple[Placed, ...]] = {}
        parameters = {}
        for parameter in spec.parameters:
            holders: dict[Box, list[int]] = {}
            for device in sorted(held):
                for box in held[device].get(parameter.name, ()):
                    holders.setdefault(box, []).append(device)
            placed = tuple(Placed(box, tuple(devices)) for box, devices in sorted(holders.items()))
            parameters[parameter.name] = known.setdefault(placed, placed)
        return Layout(spec, parameters)

    def check_fits(self, bytes_per_device: int) -> None:
        """Raises:
        PlanError: a device would hold more than that.
        """
        fullest = max(self.devices, key=self.bytes)
        if self.bytes(fullest) > bytes_per_device:
            raise PlanError(
                f"the parameters take {self.bytes(fullest) / 1e9:.1f} GB of device {fullest}, which has "
                f"{bytes_per_device / 1e9:.1f} GB; use more devices, a larger tp or pp, or zero_stage 3."
            )


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def layout_of(assignment: Assignment, spec: ModelSpec) -> Layout:
    """The layout of a call's parameters under its assignment. A vLLM engine's is what it is fed with: full tensors, on
    the first device of each tensor group.

    Raises:
        PlanError: the model cannot be split so.
    """
    mesh, strategy = assignment.mesh, assignment.strategy
    match assignment.engine:
        case "megatron":
            return megatron_layout(spec, mesh, strategy.tp, strategy.pp)
        case "vllm":
            return owners_layout(spec, mesh, strategy.tp)
        case "zero" if strategy.zero_stage == 3:
            return zero3_layout(spec, mesh)
        case _:
            return replicated_layout(spec, mesh)


def replicated_layout(spec: ModelSpec, mesh: DeviceMesh) -> Layout:
    """Everything on every device: data parallelism and ZeRO up to stage 2."""
    return _on(spec, tuple(mesh.devices))


def owners_layout(spec: ModelSpec, mesh: DeviceMesh, tp: int) -> Layout:
    """Everything on the first device of each group of `tp`: where a generation engine takes full tensors."""
    return _on(spec, tuple(mesh.devices)[::tp])


def _on(spec: ModelSpec, devices: tuple[int, ...]) -> Layout:
    alike = lru_cache(None)(lambda shape: (Placed(whole(shape), devices),))
    return Layout(spec, {p.name: alike(p.shape) for p in spec.parameters})


def zero3_layout(spec: ModelSpec, mesh: DeviceMesh) -> Layout:
    """Each parameter flattened, padded to a multiple of the mesh's size and dealt out in equal stretches, as
    DeepSpeed's stage 3 does; the padding is nobody's."""

    @lru_cache(None)
    def dealt(shape: tuple[int, ...]) -> tuple[Placed, ...]:
        elements = math.prod(shape)
        each = -(-elements // mesh.size)
        return tuple(
            Placed(box, (device,))
            for place, device in enumerate(mesh.devices)
            for box in flat_boxes(shape, place * each, min((place + 1) * each, elements))
        )

    return Layout(spec, {p.name: dealt(p.shape) for p in spec.parameters})


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The elements start … stop - 1 of a flattened parameter as boxes in their order: at most three of a matrix (the
    end of a row, whole rows, the beginning of a row), 2d - 1 in d dimensions."""
    if start >= stop:
        return ()
    if not shape:
        return ((),)
    if len(shape) == 1:
        return (((start, stop),),)
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows

    def inside(at: int, low: int, high: int) -> Iterator[Box]:
        for box in flat_boxes(shape[1:], low - at * row, high - at * row):
            yield ((at, at + 1), *box)

    if first > last:  # within one row
        return tuple(inside(last, start, stop))
    boxes: list[Box] = []
    if start < first * row:
        boxes += inside(first - 1, start, first * row)
    if first < last:
        boxes.append(((first, last), *whole(shape[1:])))
    if last * row < stop:
        boxes += inside(last, last * row, stop)
    return tuple(boxes)


def megatron_layout(spec: ModelSpec, mesh: DeviceMesh, tp: int, pp: int) -> Layout:
    """Tensor groups inside pipelines inside replicas: device `(d * pp + p) * tp + t` of the mesh has tensor rank t of
    stage p of replica d.

    Raises:
        PlanError: the model cannot be split so, or the mesh is no multiple of tp x pp.
    """
    spec.check_strategy(tp, pp)
    if mesh.size % (tp * pp):
        raise PlanError(f"tp {tp} x pp {pp} does not divide the {mesh.size} devices of mesh {mesh}.")

    def holders(stages: tuple[int, ...], tensor: int) -> list[int]:
        return [mesh.first + (d * pp + p) * tp + tensor for d in range(mesh.size // (tp * pp)) for p in stages]

    return _cut_layout(spec, tp, lambda parameter: spec.stages_of(parameter, pp), holders, lambda parameter: chunks)


def vllm_layout(spec: ModelSpec, mesh: DeviceMesh, tp: int) -> Layout:
    """The slices that vLLM engines of `tp` devices each compute with: key/value heads are repeated where tp exceeds
    them, the vocabulary is padded before it is cut.

    Raises:
        PlanError: tp divides neither the heads nor is divided by them as vLLM demands.
    """
    if tp > 1 and not (spec.heads and spec.generates_under(tp)):
        raise PlanError(f"vLLM cannot share {spec.heads} heads and {spec.kv_heads} key/value heads over tp {tp}.")

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

    return _cut_layout(spec, tp, lambda parameter: (0,), holders, slices)


def _cut_layout(
    spec: ModelSpec,
    tp: int,
    stages_of: Callable[[ParameterSpec], tuple[int, ...]],
    holders: Callable[[tuple[int, ...], int], list[int]],
    slices: Callable[[ParameterSpec], Callable[[int, int, int], list[tuple[int, int]]]],
) -> Layout:
    @lru_cache(None)
    def placed(
        shape: tuple[int, ...],
        cut: Cut | None,
        stages: tuple[int, ...],
        into: Callable[[int, int, int], list[tuple[int, int]]],
    ) -> tuple[Placed, ...]:
        boxes: dict[Box, set[int]] = {}
        for tensor in range(tp):
            box = whole(shape)
            if cut is not None:
                low, high = into(shape[cut.dim], tp, cut.unit)[tensor]
                box = (*box[: cut.dim], (low, high), *box[cut.dim + 1 :])
            if volume(box):
                boxes.setdefault(box, set()).update(holders(stages, tensor))
        return tuple(Placed(box, tuple(sorted(devices))) for box, devices in boxes.items())

    return Layout(spec, {p.name: placed(p.shape, p.cut, stages_of(p), slices(p)) for p in spec.parameters})


def chunks(size: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Parts of equal length but the last ones, which are shorter or empty: what DTensor's `Shard` and `torch.chunk`
    make. `unit` divides them where the strategy is legal."""
    each = -(-size // parts)
    return [(min(part * each, size), min((part + 1) * each, size)) for part in range(parts)]


def even_chunks(size: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    return chunks(size, parts)


def padded_chunks(size: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """A vocabulary's, in vLLM: of the padded size, so that the last parts are short."""
    each = -(-size // VOCABULARY_PADDING) * VOCABULARY_PADDING // parts
    return [(min(part * each, size), min((part + 1) * each, size)) for part in range(parts)]


def repeated_chunks(size: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Key/value heads, in vLLM: each repeated on so many neighbours where there are more parts than heads."""
    heads = size // unit
    if parts <= heads:
        return chunks(size, parts)
    return [(part * heads // parts * unit, (part * heads // parts + 1) * unit) for part in range(parts)]
