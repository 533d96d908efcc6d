"""`EarlyGeneration`: the next iteration's generation, begun on this rank while other ranks still train in this one.

When it may begin is decided by the trainer and `executor`. The engine generates in its own process, so this rank goes
on with the end of its iteration meanwhile.
"""

from __future__ import annotations

import time

from ...algorithms.prompt_batches import PromptBatch
from ...engines.base import BackgroundEngine, EngineError, Generation
from ..parameters.reallocation import Moved
from ..placement.placement import Placement
from ..samples.routes import replica
from ..samples.shares import shares_of_samples
from . import generate_and_score as calls
from .generate_and_score import CallSettings, Step


class EarlyGeneration:
    """Updates the call's parameters and starts this rank's engine. All ranks that take part in the update make one
    together.

    Args:
        call: `plan.streams.early_call`.
        step, batch: the next iteration and its global batch.

    Attributes:
        generation: `None` on a rank without an engine, and where the update failed.
        start: when it began; seconds of `time.time`.
    """

    def __init__(self, placement: Placement, settings: CallSettings, call: str, step: Step, batch: PromptBatch) -> None:
        self.call, self.step, self.batch = call, step, batch
        self.generation: Generation | None = None
        self._moved: Moved | None = None
        self._error: EngineError | None = None
        self.start = time.time()
        try:
            self._moved = placement.refresh(call)
            self.start = time.time()
            engine = placement.generators.get(call)
            if isinstance(engine, BackgroundEngine):
                own, graph_call = replica(placement.plan, call, placement.rank), placement.plan.graph.call(call)
                (share,) = shares_of_samples(placement.plan, graph_call, batch.prompts, [own])
                requests = calls.requests_of(settings, graph_call, share.samples, step)
                self.generation = engine.start(requests, calls.sampling_of(settings, graph_call, step))
        except EngineError as error:  # of the next iteration: this one may end well, and be saved
            self._error = error

    def is_of(self, step: Step, batch: PromptBatch) -> bool:
        """True if it is the generation of this iteration."""
        return self.step.number == step.number and self.batch is batch and step.sampling is None

    def refreshed(self) -> Moved | None:
        """The reallocation that was done. Raises the `EngineError` of the update or of the engine's start."""
        if self._error is not None:
            raise self._error
        return self._moved

    def close(self) -> None:
        """End it, if it is not the generation of the iteration that is run next. May be called twice."""
        if self.generation is not None:
            self.generation.close()
