"""`DeviceQueues`: what devices run in simulated iterations with a staleness, each in the order in which it was given.

What they are given, and what follows from its end, is in `ahead_simulation`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from ...plan.execution_plan import ExecutionPlan
from .activities import Activities, devices_by_node
from .stream_engine import Event


@dataclass(eq=False)
class Work:
    """A call, a part of it, a reallocation or an update of the engines' parameters, in the queues of its devices.

    Args:
        units: the parts of the cluster that it is on.
        stops: whether engines on these stand still meanwhile.
        needs: calls of the same iteration whose outputs it reads.
        end: called when it has ended.
    """

    name: str
    iteration: int
    units: frozenset[int]
    seconds: float
    stops: bool
    needs: frozenset[str] = frozenset()
    end: Callable[[], None] = lambda: None


@dataclass
class Units:
    """The devices in parts of which all devices run the same calls, and so do the same at the same time."""

    plan: ExecutionPlan
    devices: list[list[int]] = field(default_factory=list)
    of_call: dict[str, frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts: dict[tuple[str, ...], list[int]] = {}
        for device in range(self.plan.cluster.size):
            if calls := self.plan.calls_on(device):
                parts.setdefault(calls, []).append(device)
        self.devices = list(parts.values())
        self.of_call = {
            name: frozenset(at for at, calls in enumerate(parts) if name in calls) for name in self.plan.order
        }
        self._of_device = {device: at for at, part in enumerate(self.devices) for device in part}

    def of(self, devices: Iterable[int]) -> frozenset[int]:
        """The parts that devices are in."""
        return frozenset(map(self._of_device.__getitem__, devices))

    def nodes(self, units: Iterable[int]) -> Mapping[int, int]:
        """Number of devices of these units on each node, by the node's number."""
        devices = (device for unit in units for device in self.devices[unit])
        return devices_by_node(devices, self.plan.cluster.devices_per_node)


class DeviceQueues:
    """A work begins when it is the next one of all its units and its inputs are there.

    Args:
        has_inputs: whether what a work reads has been made.
        begins: called when a work begins.
        ended: called with a work that has ended and the time at which it began.

    Attributes:
        busy: the units that run something.
    """

    def __init__(
        self,
        units: Units,
        activities: Activities[Event],
        *,
        has_inputs: Callable[[Work], bool],
        begins: Callable[[Work], None],
        ended: Callable[[Work, float], None],
    ) -> None:
        self.units, self.activities = units, activities
        self._has_inputs, self._begins, self._ended = has_inputs, begins, ended
        self._queues: list[deque[Work]] = [deque() for _ in units.devices]
        self.busy: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """True if no unit runs anything and all queues are empty."""
        return not self.busy and not any(self._queues)

    def add(self, work: Work, units: Iterable[int]) -> None:
        """Put a work into the queues of some of its units."""
        for unit in units:
            self._queues[unit].append(work)

    def advance(self) -> None:
        """Begin what may begin."""
        for queue in self._queues:
            if queue and self._may_begin(queue[0]):
                self._begin(queue[0])

    def _may_begin(self, work: Work) -> bool:
        if work.units & self.busy:
            return False
        queues = (self._queues[unit] for unit in work.units)
        return all(queue and queue[0] is work for queue in queues) and self._has_inputs(work)

    def _begin(self, work: Work) -> None:
        self.busy |= work.units
        self._begins(work)
        self.activities.start(work.seconds, self.units.nodes(work.units), partial(self._end, work, self.activities.now))

    def _end(self, work: Work, start: float) -> None:
        self.busy -= work.units
        for unit in work.units:
            self._queues[unit].popleft()
        self._ended(work, start)
