"""`SamplesAhead`: the samples of simulated iterations with a staleness that are scored as they end, engine by engine.

When they are reported, and when their forwards run, is in `ahead_simulation`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..plan.execution_plan import ExecutionPlan
from ..plan.model_spec import ModelSpec
from .cost import Pricing
from .dispatcher import Score
from .stream import replicas_of
from .stream_cost import StreamPrices


MOST_SAMPLES = 512  # of a batch that are simulated one by one, in each of some thirty batches
LEAST_OF_ENGINE = 16  # samples of an engine that are, even if those of all engines are more than `MOST_SAMPLES`

Finished = tuple[int, int]  # index of a sample in its batch, tokens of its response


class SamplesAhead:
    """The samples of a plan that has streams beside a staleness.

    Attributes:
        prices: of engines and forwards.
        stream: the streamed calls of every iteration.
    """

    def __init__(self, plan: ExecutionPlan, specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing) -> None:
        self.engines = len(replicas_of(plan, plan.streamed[0]))
        episodes = pricing.workload.episodes
        weight = min(math.ceil(episodes / MOST_SAMPLES), episodes // (self.engines * LEAST_OF_ENGINE))
        self.prices = StreamPrices(plan, specs, pricing, max(1, weight))
        self.stream = replace(self.prices.stream, scores_beside=True)
        self._teams = {scoring.name: scoring.teams for scoring in self.stream.scorings}
        work = replace(pricing.workload, episodes=self.prices.episodes)
        self._lengths = work.engine_lengths_by_batch(self.engines)  # by batch and engine
        self._ended: list[dict[int, list[Finished]]] = [defaultdict(list) for _ in range(self.engines)]
        self._latest: dict[int, str] = {}  # rank -> call of its latest forward

    def batches(self, engine: int) -> list[tuple[int, ...]]:
        """The response lengths of an engine's samples in each batch; later batches repeat them."""
        return [batch[engine] for batch in self._lengths]

    def finish(self, engine: int, batch: int, samples: Sequence[tuple[int, int]]) -> None:
        """An engine has ended samples of a batch.

        Args:
            samples: (place among the engine's samples, tokens of the response) of each.
        """
        self._ended[engine][batch] += [(self.stream.generation.samples[engine][at], tokens) for at, tokens in samples]

    def take(self, engine: int) -> list[tuple[int, list[Finished]]]:
        """By batch, the samples that an engine has ended since this was last asked."""
        taken = sorted(self._ended[engine].items())
        self._ended[engine].clear()
        return taken

    def ranks(self, score: Score) -> list[int]:
        """The ranks that run a forward."""
        return [rank for replica in self._teams[score.call][score.team] for rank in replica]

    def seconds(self, batch: int, score: Score) -> float:
        """Of a forward."""
        ranks, of_batch = self.ranks(score), self._lengths[batch % len(self._lengths)]
        prompts, engines = self.stream.prompts, self.engines  # samples are dealt to engines in turn
        parts = [[prompts[at] + of_batch[at % engines][at // engines] for at in part] for part in score.parts]
        loads = self._latest.get(ranks[0]) != score.call
        self._latest |= dict.fromkeys(ranks, score.call)
        return self.prices.score(score.call, parts, loads=loads)

    def count(self, score: Score) -> int:
        """The samples of a forward in each replica of its team, of all that simulated ones stand for."""
        return round(self.prices.weight * sum(map(len, score.parts)) / len(score.parts))
