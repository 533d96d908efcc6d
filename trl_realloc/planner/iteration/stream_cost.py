"""`StreamPrices`: seconds of an engine's decode steps and prefills and of a team's forwards, while samples stream. The
formulas are in `pricing`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...plan.assignment import Assignment, runs_in_step, sleeps
from ...plan.dataflow import Call
from ...plan.execution_plan import ExecutionPlan
from ...plan.model_spec import ModelSpec
from ..cost.call_cost import CallCost
from ..cost.pricing import ALLOCATE, SLEEP, Pricing
from .stream import Stream, engine_samples, replicas_of, stream_of
from .stream_dispatcher import SHARES


# Limits of the number of simulated samples: the largest of a batch (a simulation then takes a second), the smallest of
# an engine, which exceeds the first limit if there are many engines, and the largest of all engines together.
MAX_SAMPLES_OF_BATCH, MIN_OF_ENGINE, MAX_OF_ENGINES = 8192, 64, 32768


@dataclass(frozen=True)
class StreamPrices:
    """The prices of a plan's streamed calls. Seconds are those while nothing else runs.

    Args:
        specs: models that each call runs, by the call's name.
        weight: number of samples of equal length that one simulated sample stands for. The methods take numbers and
            lengths of simulated samples.
    """

    plan: ExecutionPlan
    specs: Mapping[str, Sequence[ModelSpec]]
    pricing: Pricing
    weight: float = 1.0
    _steps: dict[tuple[str, int, int], float] = field(default_factory=dict)

    @staticmethod
    def of(plan: ExecutionPlan, specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing) -> StreamPrices:
        """The prices with a weight that bounds the number of simulated samples, and so the time of a simulation."""
        episodes, engines = pricing.workload.episodes, len(replicas_of(plan, plan.streamed[0]))
        weight = min(math.ceil(episodes / MAX_SAMPLES_OF_BATCH), episodes // (engines * MIN_OF_ENGINE))
        return StreamPrices(plan, specs, pricing, max(1, weight, math.ceil(episodes / MAX_OF_ENGINES)))

    @property
    def episodes(self) -> int:
        """The number of simulated samples."""
        return math.ceil(self.pricing.workload.episodes / self.weight)

    @cached_property
    def stream(self) -> Stream:
        """The streamed calls, with the workload's samples."""
        work, plan = self.pricing.workload, self.plan
        budgets = {
            name: max(1, int(self.pricing.budget(plan.graph.call(name).kind, plan[name].strategy) / self.weight))
            for name in plan.streamed[1:]
        }
        prompts = [round(work.prompt_tokens)] * self.episodes
        return stream_of(plan, prompts, work.response_tokens[-1], budgets)

    def lengths(self, generation: str) -> list[int]:
        """The response length of each sample of this generation call, by the sample's index."""
        engines = self.plan[generation].strategy.dp
        by_engine = replace(self.pricing.workload, episodes=self.episodes).engine_lengths(engines)
        return [by_engine[index % engines][index // engines] for index in range(self.episodes)]

    def slots(self, generation: str) -> int:
        """The largest number of samples that an engine decodes at once, whatever their lengths."""
        share = engine_samples(self.plan, generation, self.pricing.workload.episodes)
        slots = (self.pricing.engine_slots(spec, self.plan[generation], share)[0] for spec in self.specs[generation])
        return max(1, round(min(slots, default=share) / self.weight))

    def room(self, generation: str) -> float:
        """Tokens of simulated samples whose keys and values an engine's cache holds."""
        share = engine_samples(self.plan, generation, self.pricing.workload.episodes)
        rooms = (self.pricing.engine_slots(spec, self.plan[generation], share)[1] for spec in self.specs[generation])
        return min(rooms, default=math.inf) / self.weight

    def shared(self, generation: str) -> float:
        """Mean number of prompt tokens per sample that an engine neither computes nor caches, because it has them from
        another sample of the prompt."""
        work, assignment = self.pricing.workload, self.plan[generation]
        if assignment.engine != "vllm":
            return 0.0
        return work.prompt_tokens - work.engine_prompt(math.ceil(work.episodes / assignment.strategy.dp))

    def start(self, generation: str) -> float:
        """Seconds from an engine's parameters to its first prefill: receiving prompts, waking, loading."""
        assignment = self.plan[generation]
        seconds = 0.0
        for spec in self.specs[generation]:
            load = self.pricing.load_seconds(spec, assignment)
            if sleeps(assignment):
                seconds += load + SLEEP / 2
            elif assignment.drop:
                seconds += ALLOCATE
            elif assignment.engine == "vllm":
                seconds += load
        return self._corrected(generation, {"load": seconds}) + self._dispatch(assignment)

    def end(self, generation: str) -> float:
        """Seconds in which a released engine frees its memory."""
        return SLEEP / 2 if sleeps(self.plan[generation]) else 0.0

    def step(self, generation: str, batch: int, cached: float) -> float:
        """Seconds of one decode step of an engine.

        Args:
            batch: number of samples.
            cached: mean number of cached tokens of a sample; rounded to 16, the block size of vLLM's cache.
        """
        key = generation, batch, round(cached / 16)
        if key not in self._steps:
            call, assignment = self._call(generation), self.plan[generation]
            seconds, samples = 0.0, max(1, round(self.weight * batch)) * call.passes
            for spec in self.specs[generation]:
                parts = self.pricing.decode_step(spec, assignment, samples, 16 * key[2])
                seconds += self._corrected(generation, parts)
            self._steps[key] = seconds
        return self._steps[key]

    def prefill(self, generation: str, lengths: Sequence[int], shared: float = 0.0) -> float:
        """Seconds of an engine's prefill of samples with these lengths, without `shared` of their tokens, which are not
        computed again."""
        tokens, squared = sum(lengths), sum(length * length for length in lengths)
        if not tokens:
            return 0.0
        assignment, times = self.plan[generation], self.weight * self._call(generation).passes
        computed, length = times * (tokens - shared), squared / tokens
        parts = (self.pricing.prefill(s, assignment, computed, length) for s in self.specs[generation])
        return sum(self._corrected(generation, spec_parts) for spec_parts in parts)

    def score(self, scoring: str, parts: Sequence[Sequence[int]], *, loads: bool) -> float:
        """Seconds of one forward of a team.

        Args:
            parts: tokens of each sample, by replica of the team.
            loads: whether offloaded parameters are loaded from host memory first.
        """
        passes = self._call(scoring).passes
        slowest = max(parts, key=lambda lengths: (sum(lengths), sum(length * length for length in lengths)))
        tokens, squared = sum(slowest), sum(length * length for length in slowest)
        seconds = passes * self._forward(scoring, self.weight * tokens, self.weight * squared)
        seconds += self.load(scoring) if loads else 0.0
        return (
            seconds + self._functions(scoring, self.weight * len(slowest)) + self._dispatch(self.plan[scoring]) / SHARES
        )

    def load(self, scoring: str) -> float:
        """Seconds in which the parameters of an offloaded call are loaded from host memory."""
        assignment = self.plan[scoring]
        if not assignment.offload:
            return 0.0
        inner = assignment.strategy.tp * assignment.strategy.pp
        seconds = sum(spec.bytes / inner / self.pricing.rates.host_bandwidth for spec in self.specs.get(scoring, ()))
        return self._corrected(scoring, {"load": seconds})

    def _forward(self, scoring: str, tokens: float, squared: float) -> float:
        assignment, pricing = self.plan[scoring], self.pricing
        parts = (pricing.forward_of(spec, assignment, tokens, squared) for spec in self.specs.get(scoring, ()))
        return sum(self._corrected(scoring, spec_parts) for spec_parts in parts) if tokens else 0.0

    def _functions(self, scoring: str, samples: float) -> float:
        """Seconds of reward functions on `samples` samples. 0 for a call that runs models."""
        if self.specs.get(scoring):
            return 0.0
        whole = self.pricing.calibration.functions.get(scoring, 0.0)
        return whole * samples / self.pricing.workload.episodes

    def _dispatch(self, assignment: Assignment) -> float:
        measured = self.pricing.calibration.dispatch
        if measured is not None:
            return measured
        return self.pricing.shared(CallCost({"dispatch": self.pricing.rates.call}), assignment.mesh.size).seconds

    def _corrected(self, name: str, parts: Mapping[str, float]) -> float:
        """Seconds of one replica's work, with the slowdown of its devices."""
        assignment, call = self.plan[name], self._call(name)
        inner = assignment.strategy.tp * assignment.strategy.pp
        devices = assignment.mesh.size if runs_in_step(call, assignment) else inner
        cost = self.pricing.shared(CallCost(parts), devices, assignment.strategy.pp)
        return cost.seconds * self.pricing.calibration.factor(call, assignment)

    def _call(self, name: str) -> Call:
        return self.plan.graph.call(name)
