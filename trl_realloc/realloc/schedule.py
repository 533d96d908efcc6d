"""Who sends what to whom, so that every device of a target layout ends with its parts: contract 2 of the design.

No device is sent what it holds. What several devices of a node lack crosses to the node once and is spread inside.
Loads are evened out over all that can send: a device that has received something may pass it on, in a later wave.

The method is ReaL's (section 5.2: common layers and slices, one sender per destination node) freed of its condition
that one tensor degree divides the other, with relays besides. Parameters that lie alike are scheduled together, as
arrays over (parameter, receiver), so 70 billion parameters on 1,024 devices take about a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..plan.cluster import Cluster
from ..plan.model_spec import ModelSpec
from .layout import Box, Layout, Placed, volume


EVEN = 1.02  # senders above this multiple of the mean load hand work to devices that have received the parts


@dataclass(frozen=True)
class Piece:
    """A box of a parameter."""

    parameter: str
    box: Box


@dataclass(frozen=True)
class Message:
    """All that one device sends another in one wave of one bucket."""

    source: int
    target: int
    wave: int
    pieces: tuple[Piece, ...]
    bytes: int


@dataclass(frozen=True)
class Step:
    """One device's messages of one wave of one bucket. What a device sends in a wave it held at the start, or got in an
    earlier wave of the bucket."""

    bucket: int
    wave: int
    parameters: tuple[str, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass
class _Cell:
    """A box that is whole in both layouts, of several parameters that lie alike.

    Args:
        alike: their places in the spec.
        holders: devices that have it at the start.
        receivers: (n,) devices that lack it.
        sources: (len(alike), n) who sends each parameter's box to each receiver.
        waves: of the same shape.
    """

    box: Box
    alike: np.ndarray
    bytes: int
    holders: np.ndarray
    receivers: np.ndarray
    kept: frozenset[int]
    sources: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    waves: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int8))


class TransferSchedule:
    """Made by `make_schedule`; the same for the same layouts, wherever it is made.

    Args:
        sent: (devices,) bytes that each device of the cluster sends.
    """

    def __init__(self, cluster: Cluster, source: Layout, target: Layout, cells: list[_Cell], sent: np.ndarray) -> None:
        self.cluster, self.source, self.target = cluster, source, target
        self.target_devices = target.devices
        self._cells, self._sent = cells, sent
        self._names = [parameter.name for parameter in target.spec.parameters]

    @property
    def spec(self) -> ModelSpec:
        return self.target.spec

    def sent(self, device: int) -> int:
        return int(self._sent[device])

    @property
    def wire_bytes(self) -> int:
        """All that is sent."""
        return int(self._sent.sum())

    @property
    def waves(self) -> int:
        """How many waves a bucket has, of all devices."""
        return 1 + max((int(cell.waves.max(initial=0)) for cell in self._cells), default=0)

    @property
    def max_over_mean_sender(self) -> float:
        """The most loaded sender's bytes over the mean of those that send; 1 where nothing is sent."""
        senders = self._sent[self._sent > 0]
        return float(senders.max() / senders.mean()) if len(senders) else 1.0

    @cached_property
    def node_bytes(self) -> int:
        """What is sent from one node to another."""
        per_node = self.cluster.devices_per_node
        return sum(
            int((cell.sources // per_node != cell.receivers // per_node).sum()) * cell.bytes for cell in self._cells
        )

    def traffic(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of every device inside its node and between nodes, each (2, devices): sent, received."""
        per_node, size = self.cluster.devices_per_node, self.cluster.size
        found = np.zeros((2, 2, size))
        for cell in self._cells:
            receivers = np.broadcast_to(cell.receivers, cell.sources.shape)
            for at, across in enumerate((False, True)):
                mine = ((cell.sources // per_node) != (receivers // per_node)) == across
                for direction, devices in enumerate((cell.sources, receivers)):
                    found[at, direction] += np.bincount(devices[mine], minlength=size) * cell.bytes
        return found[0], found[1]

    @cached_property
    def lower_bound_bytes(self) -> int:
        """What the target's devices lack, counted from the layouts and not from the schedule: each device's part of the
        target less what of it the device holds in the source."""
        total = 0
        for before, after, names in _alike(self.source, self.target):
            lacked = 0
            for mine in after:
                wanted = set(mine.devices)
                lacked += volume(mine.box) * len(wanted)
                for other in before:
                    lacked -= _overlap(other.box, mine.box) * len(wanted.intersection(other.devices))
            total += lacked * len(names)
        return total * self.spec.bytes_per_element

    def kept(self, device: int) -> tuple[Piece, ...]:
        """What the device holds in both layouts."""
        return tuple(
            Piece(self._names[at], cell.box) for cell in self._cells if device in cell.kept for at in cell.alike
        )

    def buckets(self, bucket_bytes: int) -> tuple[tuple[str, ...], ...]:
        """Consecutive parameters, so that no device has more than `bucket_bytes` of a bucket in the target layout (a
        larger parameter is one by itself). The same on every device."""
        per_device = np.zeros((len(self._names), self.cluster.size))
        for cell in self._cells:
            holding = [*cell.receivers.tolist(), *cell.kept]
            per_device[np.ix_(cell.alike, np.asarray(holding, int))] += cell.bytes
        found: list[tuple[str, ...]] = []
        bucket: list[str] = []
        load = np.zeros(self.cluster.size)
        for name, more in zip(self._names, per_device, strict=True):
            if bucket and (load + more).max(initial=0) > bucket_bytes:
                found.append(tuple(bucket))
                bucket, load = [], np.zeros(self.cluster.size)
            bucket.append(name)
            load = load + more
        return (*found, tuple(bucket)) if bucket else tuple(found)

    def steps(self, device: int, bucket_bytes: int) -> Iterator[Step]:
        """The device's part of the schedule, in order; where it neither sends nor receives there is no step."""
        buckets = self.buckets(bucket_bytes)
        bucket_of = np.concatenate([np.full(len(names), at) for at, names in enumerate(buckets)] or [np.zeros(0, int)])
        found: dict[tuple[int, int], dict[tuple[int, int], list[tuple[int, int, Piece]]]] = {}
        for number, cell in enumerate(self._cells):
            mine = (cell.sources == device) | (cell.receivers == device)[None, :]
            for row, column in zip(*np.nonzero(mine), strict=True):
                at = int(cell.alike[row])
                pair = int(cell.sources[row, column]), int(cell.receivers[column])
                when = int(bucket_of[at]), int(cell.waves[row, column])
                piece = Piece(self._names[at], cell.box)
                found.setdefault(when, {}).setdefault(pair, []).append((at, number, piece))
        for bucket, wave in sorted(found):
            messages = [
                self._message(*pair, wave, [piece for _, _, piece in sorted(pieces, key=lambda each: each[:2])])
                for pair, pieces in sorted(found[bucket, wave].items())
            ]
            sends = tuple(message for message in messages if message.source == device)
            receives = tuple(message for message in messages if message.target == device)
            yield Step(bucket, wave, buckets[bucket], sends, receives)

    def _message(self, source: int, target: int, wave: int, pieces: Sequence[Piece]) -> Message:
        size = sum(volume(piece.box) for piece in pieces) * self.spec.bytes_per_element
        return Message(source, target, wave, tuple(pieces), size)


def make_schedule(cluster: Cluster, source: Layout, target: Layout) -> TransferSchedule:
    """The schedule from one layout to another, on meshes that may be equal, overlap or be disjoint.

    Raises:
        ValueError: the target wants a part that no device of the source holds.
    """
    cells = list(_cells(source, target))
    loads = np.zeros(cluster.size, np.int64)
    # what few can send is dealt out first: the others even it out
    for cell in sorted(cells, key=lambda cell: (len(cell.holders), -cell.bytes)):
        _deal(cell, cluster.devices_per_node, loads)
    _relay(cells, cluster.devices_per_node, loads)
    for cell in cells:
        _number_waves(cell)
    return TransferSchedule(cluster, source, target, cells, loads)


def _alike(source: Layout, target: Layout) -> list[tuple[tuple[Placed, ...], tuple[Placed, ...], list[int]]]:
    """Both placements, and the places in the spec of the parameters that have them. By identity, for comparing the
    placements of 1,024 devices would take longer than the schedule."""
    found: dict[tuple[int, int], tuple[tuple[Placed, ...], tuple[Placed, ...], list[int]]] = {}
    for at, parameter in enumerate(target.spec.parameters):
        before, after = source.parameters.get(parameter.name, ()), target.parameters[parameter.name]
        found.setdefault((id(before), id(after)), (before, after, []))[2].append(at)
    return list(found.values())


def _cells(source: Layout, target: Layout) -> Iterator[_Cell]:
    """The common refinement of both layouts' boxes."""
    for before, after, names in _alike(source, target):
        if not after:
            continue
        alike = np.asarray(names)
        for wanted, held, box in _meetings(before, after, target.spec.parameters[names[0]].name):
            holders, devices = set(held.devices), set(wanted.devices)
            yield _Cell(
                box,
                alike,
                volume(box) * target.spec.bytes_per_element,
                np.asarray(held.devices),
                np.asarray(sorted(devices - holders), int),
                frozenset(devices & holders),
            )


def _meetings(before: Sequence[Placed], after: Sequence[Placed], name: str) -> list[tuple[Placed, Placed, Box]]:
    """Each pair of boxes that have something in common, with what that is."""
    if not after[0].box:  # a scalar
        pairs: list[tuple[Placed, Placed, Box]] = [(wanted, held, ()) for wanted in after for held in before]
    else:
        lows, highs = ([np.asarray([[e[i] for e in c.box] for c in side]) for side in (before, after)] for i in (0, 1))
        low = np.maximum(lows[0][:, None] if before else np.zeros((0, 1, 1)), lows[1][None])
        high = np.minimum(highs[0][:, None] if before else np.zeros((0, 1, 1)), highs[1][None])
        pairs = [
            (after[b], before[a], tuple(zip(low[a, b].tolist(), high[a, b].tolist(), strict=True)))
            for b, a in zip(*np.nonzero((low < high).all(-1).T), strict=True)
        ]
    there = sum(volume(box) for _, _, box in pairs)
    if there != sum(volume(wanted.box) for wanted in after):
        raise ValueError(f"no device of the source layout holds all of {name} that the target layout wants.")
    return pairs


def _overlap(a: Box, b: Box) -> int:
    return volume(tuple((max(p, r), max(max(p, r), min(q, s))) for (p, q), (r, s) in zip(a, b, strict=True)))


def _deal(cell: _Cell, per_node: int, loads: np.ndarray) -> None:
    """Choose a sender for every (parameter, receiver) of a cell, the least loaded that may be."""
    alike, receivers = len(cell.alike), cell.receivers
    cell.sources = np.full((alike, len(receivers)), -1, np.int32)
    holding_nodes, nodes = cell.holders // per_node, receivers // per_node
    far: list[np.ndarray] = []  # for each node without a holder, the columns of its receivers
    for node in np.unique(nodes):
        columns = np.nonzero(nodes == node)[0]
        near = cell.holders[holding_nodes == node]
        if len(near):
            cell.sources[:, columns] = _shared(near, alike, len(columns), cell.bytes, loads)
        else:
            far.append(columns)
    if not far:
        return
    from_afar = _shared(cell.holders, alike, len(far), cell.bytes, loads)
    for place, columns in enumerate(far):
        # a node's receivers take turns at being the one that gets a parameter from afar, and pass it on
        turns = np.argsort(loads[receivers[columns]], kind="stable")
        entries = columns[turns[np.arange(alike) % len(columns)]]
        cell.sources[:, columns] = receivers[entries][:, None]
        cell.sources[np.arange(alike), entries] = from_afar[:, place]
        np.add.at(loads, receivers[entries], (len(columns) - 1) * cell.bytes)


def _shared(senders: np.ndarray, rows: int, columns: int, size: int, loads: np.ndarray) -> np.ndarray:
    """(rows, columns) senders, so that their loads become as even as whole items allow; a sender serves neighbouring
    columns, for few and large messages."""
    counts = _levelled(loads[senders], rows * columns, size)
    loads[senders] += counts * size
    return np.repeat(senders, counts).reshape(columns, rows).T


def _levelled(loads: np.ndarray, items: int, size: int) -> np.ndarray:
    """How many of `items` of equal size each gets: water poured onto the loads."""
    order = np.argsort(loads, kind="stable")
    rising = loads[order].astype(float)
    below = np.arange(1, len(loads) + 1)
    levels = (items * size + np.cumsum(rising)) / below  # if the lowest 1, 2, … of them took all
    filled = int(np.nonzero(np.append(levels[:-1] <= rising[1:], True))[0][0]) + 1
    exact = np.zeros(len(loads))
    exact[order[:filled]] = (levels[filled - 1] - rising[:filled]) / size
    counts = np.floor(exact).astype(int)
    rest = items - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    return counts


def _relay(cells: Sequence[_Cell], per_node: int, loads: np.ndarray) -> None:
    """Take from senders above the mean of all that could send, give to devices that receive the same part anyway."""
    able = {int(d) for cell in cells if len(cell.receivers) for d in (*cell.holders, *cell.receivers)}
    if not able:
        return
    most = EVEN * loads.sum() / len(able)
    for cell in sorted(cells, key=lambda cell: -cell.bytes):
        busy = [int(d) for d in cell.holders if loads[d] > most]
        if not busy or len(cell.receivers) < 2:
            continue
        passes_on = np.stack([np.isin(cell.receivers, row) for row in cell.sources])
        relayed = np.isin(cell.sources, cell.receivers)
        for device in busy:
            for row, column in zip(*np.nonzero(cell.sources == device), strict=True):
                if loads[device] <= most:
                    break
                if passes_on[row, column]:
                    continue
                stays = cell.receivers[column] // per_node == device // per_node
                may = ~relayed[row]
                may[column] = False
                if stays:
                    may &= cell.receivers // per_node == device // per_node
                if not may.any():
                    continue
                # one that passes the part on already, so that few wait for a second wave; else the least loaded
                chosen = may & passes_on[row] & (loads[cell.receivers] + cell.bytes <= most)
                choices = np.nonzero(chosen if chosen.any() else may)[0]
                choice = choices[np.argmin(loads[cell.receivers[choices]])]
                relay = cell.receivers[choice]
                if loads[relay] + cell.bytes >= loads[device]:
                    continue
                cell.sources[row, column] = relay
                loads[device] -= cell.bytes
                loads[relay] += cell.bytes
                relayed[row, column] = passes_on[row, choice] = True


def _number_waves(cell: _Cell) -> None:
    """A holder's messages are wave 0; what a receiver passes on is one later than what it got."""
    column_of = np.full(int(max(cell.receivers.max(initial=0), cell.sources.max(initial=0))) + 1, -1)
    column_of[cell.receivers] = np.arange(len(cell.receivers))
    by = column_of[cell.sources]  # the column of the receiver that sends, -1 for a holder
    cell.waves = np.zeros(cell.sources.shape, np.int8)
    rows = np.arange(len(cell.alike))[:, None]
    while True:
        waves = np.where(by < 0, 0, cell.waves[rows, by] + 1).astype(np.int8)
        if (waves == cell.waves).all():
            return
        cell.waves = waves
