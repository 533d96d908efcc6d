"""Idle time of a timeline: the share of an iteration that each device waits, by the call that it waits for."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .dataflow import DataflowGraph
from .spans import LOOP, Span
from .timeline import Timeline


MIN_WAIT = 0.005  # minimum share of an iteration of a reported wait
SAME_TIME = 1e-6  # share of a window: starts and ends that differ by less count as simultaneous


@dataclass(frozen=True)
class Wait:
    """Devices with the same waits.

    Args:
        devices: device numbers, ascending.
        calls: share of an iteration in which each device waits, by the call that it waits for; the longest first.
    """

    devices: tuple[int, ...]
    calls: Mapping[str, float]

    @property
    def share(self) -> float:
        """Share of an iteration in which each device waits."""
        return sum(self.calls.values())

    @property
    def sentence(self) -> str:
        """A phrase such as `devices 4-7 wait 31% of an iteration for actor.generate`."""
        first, *others = self.calls.items()
        rest = f" and {sum(share for _, share in others):.0%} for others" if others else ""
        verb = "waits" if len(self.devices) == 1 else "wait"
        return f"{ranges(self.devices)} {verb} {first[1]:.0%} of an iteration for {first[0]}{rest}"


def ranges(devices: Sequence[int]) -> str:
    """Device numbers as text: `device 3`, `devices 0-3, 8-11`."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"device{'s' if len(devices) > 1 else ''} {text}"


def waits_of_iteration(timeline: Timeline, period: float, graph: DataflowGraph, size: int) -> tuple[Wait, ...]:
    """`waits` in a repetition of one iteration's timeline.

    Args:
        period: seconds from an iteration's start to the next one's; the calls of an iteration may end later.
        size: number of devices of the cluster.
    """
    start = min((span.start for span in timeline.spans), default=0.0)
    end = max((span.end for span in timeline.spans), default=0.0)
    before = 1 + int((end - start) / period) if period else 1
    window = start + before * period
    return waits(timeline.repeated(period, before + 2), graph, window, window + period, size)


def waits(timeline: Timeline, graph: DataflowGraph, start: float, end: float, size: int) -> tuple[Wait, ...]:
    """The waits of all devices from `start` to `end`, in seconds of the timeline's clock. Devices with the same waits
    are grouped; the longest waits are first.

    A device without a span waits for its next call. That call waits for calls that it reads from, that train its
    parameters, or that run on one of its devices: the cause is the one that ends last before the call starts. A wait
    without a visible cause counts for the next call itself.

    Args:
        size: number of devices of the cluster; devices without spans wait all the time, for "no call".
    """
    if end <= start:
        return ()
    by_device: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(timeline.spans, key=lambda span: span.start):
        for device in range(size) if span.call == LOOP else (span.device,):  # the loop runs while no device works
            by_device[device].append(span)
    causes = _Causes(timeline, graph, SAME_TIME * (end - start))
    alike: dict[tuple[tuple[str, float], ...], list[int]] = defaultdict(list)
    for device in range(size):
        shares: dict[str, float] = defaultdict(float)
        for gap_start, gap_end, following in _gaps(by_device[device], start, end):
            name = "no call" if following is None else causes.of(following, gap_start)
            shares[name] += (gap_end - gap_start) / (end - start)
        longest = sorted(((name, share) for name, share in shares.items() if share >= MIN_WAIT), key=lambda i: -i[1])
        if longest:
            alike[tuple((name, round(share, 3)) for name, share in longest)].append(device)
    result = (Wait(tuple(devices), dict(calls)) for calls, devices in alike.items())
    return tuple(sorted(result, key=lambda wait: -wait.share * len(wait.devices)))


def _gaps(spans: Sequence[Span], start: float, end: float) -> Iterator[tuple[float, float, Span | None]]:
    """(start, end, following span) of each gap between a device's spans in the window."""
    reached = start
    for span in spans:
        if span.start > reached and reached < end:
            yield reached, min(span.start, end), span
        reached = max(reached, span.end)
    if reached < end:
        yield reached, end, None


class _Causes:
    """Calls that spans wait for."""

    def __init__(self, timeline: Timeline, graph: DataflowGraph, at_once: float) -> None:
        self.timeline, self.at_once = timeline, at_once
        self._ends: dict[str, Mapping[str, Sequence[float]]] = {}
        self.needs: dict[str, set[str]] = defaultdict(set)
        for read in graph.data_edges:
            self.needs[read.consumer].add(read.producer)
        for trained in graph.parameter_edges:
            self.needs[trained.target].add(trained.source)
        self.devices: dict[str, set[int]] = defaultdict(set)
        for span in timeline.spans:
            self.devices[span.call].add(span.device)
        self.devices[LOOP] = set(timeline.devices)  # it begins when all have ended their calls

    def of(self, following: Span, since: float) -> str:
        """The call that ended last before `following` started, among those that it waits for and that ended after
        `since`, the start of the gap."""
        call, latest = following.call, following.start + self.at_once
        ended: dict[str, float] = {}
        for name, ends in self._ends_before(call).items():
            index = bisect_right(ends, latest) - 1
            if name == call and index >= 0 and ends[index] == following.end:
                index -= 1  # a span without duration does not wait for itself
            if index >= 0 and ends[index] > since + self.at_once:
                ended[name] = ends[index]
        return max(ended, key=lambda name: ended[name]) if ended else call

    def _ends_before(self, call: str) -> Mapping[str, Sequence[float]]:
        """Sorted end times of the calls that a call may wait for. Cached, because thousands of devices ask."""
        if call not in self._ends:
            ends: dict[str, list[float]] = defaultdict(list)
            for span in self.timeline.spans:
                is_needed = span.call in self.needs[call] or span.device in self.devices[call]
                if is_needed and span.call != LOOP:
                    ends[span.call].append(span.end)
            self._ends[call] = {name: sorted(times) for name, times in ends.items()}
        return self._ends[call]
