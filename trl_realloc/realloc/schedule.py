"""`TransferSchedule`: which device sends which parts to which device, to change a layout of parameters into another.

No device receives a part that it holds. A part that several devices of a node lack is sent to the node once, and from
there to the others. The sent bytes are balanced over all devices that can send. A device that has received a part may
forward it in a later wave. `transfer` sends the messages.

The method is ReaL's (section 5.2: common layers and slices, one sender per destination node) without its condition
that one tensor degree divides the other, and with relays. Parameters with equal placements are scheduled together, as
arrays over (parameter, receiver), so 70 billion parameters on 1,024 devices take about a second, or five seconds from
ZeRO 3, where each device gets a piece from every other one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..plan.cluster import Cluster
from ..plan.model_spec import ModelSpec
from .layout import Box, Layout, PlacedBox, volume
from .senders import assign_senders


ENTRY_S, BOX_S = 60e-9, 250e-6  # seconds of `make_schedule` per entry and per box, measured on one core
MAX_LOAD = 1.02  # senders above this multiple of the mean load hand sends over to relays


@dataclass(frozen=True)
class ParameterBox:
    """A box of a parameter, by the parameter's name."""

    parameter: str
    box: Box


@dataclass(frozen=True)
class Message:
    """Parts that one device sends to another in one wave of one bucket."""

    source: int
    target: int
    wave: int
    pieces: tuple[ParameterBox, ...]
    bytes: int


@dataclass(frozen=True)
class TransferStep:
    """One device's messages of one wave of one bucket. A device sends only parts that it held at the start, or received
    in an earlier wave of the bucket."""

    bucket: int
    wave: int
    parameters: tuple[str, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass
class _CommonBox:
    """A box that neither layout cuts further, for all parameters with the same placements.

    Args:
        indices: (m,) the parameters' positions in the spec.
        bytes: bytes of the box of one parameter.
        holders: devices that hold the box at the start.
        receivers: (n,) devices that lack it.
        kept: devices that hold it in both layouts.
        sources: (m, n) int32, the device that sends each parameter's box to each receiver.
        waves: (m, n) int8, the wave of each of these sends.
    """

    box: Box
    indices: np.ndarray
    bytes: int
    holders: np.ndarray
    receivers: np.ndarray
    kept: frozenset[int]
    sources: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    waves: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int8))


class TransferSchedule:
    """Made by `make_schedule`. Equal layouts give the same schedule on every device.

    Args:
        sent: (devices,) bytes that each device of the cluster sends.
    """

    def __init__(
        self, cluster: Cluster, source: Layout, target: Layout, boxes: list[_CommonBox], sent: np.ndarray
    ) -> None:
        self.cluster, self.source, self.target = cluster, source, target
        self.target_devices = target.devices
        self._boxes, self._sent = boxes, sent
        self._names = [parameter.name for parameter in target.spec.parameters]

    @property
    def spec(self) -> ModelSpec:
        return self.target.spec

    def sent(self, device: int) -> int:
        """Bytes sent by a device."""
        return int(self._sent[device])

    @property
    def entries(self) -> int:
        """Number of pairs (box of a parameter, receiver), which `schedule_entries` estimates."""
        return sum(common.sources.size for common in self._boxes)

    @property
    def waves(self) -> int:
        """Largest number of waves of a bucket, over all devices."""
        return 1 + max((int(common.waves.max(initial=0)) for common in self._boxes), default=0)

    def traffic(self) -> tuple[np.ndarray, np.ndarray]:
        """(inside nodes, between nodes): each (2, devices) float64, bytes sent and received by every device."""
        per_node, size = self.cluster.devices_per_node, self.cluster.size
        traffic = np.zeros((2, 2, size))
        for common in self._boxes:
            receivers = np.broadcast_to(common.receivers, common.sources.shape)
            for level, across in enumerate((False, True)):
                selected = ((common.sources // per_node) != (receivers // per_node)) == across
                for direction, devices in enumerate((common.sources, receivers)):
                    traffic[level, direction] += np.bincount(devices[selected], minlength=size) * common.bytes
        return traffic[0], traffic[1]

    def kept(self, device: int) -> tuple[ParameterBox, ...]:
        """The parts that the device holds in both layouts."""
        return tuple(
            ParameterBox(self._names[index], common.box)
            for common in self._boxes
            if device in common.kept
            for index in common.indices
        )

    def buckets(self, bucket_bytes: int) -> tuple[tuple[str, ...], ...]:
        """Groups of consecutive parameters, the same on every device. No device has more than `bucket_bytes` of a group
        in the target layout, unless the group is a single larger parameter."""
        # The limit holds on every device, so the size of a bucket is an array over devices, not a number as in
        # `engines/mesh_group`.
        per_device = np.zeros((len(self._names), self.cluster.size))
        for common in self._boxes:
            holders = [*common.receivers.tolist(), *common.kept]
            per_device[np.ix_(common.indices, np.asarray(holders, int))] += common.bytes
        buckets: list[tuple[str, ...]] = []
        bucket: list[str] = []
        load = np.zeros(self.cluster.size)
        for name, size in zip(self._names, per_device, strict=True):
            if bucket and (load + size).max(initial=0) > bucket_bytes:
                buckets.append(tuple(bucket))
                bucket, load = [], np.zeros(self.cluster.size)
            bucket.append(name)
            load = load + size
        return (*buckets, tuple(bucket)) if bucket else tuple(buckets)

    def steps(self, device: int, bucket_bytes: int) -> Iterator[TransferStep]:
        """The device's part of the schedule, in order, without waves in which it neither sends nor receives."""
        buckets = self.buckets(bucket_bytes)
        bucket_of = np.concatenate([np.full(len(names), i) for i, names in enumerate(buckets)] or [np.zeros(0, int)])
        # (bucket, wave) -> (source, target) -> (parameter index, box number, piece)
        by_wave: dict[tuple[int, int], dict[tuple[int, int], list[tuple[int, int, ParameterBox]]]] = {}
        for number, common in enumerate(self._boxes):
            involved = (common.sources == device) | (common.receivers == device)[None, :]
            for row, column in zip(*np.nonzero(involved), strict=True):
                index = int(common.indices[row])
                pair = int(common.sources[row, column]), int(common.receivers[column])
                when = int(bucket_of[index]), int(common.waves[row, column])
                piece = ParameterBox(self._names[index], common.box)
                by_wave.setdefault(when, {}).setdefault(pair, []).append((index, number, piece))
        for bucket, wave in sorted(by_wave):
            messages = [
                self._message(*pair, wave, [piece for _, _, piece in sorted(pieces, key=lambda entry: entry[:2])])
                for pair, pieces in sorted(by_wave[bucket, wave].items())
            ]
            sends = tuple(message for message in messages if message.source == device)
            receives = tuple(message for message in messages if message.target == device)
            yield TransferStep(bucket, wave, buckets[bucket], sends, receives)

    def _message(self, source: int, target: int, wave: int, pieces: Sequence[ParameterBox]) -> Message:
        size = sum(volume(piece.box) for piece in pieces) * self.spec.bytes_per_element
        return Message(source, target, wave, tuple(pieces), size)


def make_schedule(cluster: Cluster, source: Layout, target: Layout) -> TransferSchedule:
    """The schedule from one layout to another. The layouts' devices may be equal, overlap or be disjoint.

    Raises:
        ValueError: the target has a part that no device of the source holds.
    """
    boxes = list(_common_boxes(source, target))
    loads = np.zeros(cluster.size, np.int64)
    # boxes with few holders are assigned first, because boxes with many can balance the loads afterwards
    for common in sorted(boxes, key=lambda common: (len(common.holders), -common.bytes)):
        common.sources = assign_senders(
            common.holders, common.receivers, len(common.indices), common.bytes, cluster.devices_per_node, loads
        )
    _add_relays(boxes, cluster.devices_per_node, loads)
    for common in boxes:
        _number_waves(common)
    return TransferSchedule(cluster, source, target, boxes, loads)


def schedule_entries(source: Layout, target: Layout) -> int:
    """Estimated number of entries (box of a parameter, receiver) of a schedule, of 5 bytes each. It grows with the
    square of the number of devices if each gets a piece from every other one."""
    entries = 0
    for before, after, indices in _by_placement(source, target):
        receivers = sum(len(placed.devices) for placed in after)
        entries += len(indices) * receivers * max(1, len(before) // max(1, len(after)))
    return entries


def schedule_seconds(source: Layout, target: Layout) -> float:
    """Estimated seconds of `make_schedule`: a part for its entries, and a part for its boxes, which are assigned one
    after the other."""
    boxes = sum(len(before) + len(after) for before, after, _ in _by_placement(source, target))
    return ENTRY_S * schedule_entries(source, target) + BOX_S * boxes


def _by_placement(
    source: Layout, target: Layout
) -> list[tuple[tuple[PlacedBox, ...], tuple[PlacedBox, ...], list[int]]]:
    """Parameters grouped by their placements in both layouts: (source's, target's, positions in the spec). Placements
    are compared by identity, because a comparison of 1,024 devices would take longer than the schedule."""
    groups: dict[tuple[int, int], tuple[tuple[PlacedBox, ...], tuple[PlacedBox, ...], list[int]]] = {}
    for index, parameter in enumerate(target.spec.parameters):
        before, after = source.parameters.get(parameter.name, ()), target.parameters[parameter.name]
        groups.setdefault((id(before), id(after)), (before, after, []))[2].append(index)
    return list(groups.values())


def _common_boxes(source: Layout, target: Layout) -> Iterator[_CommonBox]:
    for before, after, positions in _by_placement(source, target):
        if not after:
            continue
        indices = np.asarray(positions)
        name = target.spec.parameters[positions[0]].name
        for target_box, source_box, box in _intersections(before, after, name):
            holders, devices = set(source_box.devices), set(target_box.devices)
            yield _CommonBox(
                box,
                indices,
                volume(box) * target.spec.bytes_per_element,
                np.asarray(source_box.devices),
                np.asarray(sorted(devices - holders), int),
                frozenset(devices & holders),
            )


def _intersections(
    before: Sequence[PlacedBox], after: Sequence[PlacedBox], name: str
) -> list[tuple[PlacedBox, PlacedBox, Box]]:
    """(target box, source box, intersection) for each pair that intersects. Raises `ValueError` if the source does not
    cover the target."""
    if not after[0].box:  # a scalar
        pairs: list[tuple[PlacedBox, PlacedBox, Box]] = [(target, source, ()) for target in after for source in before]
    else:
        lows, highs = ([np.asarray([[e[i] for e in c.box] for c in side]) for side in (before, after)] for i in (0, 1))
        low = np.maximum(lows[0][:, None] if before else np.zeros((0, 1, 1)), lows[1][None])
        high = np.minimum(highs[0][:, None] if before else np.zeros((0, 1, 1)), highs[1][None])
        pairs = [
            (after[b], before[a], tuple(zip(low[a, b].tolist(), high[a, b].tolist(), strict=True)))
            for b, a in zip(*np.nonzero((low < high).all(-1).T), strict=True)
        ]
    covered = sum(volume(box) for _, _, box in pairs)
    if covered != sum(volume(target.box) for target in after):
        raise ValueError(f"no device of the source layout holds all of {name} that the target layout wants.")
    return pairs


def _add_relays(boxes: Sequence[_CommonBox], per_node: int, loads: np.ndarray) -> None:
    """Move sends from devices above the mean load to devices that receive the same part. The mean is over all devices
    that can send."""
    able = {int(d) for common in boxes if len(common.receivers) for d in (*common.holders, *common.receivers)}
    if not able:
        return
    most = MAX_LOAD * loads.sum() / len(able)
    for common in sorted(boxes, key=lambda common: -common.bytes):
        busy = [int(d) for d in common.holders if loads[d] > most]
        if not busy or len(common.receivers) < 2:
            continue
        sends = np.zeros((len(common.sources), len(loads)), bool)  # (parameter, device)
        sends[np.arange(len(sends))[:, None], common.sources] = True
        passes_on = sends[:, common.receivers]
        receives = np.zeros(len(loads), bool)
        receives[common.receivers] = True
        relayed = receives[common.sources]
        for device in busy:
            for row, column in zip(*np.nonzero(common.sources == device), strict=True):
                if loads[device] <= most or loads[common.receivers].min() + common.bytes >= loads[device]:
                    break
                if passes_on[row, column]:
                    continue
                is_inside_node = common.receivers[column] // per_node == device // per_node
                can_relay = ~relayed[row]
                can_relay[column] = False
                if is_inside_node:
                    can_relay &= common.receivers // per_node == device // per_node
                if not can_relay.any():
                    continue
                # prefer devices that forward the part already, so that few devices wait for a second wave
                preferred = can_relay & passes_on[row] & (loads[common.receivers] + common.bytes <= most)
                choices = np.nonzero(preferred if preferred.any() else can_relay)[0]
                choice = choices[np.argmin(loads[common.receivers[choices]])]
                relay = common.receivers[choice]
                if loads[relay] + common.bytes >= loads[device]:
                    continue
                common.sources[row, column] = relay
                loads[device] -= common.bytes
                loads[relay] += common.bytes
                relayed[row, column] = passes_on[row, choice] = True


def _number_waves(common: _CommonBox) -> None:
    """Set `waves` of a box: holders send in wave 0, a receiver forwards in the wave after its receipt."""
    column_of = np.full(int(max(common.receivers.max(initial=0), common.sources.max(initial=0))) + 1, -1)
    column_of[common.receivers] = np.arange(len(common.receivers))
    sender_column = column_of[common.sources]  # the column of the receiver that sends, -1 for a holder
    common.waves = np.zeros(common.sources.shape, np.int8)
    rows = np.arange(len(common.indices))[:, None]
    while True:
        waves = np.where(sender_column < 0, 0, common.waves[rows, sender_column] + 1).astype(np.int8)
        if (waves == common.waves).all():
            return
        common.waves = waves
