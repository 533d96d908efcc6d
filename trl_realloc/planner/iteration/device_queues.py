"""`DeviceQueues`: the work of each device in virtual time, first in, first out.

The simulations of plain, streamed and stale iterations use it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial

from .activities import Activities


class Work:
    """A call, a part of it, a reallocation or an update of the engines' parameters, in the queues of its devices. A
    work without devices takes no time.

    Args:
        seconds: seconds that it takes while nothing else runs.
        needs: further conditions of its start: other works, or events of `DeviceQueues.happened`.
        begins, ends: callbacks at its start and its end, or `None`.

    Attributes:
        waits_for: unmet conditions: entries of `needs`, devices in whose queues it has not been put, and the works
            before it in the queues of the others.
        start, end: seconds.
    """

    def __init__(
        self,
        name: str,
        devices: Iterable[int],
        seconds: float,
        *,
        needs: Iterable[Hashable] = (),
        begins: Callable[[Work], None] | None = None,
        ends: Callable[[Work], None] | None = None,
    ) -> None:
        self.name, self.devices, self.seconds = name, frozenset(devices), seconds
        self.waits_for: set[Hashable] = {*self.devices, *needs}
        self.begins, self.ends = begins, ends
        self.start = self.end = 0.0


class DeviceQueues:
    """A queue for each device. A work begins when it is the first one in the queues of all its devices and the
    conditions of its start are met.

    Args:
        nodes: function from devices to their number on each node.

    Attributes:
        busy: devices that run something.
    """

    def __init__(self, activities: Activities, nodes: Callable[[Iterable[int]], Mapping[int, int]]) -> None:
        self.activities, self.busy = activities, set[int]()
        self._nodes = nodes
        self._waiting: dict[Work, None] = {}  # in the order in which they were queued
        self._latest: dict[int, Work] = {}  # device -> its last work, if it has not ended

    @property
    def is_idle(self) -> bool:
        """True if no device runs anything and all queues are empty."""
        return not self.busy and not self._waiting

    def give(self, work: Work, devices: Iterable[int] | None = None) -> None:
        """Put a work into the queues of its devices, or of some of them: the rest follow in a later call."""
        queued = work.devices if devices is None else frozenset(devices)
        self._waiting[work] = None
        work.waits_for -= queued
        work.waits_for |= self.latest(queued)
        self._latest |= dict.fromkeys(queued, work)

    def latest(self, devices: Iterable[int]) -> set[Work]:
        """The last works in the queues of these devices that have not ended."""
        return {self._latest[device] for device in devices if device in self._latest}

    def happened(self, what: Hashable) -> None:
        """An event that works may wait for has happened."""
        for work in self._waiting:
            work.waits_for.discard(what)

    def advance(self) -> None:
        """Begin all works whose conditions are met."""
        for work in [*self._waiting]:
            if not work.waits_for:
                del self._waiting[work]
                self._begin(work)

    def _begin(self, work: Work) -> None:
        work.start = self.activities.now
        self.busy |= work.devices
        if work.begins:
            work.begins(work)
        if work.devices:
            self.activities.start(work.seconds, self._nodes(work.devices), partial(self._end, work))
        else:
            self._ended(work)

    def _end(self, work: Work) -> None:
        self._ended(work)
        self.advance()

    def _ended(self, work: Work) -> None:
        work.end = self.activities.now
        self.busy -= work.devices
        for device in work.devices:
            if self._latest[device] is work:
                del self._latest[device]
        self.happened(work)
        if work.ends:
            work.ends(work)
