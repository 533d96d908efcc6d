"""The planner's simulation of the runs of `fusion_measured`, from unit times fitted to the serial runs alone:
seconds of a decode step by its batch, and of a forward by its tokens. So the serial seconds are fitted, those of the
other modes are not. How much devices slow each other down is measured apart (`Rank.slowdowns`). The simulation gets the
lengths that each run's responses had.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from trl_realloc.plan.dataflow import CallKind
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.hardware import DEVICES, Sharing
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.iteration.activities import Activities
from trl_realloc.planner.iteration.stream import Stream, replicas_of, stream_of
from trl_realloc.planner.iteration.stream_cost import StreamPrices
from trl_realloc.planner.iteration.stream_simulation import simulate_streams


GENERATE = "actor.generate"


@dataclass(frozen=True)
class UnitTimes:
    """Seconds while no other device computes, fitted to serial runs.

    Args:
        start: from an engine's prompts to its first decode step.
        step, sample: of a decode step: `step + sample * batch`.
        token: of each token of a forward, by call.
    """

    start: float
    step: float
    sample: float
    token: Mapping[str, float]

    @staticmethod
    def of(serial: Sequence[Mapping[str, Any]], plan: ExecutionPlan, prompt: int, sharing: Sharing) -> UnitTimes:
        engines = len(replicas_of(plan, GENERATE))
        rows, seconds, tokens = [], [], defaultdict[str, list[float]](list)
        for run in serial:
            lengths = [len(response) for response in run["responses"]]
            ends = [end for call, _, _, end in run["spans"] if call == GENERATE]
            for call, device, start, end in run["spans"]:
                if call == GENERATE:
                    drawn = lengths[device::engines]
                    rows.append((1.0, max(drawn), sum(drawn)))
                    seconds.append(_alone(start, end, ends, sharing))
                else:  # the samples are balanced by their tokens, and all devices score at once
                    alone = (end - start) / sharing.slowdown(plan.cluster.size)
                    tokens[call].append(alone / (sum(lengths) + prompt * len(lengths)) * engines)
        (start_s, step, sample), _ = nnls(np.array(rows), np.array(seconds))
        return UnitTimes(
            float(start_s), float(step), float(sample), {call: median(each) for call, each in tokens.items()}
        )


def _alone(start: float, end: float, ends: Sequence[float], sharing: Sharing) -> float:
    """Seconds that an engine would have taken alone from `start` to `end`, if all engines started together."""
    seconds, at = 0.0, start
    for until in sorted(other for other in ends if other <= end):
        seconds += max(0.0, until - at) / sharing.slowdown(sum(other >= until for other in ends))
        at = max(at, until)
    return seconds


@dataclass(frozen=True)
class FittedPrices(StreamPrices):
    """`UnitTimes` in place of the cost model's, for samples whose lengths are known."""

    times: UnitTimes = field(default_factory=lambda: UnitTimes(0.0, 0.0, 0.0, {}))
    known: Sequence[int] = ()
    prompt: int = 0
    budget: int = 0

    @property
    def stream(self) -> Stream:  # type: ignore[override]
        forwards = [name for name in self.plan.streamed if self.plan.graph.call(name).kind is CallKind.FORWARD]
        return stream_of(
            self.plan, [self.prompt] * len(self.known), max(self.known), dict.fromkeys(forwards, self.budget)
        )

    def lengths(self, generation: str) -> list[int]:
        return list(self.known)

    def slots(self, generation: str) -> int:
        return len(self.known)

    def room(self, generation: str) -> float:
        return math.inf

    def start(self, generation: str) -> float:
        return self.times.start

    def end(self, generation: str) -> float:
        return 0.0

    def step(self, generation: str, batch: int, cached: float) -> float:
        return self.times.step + self.times.sample * batch

    def prefill(self, generation: str, lengths: Sequence[int], shared: float = 0.0) -> float:
        """Of the first prompts it is in `start`; of samples that move, as a forward of the policy."""
        return (
            0.0 if all(length == self.prompt for length in lengths) else self._forward_s("reference.forward", lengths)
        )

    def score(self, scoring: str, parts: Sequence[Sequence[int]], *, loads: bool) -> float:
        return max(self._forward_s(scoring, part) for part in parts)

    def _forward_s(self, call: str, lengths: Sequence[int]) -> float:
        return self.times.token[call] * sum(lengths)


def simulated(
    plans: Mapping[str, ExecutionPlan],
    runs: Sequence[Mapping[str, Any]],
    *,
    prompt: int,
    budget: int,
    slowdowns: Sequence[tuple[int, float]],
) -> dict[str, list[float]]:
    """By mode, the expected seconds of generation and scoring of each batch, in the order of the batches.

    Args:
        plans: by mode.
        runs: the figures of the runs of generation and scoring.
        prompt: tokens of every prompt.
        budget: most tokens of a forward.
        slowdowns: (number of devices that compute, the factor by which each is slower than one alone), ascending.
    """
    sharing = Sharing(tuple((devices, max(1.0, slowdown)) for devices, slowdown in slowdowns))
    serial = sorted((run for run in runs if run["mode"] == "serial"), key=lambda run: run["repeat"])
    times = UnitTimes.of(serial, plans["serial"], prompt, sharing)
    expected: dict[str, list[float]] = {}
    for mode, plan in plans.items():
        expected[mode] = []
        for run in serial:
            lengths = [len(response) for response in run["responses"]]
            if plan.streams is None:
                expected[mode].append(_serial(times, plan, lengths, prompt, sharing))
                continue
            rates = AnalyticRates(DEVICES["h100"], sharing)
            pricing = Pricing(plan.cluster, Workload(len(lengths), prompt, tuple(lengths)), rates)
            prices = FittedPrices(plan, {}, pricing, times=times, known=lengths, prompt=prompt, budget=budget)
            rest = {name: 0.0 for name in plan.order if name not in plan.streamed}
            expected[mode].append(simulate_streams(prices, rest, {}).streaming)
    return expected


def _serial(times: UnitTimes, plan: ExecutionPlan, lengths: Sequence[int], prompt: int, sharing: Sharing) -> float:
    engines = len(replicas_of(plan, GENERATE))
    generating = Activities(sharing)
    for engine in range(engines):
        drawn = lengths[engine::engines]
        generating.start(times.start + times.step * max(drawn) + times.sample * sum(drawn), {0: 1}, lambda: None)
    while generating:
        generating.next()
    tokens = sum(lengths) + prompt * len(lengths)
    return generating.now + sum(times.token.values()) * tokens / engines * sharing.slowdown(plan.cluster.size)
