"""`StreamPrices`: seconds of what happens while samples stream: an engine's decode steps and prefills, and a team's
forwards. `cost` has the formulas. When each happens is in `stream_simulation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..plan.assignment import Assignment, sleeps
from ..plan.dataflow import Call, CallKind, Role
from ..plan.execution_plan import ExecutionPlan
from ..plan.model_spec import ModelSpec
from .call_cost import CallCost
from .cost import ALLOCATE, SLEEP, Pricing
from .dispatcher import SHARES
from .stream import Stream, engine_samples, stream_of


@dataclass(frozen=True)
class StreamPrices:
    """The prices of a plan's streamed calls. Seconds are those while nothing else runs.

    Args:
        specs: the models that each call runs, by the call's name.
    """

    plan: ExecutionPlan
    specs: Mapping[str, Sequence[ModelSpec]]
    pricing: Pricing
    _steps: dict[tuple[str, int, int], float] = field(default_factory=dict)

    @cached_property
    def stream(self) -> Stream:
        """The streamed calls, with the workload's samples."""
        work, plan = self.pricing.workload, self.plan
        budgets = {
            name: self.pricing.budget(CallKind.FORWARD, plan[name].strategy)
            for name in plan.streamed
            if plan.graph.call(name).kind is CallKind.FORWARD
        }
        prompts = [round(work.prompt_tokens)] * work.episodes
        return stream_of(plan, prompts, work.response_tokens[-1], budgets)

    def lengths(self, generation: str) -> list[int]:
        """The response length of each sample, by the sample's index, if this call generates it."""
        engines = self.plan[generation].strategy.dp
        drawn = self.pricing.workload.engine_lengths(engines)
        return [drawn[at % engines][at // engines] for at in range(self.pricing.workload.episodes)]

    def slots(self, generation: str) -> int:
        """The most samples that an engine decodes at once: all that it has, if its cache has room for them."""
        share = engine_samples(self.plan, generation, self.pricing.workload.episodes)
        slots = (self.pricing.slots(spec, self.plan[generation], share) for spec in self.specs[generation])
        return min(slots, default=share)

    def start(self, generation: str) -> float:
        """Seconds from an engine's parameters to its first prefill: receiving prompts, waking, loading."""
        assignment = self.plan[generation]
        seconds = 0.0
        for spec in self.specs[generation]:
            load = spec.bytes / (assignment.strategy.tp * assignment.strategy.pp) / self.pricing.rates.host_bandwidth
            if sleeps(assignment):
                seconds += load * (2 if assignment.offload else 1) + SLEEP / 2
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
            seconds = 0.0
            for spec in self.specs[generation]:
                parts = self.pricing.decode_step(spec, assignment, batch * call.passes, 16 * key[2])
                seconds += self._corrected(generation, parts)
            self._steps[key] = seconds
        return self._steps[key]

    def prefill(self, generation: str, lengths: Sequence[int]) -> float:
        """Seconds in which an engine reads samples with so many tokens each."""
        tokens, squared = sum(lengths), sum(length * length for length in lengths)
        if not tokens:
            return 0.0
        assignment, passes = self.plan[generation], self._call(generation).passes
        parts = (self.pricing.prefill(s, assignment, passes * tokens, squared / tokens) for s in self.specs[generation])
        return sum(self._corrected(generation, each) for each in parts)

    def score(self, scoring: str, parts: Sequence[Sequence[int]], *, loads: bool) -> float:
        """Seconds of one forward of a team.

        Args:
            parts: the tokens of each sample, by replica of the team.
            loads: the parameters come back from host memory first, if the plan keeps them there.
        """
        passes = self._call(scoring).passes
        slowest = max(parts, key=lambda lengths: (sum(lengths), sum(length * length for length in lengths)))
        seconds = passes * self._forward(scoring, sum(slowest), sum(length * length for length in slowest))
        seconds += self.load(scoring) if loads else 0.0
        return seconds + self._functions(scoring, len(slowest)) + self._handover(self.plan[scoring]) / SHARES

    def again(self, name: str, seconds: float) -> float:
        """Seconds of a streamed call's further passes over the batch, after the streams, of `seconds` of all passes."""
        call = self._call(name)
        repeats = call.kind is CallKind.FORWARD and call.role is Role.ACTOR
        return seconds * (1 - 1 / self.pricing.workload.policy_forwards) if repeats else 0.0

    def load(self, scoring: str) -> float:
        """Seconds in which the parameters of a call that the plan offloads come back from host memory."""
        assignment = self.plan[scoring]
        if not assignment.offload:
            return 0.0
        inner = assignment.strategy.tp * assignment.strategy.pp
        seconds = sum(spec.bytes / inner / self.pricing.rates.host_bandwidth for spec in self.specs.get(scoring, ()))
        return self._corrected(scoring, {"load": seconds})

    def _forward(self, scoring: str, tokens: int, squared: int) -> float:
        assignment = self.plan[scoring]
        parts = (self.pricing.forward_of(spec, assignment, tokens, squared) for spec in self.specs.get(scoring, ()))
        return sum(self._corrected(scoring, each) for each in parts) if tokens else 0.0

    def _functions(self, scoring: str, samples: int) -> float:
        """Of reward functions, which were measured for a replica's share of the batch."""
        if self.specs.get(scoring):
            return 0.0
        whole = self.pricing.corrections.functions.get(scoring, 0.0)
        return whole * samples * self.plan[scoring].strategy.dp / self.pricing.workload.episodes

    def _handover(self, assignment: Assignment) -> float:
        known = self.pricing.corrections.handover
        if known is not None:
            return known
        return self.pricing.shared(CallCost({"handover": self.pricing.rates.call}), assignment.mesh.size).seconds

    def _corrected(self, name: str, parts: Mapping[str, float]) -> float:
        """Seconds of one replica's work, with the slowdown of its own devices."""
        assignment, call = self.plan[name], self._call(name)
        inner = assignment.strategy.tp * assignment.strategy.pp
        devices = assignment.mesh.size if assignment.strategy.zero_stage == 3 else inner
        return self.pricing.shared(CallCost(parts), devices).seconds * self.pricing.corrections.factor(call, assignment)

    def _call(self, name: str) -> Call:
        return self.plan.graph.call(name)
