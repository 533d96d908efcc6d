"""`Activities`: concurrent work in virtual time, and the order in which it ends. Activities on devices that share
processors slow each other down.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from ..cost.hardware import Sharing


Event = Callable[[], None]


def devices_by_node(devices: Iterable[int], devices_per_node: int | None) -> Counter[int]:
    """Number of these devices on each node. All are on node 0 if `devices_per_node` is `None`."""
    return Counter(device // devices_per_node if devices_per_node else 0 for device in devices)


class Activities:
    """Work in progress, with a callback for the end of each activity.

    Args:
        sharing: slowdown by the number of devices of a node that compute at the same time; `None`: no slowdown. An
            activity on several nodes is as slow as on the slowest of them.
    """

    def __init__(self, sharing: Sharing | None = None) -> None:
        self.now = 0.0
        self._sharing = sharing
        self._slowdown = cache(sharing.slowdown) if sharing is not None else None
        self._ends: list[tuple[float, int]] = []  # heap of (end, number); used if there is no slowdown
        self._running: dict[int, tuple[float, Mapping[int, int], Event]] = {}  # number -> (seconds left, devices, end)
        self._begun: dict[int, tuple[float, float]] = {}  # number -> (start, seconds)
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._running)

    def start(self, seconds: float, devices: Mapping[int, int], end: Event) -> int:
        """Begin an activity now and return its number.

        Args:
            seconds: seconds that it takes while no other activity runs.
            devices: number of devices that it keeps busy on each node; empty if it slows nothing down.
            end: callback when the activity ends without `stop`.
        """
        number, self._number = self._number, self._number + 1
        self._running[number] = (seconds, devices, end)
        self._begun[number] = (self.now, seconds)
        if self._slowdown is None:
            heapq.heappush(self._ends, (self.now + seconds, number))
        return number

    def stop(self, number: int) -> float:
        """End an activity early. Returns the share of it that is done."""
        left, _, _ = self._running.pop(number)
        start, seconds = self._begun.pop(number)
        if seconds <= 0:
            return 1.0
        done = (self.now - start) / seconds if self._slowdown is None else 1 - left / seconds
        return min(1.0, max(0.0, done))

    def next(self) -> None:
        """Let time pass until the next activity ends. If several end at the same time, the one that began first."""
        number = self._next_undisturbed() if self._slowdown is None else self._next_shared()
        self._begun.pop(number)
        _, _, event = self._running.pop(number)
        event()

    def _next_undisturbed(self) -> int:
        while True:
            end, number = heapq.heappop(self._ends)
            if number in self._running:
                self.now = max(self.now, end)
                return number

    def _next_shared(self) -> int:
        busy = Counter[int]()
        for _, devices, _ in self._running.values():
            busy.update(devices)
        speeds = {number: self._speed(devices, busy) for number, (_, devices, _) in self._running.items()}
        first = min(speeds, key=lambda number: (self._running[number][0] / speeds[number], number))
        passed = max(0.0, self._running[first][0] / speeds[first])
        self.now += passed
        for number, speed in speeds.items():
            left, devices, event = self._running[number]
            left -= passed * speed
            self._running[number] = (left if left > 1e-12 else 0.0, devices, event)
        return first

    def _speed(self, devices: Mapping[int, int], busy: Mapping[int, int]) -> float:
        """Speed relative to that of the activity running alone."""
        if not devices:
            return 1.0
        assert self._slowdown is not None
        alone = self._slowdown(max(devices.values()))
        return min(1.0, alone / self._slowdown(max(busy[node] for node in devices)))
