"""`DeviceQueues`: what devices run in virtual time, each in the order in which it was given.

Plain, streamed and stale iterations are simulated with it: what devices are given, and what follows from its end, is in
`simulate`, `stream_simulation` and `ahead_simulation`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial

from .activities import Activities


class Work:
    """A call, a part of it, a reallocation or an update of the engines' parameters, in the queues of its devices. A
    work without devices takes no time.

    Args:
        seconds: that it takes while nothing else runs.
        needs: what else has to have happened before it begins: works, or what `DeviceQueues.happened` reports.
        begins, ends: called when it begins and when it has ended; `None` for nothing.

    Attributes:
        waits_for: of these what has not happened, the devices that it has not been given to, and the works that the
            others were given before.
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
    """A work begins when it is the next one of all its devices and what it needs has happened.

    Args:
        nodes: number of devices of each node, of some devices.

    Attributes:
        busy: the devices that run something.
    """

    def __init__(self, activities: Activities, nodes: Callable[[Iterable[int]], Mapping[int, int]]) -> None:
        self.activities, self.busy = activities, set[int]()
        self._nodes = nodes
        self._waiting: dict[Work, None] = {}  # in the order in which they were given
        self._latest: dict[int, Work] = {}  # by device, the last work that it was given and has not ended

    @property
    def is_idle(self) -> bool:
        """True if no device runs anything or has been given what it has not run."""
        return not self.busy and not self._waiting

    def give(self, work: Work, devices: Iterable[int] | None = None) -> None:
        """Put a work into the queues of its devices, or at first of some of them."""
        given = work.devices if devices is None else frozenset(devices)
        self._waiting[work] = None
        work.waits_for -= given
        work.waits_for |= self.latest(given)
        self._latest |= dict.fromkeys(given, work)

    def latest(self, devices: Iterable[int]) -> set[Work]:
        """The works that devices were given last, of those that have not ended."""
        return {self._latest[device] for device in devices if device in self._latest}

    def happened(self, what: Hashable) -> None:
        """No work waits for this any more."""
        for work in self._waiting:
            work.waits_for.discard(what)

    def advance(self) -> None:
        """Begin what may begin."""
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
