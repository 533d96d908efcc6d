"""`AheadLeader`: rank 0's part of an iteration in which calls run ahead of the training. It passes the ranks' events to
`planner.iteration.ahead_order.AheadOrder`, and the resulting orders to the ranks.

The ranks' part is in `ahead_runs`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...planner.iteration.ahead_order import AheadOrder, AheadTask, RunCall
from ..messages import Messages
from .leader_link import Leader, LeaderLink, Left


@dataclass(frozen=True)
class Done:
    """A rank has published its part of a call's outputs, or the call's failure."""

    iteration: int
    call: str
    rank: int
    failed: bool = False


AheadEvent = Done | Left
AheadLink = LeaderLink[AheadEvent, AheadTask]


class AheadLeader(Leader[AheadEvent, AheadTask]):
    """Answers the ranks during one iteration.

    Args:
        tag: tag of the events; the orders have `tag + 1`.
        order: decides the next calls, over all iterations of the run.
        ranks: the ranks that run ahead, which get orders.
        world: number of ranks of the job; all of them report.
        iteration: the iteration that trains.
    """

    def __init__(
        self, messages: Messages, tag: int, order: AheadOrder, ranks: Collection[int], world: int, iteration: int
    ) -> None:
        super().__init__(messages, tag, ranks)
        self.order = order
        with self._lock:
            self._give(order.begin(iteration))
        self.listen(world - 1, "ahead-leader")

    def report(self, event: AheadEvent) -> None:
        """Handle an event of a rank."""
        if isinstance(event, Done):
            with self._lock:
                self._give(self.order.done(event.iteration, event.call, event.rank, failed=event.failed))

    def _give(self, orders: Sequence[AheadTask]) -> None:
        for order in orders:
            for rank in self.order.devices_of(order.call) if isinstance(order, RunCall) else self.ranks:
                self.send(rank, order)
