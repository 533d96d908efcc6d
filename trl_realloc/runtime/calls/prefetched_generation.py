"""`PrefetchedGeneration`: the next iteration's generation, begun on this rank while other ranks still train.

The trainer and `executor` decide when it may begin. The engine generates in a separate process, so this rank continues
its iteration meanwhile.
"""

from __future__ import annotations

import time

from ...algorithms.prompt_batches import PromptBatch
from ...engines.base import BackgroundEngine, EngineError, Generation
from ..parameters.reallocation import Moved
from ..placement.placement import Placement
from ..samples.routes import replica, shares_of_samples
from . import generate_and_score as calls
from .generate_and_score import CallSettings, Step


class PrefetchedGeneration:
    """Updates the call's parameters and starts this rank's engine. All ranks that take part in the update make one
    together.

    Args:
        call: `plan.streams.early_call`.
        step, batch: the next iteration and its global batch.

    Attributes:
        generation: the running generation; `None` on a rank without an engine, and if the update failed.
        start: start of the generation, in seconds of `time.time`.
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
                index, graph_call = replica(placement.plan, call, placement.rank), placement.plan.graph.call(call)
                (share,) = shares_of_samples(placement.plan, graph_call, batch.prompts, [index])
                requests = calls.requests_of(settings, graph_call, share.samples, step)
                self.generation = engine.start(requests, calls.sampling_of(settings, graph_call, step))
        except EngineError as error:  # raised in the next iteration; this one can still end and be saved
            self._error = error

    def is_of(self, step: Step, batch: PromptBatch) -> bool:
        """True if this is the generation of the given iteration."""
        return self.step.number == step.number and self.batch is batch and step.sampling is None

    def refreshed(self) -> Moved | None:
        """The finished reallocation. Raises the `EngineError` of the update or of the engine's start."""
        if self._error is not None:
            raise self._error
        return self._moved

    def close(self) -> None:
        """End the generation, if another iteration is run next. May be called twice."""
        if self.generation is not None:
            self.generation.close()
