"""`StreamPrices`: seconds of what happens while samples stream: an engine's decode steps and prefills, and a team's
forwards. `pricing` has the formulas. When each happens is in `stream_simulation`.
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


# Samples that are simulated one by one: of a batch, which takes a second for each simulation; at least so many of each
# engine, even if a batch then has more; and at most so many of all engines.
MAX_SAMPLES_OF_BATCH, MIN_OF_ENGINE, MAX_OF_ENGINES = 8192, 64, 32768


@dataclass(frozen=True)
class StreamPrices:
    """The prices of a plan's streamed calls. Seconds are those while nothing else runs.

    Args:
        specs: the models that each call runs, by the call's name.
        weight: samples of equal length that one sample stands for: they are generated, scored and moved together.
            Where a method takes a number of samples or their lengths, these are such samples.
    """

    plan: ExecutionPlan
    specs: Mapping[str, Sequence[ModelSpec]]
    pricing: Pricing
    weight: float = 1.0
    _steps: dict[tuple[str, int, int], float] = field(default_factory=dict)

    @staticmethod
    def of(plan: ExecutionPlan, specs: Mapping[str, Sequence[ModelSpec]], pricing: Pricing) -> StreamPrices:
        """With at most `MAX_SAMPLES_OF_BATCH` simulated samples, or for many engines at most `MAX_OF_ENGINES`, so
        that the time of a simulation is bounded."""
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
        """The response length of each sample, by the sample's index, if this call generates it."""
        engines = self.plan[generation].strategy.dp
        drawn = replace(self.pricing.workload, episodes=self.episodes).engine_lengths(engines)
        return [drawn[at % engines][at // engines] for at in range(self.episodes)]

    def slots(self, generation: str) -> int:
        """The most samples that an engine decodes at once, however few tokens they have."""
        share = engine_samples(self.plan, generation, self.pricing.workload.episodes)
        slots = (self.pricing.engine_slots(spec, self.plan[generation], share)[0] for spec in self.specs[generation])
        return max(1, round(min(slots, default=share) / self.weight))

    def room(self, generation: str) -> float:
        """Tokens of simulated samples whose keys and values an engine's cache holds."""
        share = engine_samples(self.plan, generation, self.pricing.workload.episodes)
        rooms = (self.pricing.engine_slots(spec, self.plan[generation], share)[1] for spec in self.specs[generation])
        return min(rooms, default=math.inf) / self.weight

    def shared(self, generation: str) -> float:
        """Tokens of a prompt that an engine neither computes nor holds for a sample, in the mean, because it has them
        for another sample of the prompt."""
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
        return self._corrected(generation, {"load": seconds}) + self._handover(assignment)

    def end(self, generation: str) -> float:
        """Seconds in which a released engine gives its memory back."""
        return SLEEP / 2 if sleeps(self.plan[generation]) else 0.0

    def step(self, generation: str, batch: int, cached: float) -> float:
        """Seconds of one decode step of an engine.

        Args:
            batch: number of samples.
            cached: mean number of their cached tokens; rounded to 16, the size of a block of vLLM's cache.
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
        """Seconds in which an engine reads samples with so many tokens each.

        Args:
            shared: tokens of all of them that it does not compute.
        """
        tokens, squared = sum(lengths), sum(length * length for length in lengths)
        if not tokens:
            return 0.0
        assignment, times = self.plan[generation], self.weight * self._call(generation).passes
        computed, length = times * (tokens - shared), squared / tokens
        parts = (self.pricing.prefill(s, assignment, computed, length) for s in self.specs[generation])
        return sum(self._corrected(generation, each) for each in parts)

    def score(self, scoring: str, parts: Sequence[Sequence[int]], *, loads: bool) -> float:
        """Seconds of one forward of a team.

        Args:
            parts: the tokens of each sample, by replica of the team.
            loads: the parameters come back from host memory first, if the plan keeps them there.
        """
        passes = self._call(scoring).passes
        slowest = max(parts, key=lambda lengths: (sum(lengths), sum(length * length for length in lengths)))
        tokens, squared = sum(slowest), sum(length * length for length in slowest)
        seconds = passes * self._forward(scoring, self.weight * tokens, self.weight * squared)
        seconds += self.load(scoring) if loads else 0.0
        return (
            seconds + self._functions(scoring, self.weight * len(slowest)) + self._handover(self.plan[scoring]) / SHARES
        )

    def load(self, scoring: str) -> float:
        """Seconds in which the parameters of a call that the plan offloads come back from host memory."""
        assignment = self.plan[scoring]
        if not assignment.offload:
            return 0.0
        inner = assignment.strategy.tp * assignment.strategy.pp
        seconds = sum(spec.bytes / inner / self.pricing.rates.host_bandwidth for spec in self.specs.get(scoring, ()))
        return self._corrected(scoring, {"load": seconds})

    def _forward(self, scoring: str, tokens: float, squared: float) -> float:
        assignment, pricing = self.plan[scoring], self.pricing
        parts = (pricing.forward_of(spec, assignment, tokens, squared) for spec in self.specs.get(scoring, ()))
        return sum(self._corrected(scoring, each) for each in parts) if tokens else 0.0

    def _functions(self, scoring: str, samples: float) -> float:
        """Seconds of reward functions on `samples` samples. 0 for a call that runs models."""
        if self.specs.get(scoring):
            return 0.0
        whole = self.pricing.corrections.functions.get(scoring, 0.0)
        return whole * samples / self.pricing.workload.episodes

    def _handover(self, assignment: Assignment) -> float:
        known = self.pricing.corrections.handover
        if known is not None:
            return known
        return self.pricing.shared(CallCost({"handover": self.pricing.rates.call}), assignment.mesh.size).seconds

    def _corrected(self, name: str, parts: Mapping[str, float]) -> float:
        """Seconds of one replica's work, with the slowdown of its own devices."""
        assignment, call = self.plan[name], self._call(name)
        inner = assignment.strategy.tp * assignment.strategy.pp
        devices = assignment.mesh.size if runs_in_step(call, assignment) else inner
        cost = self.pricing.shared(CallCost(parts), devices, assignment.strategy.pp)
        return cost.seconds * self.pricing.corrections.factor(call, assignment)

    def _call(self, name: str) -> Call:
        return self.plan.graph.call(name)
