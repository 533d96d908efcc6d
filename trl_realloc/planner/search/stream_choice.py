"""Choice of streams for a plan, and of their migration: a sweep of the threshold, the number of engines and the
fewest tokens of `Migration` in the simulation (RLHFuse, arXiv 2409.13221, section 4).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from ...common.errors import PlanError
from ...plan.dataflow import CallKind
from ...plan.streams import Migration, Streams
from ..iteration.stream_cost import StreamPrices
from ..iteration.stream_simulation import MESSAGE
from .ladder import STREAMING, Option
from .priced_plan import PricedPlan


MAX_STREAMING = 1024  # devices; on more, a simulation takes several seconds
WORSE = 0.25  # a plan that is slower than the best plan by more than this share is not simulated with streams
THRESHOLDS = tuple(number / 20 for number in range(1, 20))  # shares of the batch
FLAT = 1.25  # a batch is nearly free if its decode step takes no more than this times the step of one sample


def choose_streams(plans: Sequence[PricedPlan], deadline: float = math.inf, *, deterministic: bool = False) -> Option:
    """Streams of the plan that is fastest with its best streams. An earlier plan is preferred if the difference is
    within the error of the estimates.

    Args:
        plans: plans without streams and without a staleness.
        deadline: value of `time.perf_counter` after which no further simulation begins.
        deterministic: whether two runs must give the same bits, so that no sample moves.
    """
    space = plans[0].space
    if space.cluster.size > MAX_STREAMING:
        return Option(STREAMING, plans[0], reason="not simulated for so large a cluster")
    best = streams_of(plans[0], deadline, deterministic=deterministic)
    tried = [plans[0].calls]
    for plan in plans[1:] if space.is_small else ():  # on large clusters they are priced without transfer schedules
        too_slow = plan.seconds > plans[0].seconds * (1 + WORSE)
        if plan.calls in tried or too_slow or time.perf_counter() >= deadline:
            continue
        tried.append(plan.calls)
        option = streams_of(plan, deadline, deterministic=deterministic)
        if option.is_chosen and option.fastest.seconds * (1 + space.pricing.rates.error) < best.fastest.seconds:
            best = option
    return best


def streams_of(baseline: PricedPlan, deadline: float = math.inf, *, deterministic: bool = False) -> Option:
    """The streams of a plan, by simulation: without migration, and with the best migration of a sweep. The arguments
    are those of `choose_streams`."""
    try:
        streamed = replace(baseline, streams=Streams()).plan.streamed
    except PlanError:  # no call can stream
        return Option(STREAMING, baseline, reason="no scoring call can begin while others generate")
    if not _can_gain(baseline, streamed):
        reason = "scoring while others generate could save no more than the estimates' error"
        return Option(STREAMING, baseline, reason=reason)
    if time.perf_counter() >= deadline:
        return Option(STREAMING, baseline, reason="no time was left to simulate scoring while others generate")
    plans = {STREAMING: baseline.with_streams(Streams(deterministic=deterministic))}
    sweep = MigrationSweep(baseline, streamed, deadline)
    if not deterministic and sweep.engines > 1 and (moved := sweep.best()) is not None:
        plans[f"{STREAMING} with {_moves(moved)}"] = moved
    return Option(STREAMING, baseline, plans)


def _moves(plan: PricedPlan) -> str:
    assert plan.streams is not None and plan.streams.migration is not None, "a plan of the sweep"
    migration = plan.streams.migration
    to = "one engine" if migration.engines == 1 else f"{migration.engines} engines"
    return f"the last {migration.threshold:.0%} moved to {to}"


def _can_gain(plan: PricedPlan, streamed: tuple[str, ...]) -> bool:
    """True if the time of the streamed scoring calls, the most that streams can save, exceeds the error of the
    estimates."""
    graph, error = plan.space.graph, plan.space.pricing.rates.error
    scored = [name for name in streamed if graph.call(name).kind is CallKind.FORWARD]
    return sum(plan.costs[name].seconds + plan.estimate.moves.get(name, 0.0) for name in scored) > error * plan.seconds


class MigrationSweep:
    """Tries migrations: a few thresholds, their neighbours around the best, then other numbers of engines."""

    def __init__(self, baseline: PricedPlan, streamed: tuple[str, ...], deadline: float = math.inf) -> None:
        self.baseline, self.deadline = baseline, deadline
        plan = replace(baseline, streams=Streams()).plan
        self.generation = next(name for name in streamed if plan.graph.call(name).kind is CallKind.GENERATE)
        self.prices = StreamPrices(plan, baseline.space.specs, baseline.space.pricing)
        assignment = plan[self.generation]
        self.engines = assignment.strategy.dp if assignment.engine == "vllm" else 1
        self.found: dict[tuple[float, int], PricedPlan] = {}

    def best(self) -> PricedPlan | None:
        for threshold in THRESHOLDS[::3]:
            self.try_(threshold, self.engines_of(threshold))
        for _ in range(2):
            if self.found:
                threshold, engines = min(self.found, key=lambda key: self.found[key].seconds)
                for key in self._neighbours(threshold, engines):
                    self.try_(*key)
        return min(self.found.values(), key=lambda plan: plan.seconds, default=None)

    def _neighbours(self, threshold: float, engines: int) -> Iterator[tuple[float, int]]:
        index = THRESHOLDS.index(threshold)
        for other in THRESHOLDS[max(0, index - 2) : index + 3]:
            yield other, self.engines_of(other)
        for number in (engines - 1, engines + 1, engines // 2, 2 * engines):
            yield threshold, number

    def try_(self, threshold: float, engines: int) -> None:
        key = threshold, engines
        if not 0 < engines < self.engines or key in self.found or time.perf_counter() >= self.deadline:
            return
        migration = Migration(threshold, engines, self.least_tokens(threshold, engines))
        self.found[key] = self.baseline.with_streams(Streams(migration=migration))

    def engines_of(self, threshold: float) -> int:
        """RLHFuse's number of engines for the unfinished samples: each engine gets so few that a decode step takes
        hardly longer than that of one sample, and no more than its cache has room for."""
        samples = math.ceil(threshold * self.baseline.space.pricing.workload.episodes)
        most = min(self.flat_batch, self.room)
        return min(self.engines - 1, max(1, math.ceil(samples / most)))

    @cached_property
    def room(self) -> int:
        """The number of samples of maximum length for which an engine's cache has room."""
        pricing, assignment = self.baseline.space.pricing, self.prices.plan[self.generation]
        specs = self.baseline.space.specs[self.generation]
        return max(1, min(pricing.slots(spec, assignment, pricing.workload.episodes) for spec in specs))

    @cached_property
    def flat_batch(self) -> int:
        """The largest batch whose decode step takes at most `FLAT` times as long as that of one sample."""
        work = self.baseline.space.pricing.workload
        cached = work.longest - work.mean_response / 2
        batch, most = 1, self.prices.step(self.generation, 1, cached) * FLAT
        while batch < work.episodes and self.prices.step(self.generation, batch + 1, cached) <= most:
            batch += 1
        return batch

    def least_tokens(self, threshold: float, engines: int) -> int:
        """The number of decode steps in which a moved sample could be read again. A sample with fewer tokens left is
        not worth moving."""
        work = self.baseline.space.pricing.workload
        batch = max(1, round(threshold * work.episodes / engines))
        again = self.prices.prefill(self.generation, [round(work.longest)]) + 3 * MESSAGE
        step = self.prices.step(self.generation, batch, work.longest)
        # measured rates may give a step no time; then no sample is worth moving
        return 1 + math.floor(again / step if step else work.longest)
