"""`FunctionSpans`: when each rank ran the user's reward functions and tools, which TRL's loop calls on the host.

PPO's run inside the plan's `reward.forward`, and are timed in `algorithms/rewards`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer

from ...algorithms.async_functions import awaited, is_async
from ...plan.spans import TOOL, Span
from ...runtime.process_groups import all_gather_object


AT_ONCE_S = 1e-3  # calls of one function with shorter gaps are one span


class FunctionSpans:
    """Times functions, and collects the spans of all ranks on rank 0.

    Args:
        trainer: a `PlannedPolicyTrainer` whose run has a plan.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._own: list[Span] = []
        self._all_spans: list[Span] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that each call has a span. The wrapper of an async function (`is_async`) is async. Any
        other wrapper returns the result, and awaits it first if it is awaitable.

        Args:
            name: name of the spans.
        """
        if is_async(function):

            @functools.wraps(function, updated=())
            async def timed_async(*args: Any, **kwargs: Any) -> Any:
                with self._timing(name):
                    return await function(*args, **kwargs)

            timed_async.__name__ = _name(function)
            return timed_async

        @functools.wraps(function, updated=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._timing(name):
                return awaited(function(*args, **kwargs))

        timed.__name__ = _name(function)
        return timed

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        start, step = time.time(), self.trainer.state.global_step
        try:
            yield
        finally:
            rank = self.trainer.accelerator.process_index
            self._own.append(Span(name, rank, start, max(start, time.time()), step))

    def time_tools(self) -> None:
        """Time the tools of a generation, which TRL calls by name. TRL looks them up anew for each generation."""
        for tools in [
            *(getattr(self.trainer, "_sync_tool_dicts", None) or ()),
            *(getattr(self.trainer, "_async_tool_dicts", None) or ()),
        ]:
            tools |= {name: self.timed(f"{TOOL}{name}", tool) for name, tool in tools.items()}

    def collect(self) -> None:
        """Send this rank's spans to rank 0. All ranks call this together, after the rewards of a generation."""
        local_spans, self._own = _merged(self._own), []
        per_rank = all_gather_object(local_spans, self.trainer.placement.control)
        if self.trainer.accelerator.is_main_process:
            self._all_spans += [span for rank_values in per_rank for span in rank_values]

    def take(self) -> tuple[Span, ...]:
        """The spans of all ranks since the last call, on rank 0; empty on the others."""
        taken, self._all_spans = tuple(self._all_spans), []
        return taken


def _name(function: Any) -> str:
    """The name of a function or, if it has none, of its class."""
    return str(getattr(function, "__name__", type(function).__name__))


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Merge spans of one function that overlap or follow each other at once, such as tool calls, one per sample."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.call, span.step, span.start)):
        last = merged[-1] if merged else None
        if last is not None and (last.call, last.step) == (span.call, span.step) and span.start <= last.end + AT_ONCE_S:
            merged[-1] = Span(last.call, last.device, last.start, max(last.end, span.end), last.step)
        else:
            merged.append(span)
    return merged
