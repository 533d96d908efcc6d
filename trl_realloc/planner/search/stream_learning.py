"""Corrections of the estimates from one update of a run with streams. The seconds of a streamed call depend on when its
samples arrive. So its spans on all devices together are compared with those of a simulation at the update's response
lengths.

Corrections from several updates, and from updates without streams, are in `learning`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ...plan.execution_plan import ExecutionPlan
from ...plan.model_spec import ModelSpec
from ...plan.timeline import Span
from ..cost.corrections import Corrections, bounded, of_batch
from ..cost.pricing import Pricing
from ..iteration.stream import replicas_of
from ..iteration.stream_cost import StreamPrices
from ..iteration.stream_simulation import simulate_streams
from .measured_update import MeasuredUpdate


class StreamedEstimates:
    """The simulation of a plan with streams, to be compared with measured updates. Samples are handed over in no time,
    because the spans of streamed calls begin when their samples are there.

    Args:
        specs: the models that each call runs, by the call's name.
        pricing: without corrections.
        moves: estimated seconds of each reallocation, by the call that receives the parameters.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        specs: Mapping[str, Sequence[ModelSpec]],
        pricing: Pricing,
        moves: Mapping[str, float],
    ) -> None:
        self.plan, self.specs, self.pricing, self.moves = plan, specs, pricing, moves
        self._names = {f"{edge.source} -> {edge.target}": edge.target for edge in plan.reallocations}

    def _told(self, spans: Iterable[Span]) -> list[Span]:
        """Those spans of a simulation that a run tells too: of a replica's streamed calls those of its first device."""
        first = {name: {ranks[0] for ranks in replicas_of(self.plan, name)} for name in self.plan.streamed}
        return [span for span in spans if span.call not in first or span.device in first[span.call]]

    def functions(self, update: MeasuredUpdate, work: Mapping[str, float]) -> dict[str, float]:
        """Measured seconds of a device's share of each call that runs reward functions.

        Args:
            work: estimated seconds of each call; 0 of reward functions.
        """
        shares = {name: update.device_seconds.get(name, 0.0) / self.plan.mesh(name).size for name in self.plan.streamed}
        return {name: shares.get(name, update.spans.get(name, 0.0)) for name, seconds in work.items() if seconds == 0.0}

    def refined(
        self,
        factors: Mapping[str, float],
        functions: Mapping[str, float],
        update: MeasuredUpdate,
        work: Mapping[str, float],
    ) -> dict[str, float]:
        """Better factors, by call and by reallocation: those with which this update would have been estimated, if other
        factors changed nothing of which calls slow each other down.

        Args:
            factors: those known until now; 1 where there is none.
            functions, work: as in `functions`.
        """
        calls = {name: factors.get(name, 1.0) for name in self.plan.order}
        corrections = Corrections(calls, functions=of_batch(self.plan, functions), handover=0.0)
        workload = self.pricing.workload.of_lengths(update.lengths)
        pricing = replace(self.pricing, workload=workload, corrections=corrections)
        prices = StreamPrices.of(self.plan, self.specs, pricing)
        seconds = {name: functions.get(name, calls[name] * own) for name, own in work.items()}
        moves = {
            target: factors.get(name, 1.0) * self.moves[target]
            for name, target in self._names.items()
            if target in self.moves
        }
        expected = MeasuredUpdate.of(self._told(simulate_streams(prices, seconds, moves).spans), update.lengths)
        better = dict(factors)
        for name in (*self.plan.order, *self._names):
            of = "device_seconds" if name in self.plan.streamed else "spans"
            measured, estimated = getattr(update, of).get(name, 0.0), getattr(expected, of).get(name, 0.0)
            if measured > 0 and estimated > 0 and name not in functions:
                better[name] = bounded(factors.get(name, 1.0) * measured / estimated)
        return better
