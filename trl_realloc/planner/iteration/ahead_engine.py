"""`EngineAhead`: an engine that generates batch after batch ahead of the training, and the ages of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import overload

from ...plan.execution_plan import ExecutionPlan
from ...plan.model_spec import ModelSpec
from ..cost.call_cost import CallCost
from ..cost.pricing import Pricing
from .activities import Activities
from .stream_cost import StreamPrices
from .stream_engine import EngineWork, SimulatedEngine


MAX_SAMPLES_AHEAD = 512  # largest number of simulated samples of a batch in an engine; more only repeat the pattern


@dataclass(frozen=True)
class EnginePrices(StreamPrices):
    """The prices of identical engines that all do the same at the same time."""

    def _corrected(self, name: str, parts: Mapping[str, float]) -> float:
        """Seconds with the slowdown by the devices of all engines, which work at the same time."""
        assignment = self.plan[name]
        cost = self.pricing.shared(CallCost(parts), assignment.mesh.size)
        return cost.seconds * self.pricing.calibration.factor(self._call(name), assignment)


def engine_prices(
    plan: ExecutionPlan, call: str, specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing
) -> EnginePrices:
    """The prices of a call's engines."""
    share = math.ceil(pricing.workload.episodes / plan[call].strategy.dp)
    return EnginePrices(plan, specs, pricing, weight=max(1.0, share / MAX_SAMPLES_AHEAD))


class _Repeated(Sequence[int]):
    """Repeats the numbers of one or several batches for all batches."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        assert isinstance(index, int), "a sample's number"
        return self._numbers[index % len(self._numbers)]

    def __len__(self) -> int:
        return len(self._numbers)


class EngineAhead:
    """Engines of a call that do the same at the same time. One of them is simulated.

    Args:
        units: units (`ahead_simulation._Units`) of their devices.
        devices: number of their devices on each node.
        engines: number of engines.
        batches: response lengths of the simulated engine's samples, as many in each batch; later batches repeat them.
        generated: callback with a batch that has ended.

    Attributes:
        version: number of updates of the parameters so far.
        tokens: tokens of all engines, by batch.
        ages: sum over these tokens of the number of updates from the policy that sampled the token to the policy that
            trains on it, by batch.
        oldest: largest such number of a token, by batch.
    """

    def __init__(
        self,
        call: str,
        prices: EnginePrices,
        activities: Activities,
        *,
        units: Iterable[int],
        devices: Mapping[int, int],
        engines: int,
        batches: Sequence[Sequence[int]],
        generated: Callable[[int], None],
    ) -> None:
        self.units, self.engines, self._generated = frozenset(units), engines, generated
        self._size = len(batches[0])
        prompts = [round(prices.pricing.workload.prompt_tokens)]
        lengths = [length for batch in batches for length in batch]
        self._work = EngineWork(call, devices, _Repeated(prompts), _Repeated(lengths))
        self._engine = SimulatedEngine(
            self._work, (), prices, activities, finished=self._finished, withdrawn=lambda samples: None
        )
        self._left: dict[int, int] = {}  # batch -> samples that have not ended
        self._ended: dict[int, int] = {}  # batch -> tokens of the samples that have ended
        self._counted: dict[int, int] = {}  # batch -> tokens that are in `tokens` and `ages`
        self.version = 0
        self.tokens: dict[int, int] = {}
        self.ages: dict[int, int] = {}
        self.oldest: dict[int, int] = {}
        self.admitted_at: dict[int, float] = {}
        self.ended_at: dict[int, float] = {}
        self._activities = activities
        self._engine.start()

    def admit(self, batch: int) -> None:
        """Begin a batch."""
        self.admitted_at[batch] = self._activities.now
        self._left[batch], self._ended[batch], self._counted[batch] = self._size, 0, 0
        self._engine.give({batch * self._size + index: 0 for index in range(self._size)})
        if not self._size:  # an engine without samples
            self.tokens[batch] = self.ages[batch] = self.oldest[batch] = 0
            self.ended_at[batch] = self._activities.now
            self._activities.start(0.0, {}, partial(self._generated, batch))

    def pause(self) -> None:
        """Something else uses the devices."""
        self._engine.pause()

    def resume(self) -> None:
        """The devices are free again."""
        self._engine.resume()

    def update(self) -> None:
        """Use the parameters after the next update. The engine is paused, but its last step may still run."""
        has = dict.fromkeys(self._left, 0)
        for index, tokens in self._engine.running().items():
            has[index // self._size] += tokens
        for batch, tokens in has.items():
            self._count(batch, tokens)
        self.version += 1

    def _finished(self, samples: Sequence[int]) -> None:
        for index in samples:
            batch = index // self._size
            self._left[batch] -= 1
            self._ended[batch] += self._work.lengths[index]
            if not self._left[batch]:
                del self._left[batch]
                self.ended_at[batch] = self._activities.now
                self._count(batch, 0)
                self._generated(batch)

    def _count(self, batch: int, running: int) -> None:
        """Count the tokens of a batch since the last update. They are of the current version."""
        total = self._ended[batch] + running
        new, self._counted[batch] = total - self._counted[batch], total
        if new <= 0:
            return
        age = batch - self.version
        self.tokens[batch] = self.tokens.get(batch, 0) + self.engines * new
        self.ages[batch] = self.ages.get(batch, 0) + self.engines * new * age
        self.oldest[batch] = max(self.oldest.get(batch, 0), age)
