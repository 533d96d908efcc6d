"""Whether a plan's samples should stream, and which unfinished ones should move: the threshold, the number of engines
and the fewest tokens of `Migration` are swept in the simulation (RLHFuse, arXiv 2409.13221, section 4).

Which plans are considered is in `choose`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..common.errors import PlanError
from ..plan.dataflow import CallKind
from ..plan.streams import Migration, Streams
from .priced_plan import PricedPlan
from .stream_cost import StreamPrices
from .stream_simulation import MESSAGE


THRESHOLDS = tuple(number / 20 for number in range(1, 20))  # shares of the batch
FLAT = 1.25  # times the seconds of a decode step of one sample, below which more samples cost next to nothing


@dataclass(frozen=True)
class StreamChoice:
    """What streams and migration are worth for one combination of assignments.

    Args:
        whole: without streams.
        still: with streams and without migration. `None` where no call can stream, or where streams cannot save more
            than the estimates' error.
        moved: with the best migration that was found. `None` where samples cannot move.
        reason: why nothing was simulated, where `still` is `None`.
    """

    whole: PricedPlan
    still: PricedPlan | None = None
    moved: PricedPlan | None = None
    reason: str = ""

    @property
    def fastest(self) -> PricedPlan:
        """The plan with the fewest seconds, without what gains no more than the estimates' error."""
        best, error = self.whole, self.whole.space.pricing.rates.error
        for plan in (self.still, self.moved):
            if plan is not None and plan.fits and plan.seconds * (1 + error) < best.seconds:
                best = plan
        return best

    @property
    def sentence(self) -> str:
        """What streams and migration are worth, without a capital letter and a full stop."""
        if self.still is None:
            return self.reason
        parts = [f"scoring while others generate {_gain(self.still, self.whole)}"]
        if self.moved is not None and self.moved.streams is not None and self.moved.streams.migration is not None:
            migration = self.moved.streams.migration
            to = "one engine" if migration.engines == 1 else f"{migration.engines} engines"
            parts.append(
                f"with the last {migration.threshold:.0%} of the samples moved to {to} it "
                f"{_gain(self.moved, self.whole)}"
            )
        return ", ".join(parts)


def _gain(plan: PricedPlan, whole: PricedPlan) -> str:
    share = 1 - plan.seconds / whole.seconds
    return f"saves {share:.1%} of an iteration" if share > 0 else f"costs {-share:.1%} of an iteration"


def choose_streams(whole: PricedPlan, deadline: float = math.inf, *, deterministic: bool = False) -> StreamChoice:
    """The streams of a plan, by simulation.

    Args:
        whole: a plan without streams and without a staleness.
        deadline: of `time.perf_counter`, after which no further simulation begins.
        deterministic: only streams that give the same bits in two runs; so no sample moves.
    """
    try:
        still = replace(whole, streams=Streams())
        streamed = still.plan.streamed
    except PlanError:  # no call can stream
        return StreamChoice(whole, reason="no scoring call can begin while others generate")
    if not _can_gain(whole, streamed):
        reason = "scoring while others generate could save no more than estimates are good for"
        return StreamChoice(whole, reason=reason)
    if time.perf_counter() >= deadline:
        return StreamChoice(whole, reason="no time was left to simulate scoring while others generate")
    still = whole.with_streams(Streams(deterministic=deterministic))
    if deterministic:
        return StreamChoice(whole, still)
    sweep = MigrationSweep(whole, streamed, deadline)
    return StreamChoice(whole, still, sweep.best() if sweep.engines > 1 else None)


def _can_gain(plan: PricedPlan, streamed: tuple[str, ...]) -> bool:
    """Whether an iteration without the streamed scoring calls would be faster by more than the estimates' error."""
    graph, error = plan.space.graph, plan.space.pricing.rates.error
    scored = [name for name in streamed if graph.call(name).kind is CallKind.FORWARD]
    return sum(plan.costs[name].seconds + plan.estimate.moves.get(name, 0.0) for name in scored) > error * plan.seconds


class MigrationSweep:
    """Tries migrations: a few thresholds, their neighbours around the best, then other numbers of engines."""

    def __init__(self, whole: PricedPlan, streamed: tuple[str, ...], deadline: float = math.inf) -> None:
        self.whole, self.deadline = whole, deadline
        plan = replace(whole, streams=Streams()).plan
        self.generation = next(name for name in streamed if plan.graph.call(name).kind is CallKind.GENERATE)
        self.prices = StreamPrices(plan, whole.space.specs, whole.space.pricing)
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
        at = THRESHOLDS.index(threshold)
        for other in THRESHOLDS[max(0, at - 2) : at + 3]:
            yield other, self.engines_of(other)
        for number in (engines - 1, engines + 1, engines // 2, 2 * engines):
            yield threshold, number

    def try_(self, threshold: float, engines: int) -> None:
        key = threshold, engines
        if not 0 < engines < self.engines or key in self.found or time.perf_counter() >= self.deadline:
            return
        migration = Migration(threshold, engines, self.least_tokens(threshold, engines))
        self.found[key] = self.whole.with_streams(Streams(migration=migration))

    def engines_of(self, threshold: float) -> int:
        """RLHFuse's number of engines for the samples that are left: so few samples in each that a decode step takes
        hardly longer than that of one, and no more than its cache has room for."""
        samples = math.ceil(threshold * self.whole.space.pricing.workload.episodes)
        most = min(self.flat_batch, self.room)
        return min(self.engines - 1, max(1, math.ceil(samples / most)))

    @cached_property
    def room(self) -> int:
        """The number of samples of maximum length for which an engine's cache has room."""
        pricing, assignment = self.whole.space.pricing, self.prices.plan[self.generation]
        specs = self.whole.space.specs[self.generation]
        return max(1, min(pricing.slots(spec, assignment, pricing.workload.episodes) for spec in specs))

    @cached_property
    def flat_batch(self) -> int:
        """The batch from which a decode step takes `FLAT` times as long as that of one sample, or longer."""
        work = self.whole.space.pricing.workload
        cached = work.longest - work.mean_response / 2
        batch, most = 1, self.prices.step(self.generation, 1, cached) * FLAT
        while batch < work.episodes and self.prices.step(self.generation, batch + 1, cached) <= most:
            batch += 1
        return batch

    def least_tokens(self, threshold: float, engines: int) -> int:
        """The number of decode steps that reading a sample again takes: one that ends before then had better stay."""
        work = self.whole.space.pricing.workload
        batch = max(1, round(threshold * work.episodes / engines))
        again = self.prices.prefill(self.generation, [round(work.longest)]) + 3 * MESSAGE
        return 1 + math.floor(again / self.prices.step(self.generation, batch, work.longest))
