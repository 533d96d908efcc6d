"""`AheadRuns`: iterations of a plan with a staleness, on one rank. Ranks that train run their calls one after another.
The other ranks generate for later iterations without a pause, score, and take new parameters while they generate.

On rank 0, `planner.iteration.ahead_order` decides which call a rank runs next. The batches under way and the
engine are in `batches_ahead`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...algorithms.prompt_batches import PromptBatch
from ...plan.staleness import calls_ahead, devices_ahead
from ...planner.iteration.ahead_order import AheadOrder, AheadTask, EndIteration, RunCall, TakeUpdate
from ..calls import generate_and_score as calls
from ..calls.call_runner import CallRunner
from ..calls.generate_and_score import Step
from ..failures.alarm import Alarm
from ..messages import Channels
from ..placement.placement import Placement
from ..samples.routes import RESULTS, sources
from .batches_ahead import POLL_S, BatchesAhead
from .in_flight import BatchInFlight
from .leader_link import Leader, LeaderLink, Left


WAIT_S = 1.0  # time between two checks for another rank's failure


@dataclass(frozen=True)
class Done:
    """A rank has published its part of a call's outputs, or the call's failure."""

    iteration: int
    call: str
    rank: int
    failed: bool = False


AheadEvent = Done | Left
AheadLink = LeaderLink[AheadEvent, AheadTask]


class AheadRuns:
    """One rank of a run with a staleness.

    Args:
        channels: the executor's; the batches use another series.
    """

    def __init__(self, placement: Placement, alarm: Alarm, runner: CallRunner, channels: Channels) -> None:
        self.placement, self.alarm, self.runner = placement, alarm, runner
        self.plan, self.rank = placement.plan, placement.rank
        self.versions = self.plan.staleness.versions
        graph = self.plan.graph
        self.batches = BatchesAhead(placement, alarm, runner, channels, self.plan.order, self._report_generated)
        self.generate, self.ahead = self.batches.generate, frozenset(calls_ahead(graph))
        self.train = graph.train_call(self.generate.role)
        self._ranks_ahead = devices_ahead(graph, self.plan.assignments)
        self._order: AheadOrder | None = None
        self._restarts = 0  # `batches.restarts` when the order was made
        self._link: AheadLink | None = None

    # --- one iteration ------------------------------------------------------------------------------------------------

    def run(self, step: Step, prompts: PromptBatch, following: Sequence[PromptBatch]) -> BatchInFlight:
        """Run one iteration.

        Args:
            following: the prompts of the next iterations: `versions + 1`, unless the run ends before.

        Returns:
            The batch of the iteration. The outputs of its calls have been published.

        Raises:
            JobFailed: another rank failed outside a call.
        """
        self.batches.channels.flush()
        sampling = calls.sampling_of(self.runner.settings, self.generate, step)
        current = self.batches.open(step, [prompts, *following[: self.versions + 1]], sampling)
        leader = self._leader(step.number) if self.rank == RESULTS else None
        is_ahead = self.rank in self._ranks_ahead
        self._link = AheadLink(self.batches.channels, leader, EndIteration, takes_tasks=is_ahead)
        self.batches.begin(step.number)
        if is_ahead:
            self.batches.admit()
            self._work(step.number)
        else:
            self._train(step.number)
        self._link.report(Left())
        if leader is not None:
            leader.wait()
        return current

    def _leader(self, number: int) -> AheadLeader:
        if self._order is None or self._restarts != self.batches.restarts:
            self._order = AheadOrder(self.plan, {n: sources(self.plan, n) for n in self.plan.order}, number)
            self._restarts = self.batches.restarts
        return AheadLeader(self.batches.channels, self._order, self._ranks_ahead, number)

    # --- ranks that train ---------------------------------------------------------------------------------------------

    def _train(self, number: int) -> None:
        local_calls = [n for n in self.plan.order if n not in self.ahead and self.placement.takes_part(n)]
        for names, following in pairwise([*self.plan.runs_of(local_calls), ()]):
            is_done = self._run_calls(number, names, following)
            if self.train in names and is_done:
                self.batches.take_update(number + 1)

    def _run_calls(self, number: int, names: Sequence[str], following: Sequence[str] = ()) -> bool:
        is_done = self.runner.run_calls(self.batches.in_flight[number].batch, names, following)
        for name in names:
            self._report(number, name, failed=not is_done)
        return is_done

    def _report(self, number: int, name: str, *, failed: bool = False) -> None:
        assert self._link is not None, "an iteration runs"
        if self.rank in sources(self.plan, name):
            self._link.report(Done(number, name, self.rank, failed))

    def _report_generated(self, number: int, failed: bool) -> None:
        self._report(number, self.generate.name, failed=failed)

    # --- ranks that run ahead -----------------------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        """Run rank 0's tasks until it ends the iteration, and publish the engine's finished samples."""
        assert self._link is not None
        task: AheadTask | None = None
        while not isinstance(task, EndIteration):
            self.alarm.set_activity(f"running ahead of update {number + 1}")
            self.alarm.check()
            is_generating = self.batches.poll(POLL_S if task is None else 0.0)
            self.batches.publish()
            task = self._link.next_task(0.0 if is_generating else WAIT_S)
            if task is not None:
                self._do(task)

    def _do(self, task: AheadTask) -> None:
        match task:
            case RunCall(iteration, call):
                self._run_calls(iteration, [call])
            case TakeUpdate(iteration):
                self.batches.take_update(iteration + 1)
                self.batches.admit()


class AheadLeader(Leader[AheadEvent, AheadTask]):
    """Rank 0's part of one iteration: passes the ranks' events to an `AheadOrder`, and its orders to the ranks.

    Args:
        order: decides the next calls, over all iterations of the run.
        ranks: the ranks that run ahead, which get orders.
        iteration: the iteration that trains.
    """

    def __init__(self, channels: Channels, order: AheadOrder, ranks: Collection[int], iteration: int) -> None:
        super().__init__(channels, ranks)
        self.order = order
        with self._lock:
            self._give(order.begin(iteration))
        self.listen(channels.world - 1, "ahead-leader")  # all ranks report

    def report(self, event: AheadEvent) -> None:
        """Handle an event of a rank."""
        if isinstance(event, Done):
            with self._lock:
                self._give(self.order.done(event.iteration, event.call, event.rank, failed=event.failed))

    def _give(self, orders: Sequence[AheadTask]) -> None:
        for order in orders:
            for rank in self.order.devices_of(order.call) if isinstance(order, RunCall) else self.ranks:
                self.send(rank, order)
