"""`FunctionSpans`: when each rank ran the user's reward functions and tools, which TRL's loop calls on the host.

PPO's run inside the plan's `reward.forward`, and are timed in `algorithms/rewards`.
"""

from __future__ import annotations

import functools
import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transformers import Trainer

from ...algorithms.async_functions import awaited, is_async
from ...plan.spans import TOOL, TOOL_WORKERS, Span
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
        # (span name, step) -> (completion, seconds) of each call with a completion
        self._serial: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
        self._all_spans: list[Span] = []

    def timed(self, name: str, function: Callable[..., Any], completion: int | None = None) -> Callable[..., Any]:
        """Wrap a function so that each call has a span. The wrapper of an async function (`is_async`) is async. Any
        other wrapper returns the result, and awaits it first if it is awaitable.

        Args:
            name: name of the spans.
            completion: position of the completion that calls a tool. What threads would bring is then estimated.
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
            with self._timing(name, completion):
                return awaited(function(*args, **kwargs))

        timed.__name__ = _name(function)
        return timed

    @contextmanager
    def _timing(self, name: str, completion: int | None = None) -> Iterator[None]:
        start, step = time.time(), self.trainer.state.global_step
        try:
            yield
        finally:
            span = Span(name, self.trainer.accelerator.process_index, start, max(start, time.time()), step)
            self._own.append(span)
            if completion is not None:
                self._serial[name, step].append((completion, span.seconds))

    def time_tools(self) -> None:
        """Time the tools of a generation, which TRL calls by name. TRL looks them up anew for each generation."""
        for tools in [
            *(getattr(self.trainer, "_sync_tool_dicts", None) or ()),
            *(getattr(self.trainer, "_async_tool_dicts", None) or ()),
        ]:
            tools |= {name: self.timed(f"{TOOL}{name}", tool) for name, tool in tools.items()}

    def collect(self) -> None:
        """Send this rank's spans to rank 0. All ranks call this together, after the rewards of a generation."""
        estimates = {key: threaded_seconds(calls, TOOL_WORKERS) for key, calls in self._serial.items()}
        local, self._own = self._own, []  # tools of later batches may run meanwhile
        merged = _merged(local)
        self._serial.clear()
        local_spans = [replace(span, threaded_s=estimates.pop((span.call, span.step), 0.0)) for span in merged]
        per_rank = all_gather_object(local_spans, self.trainer.placement.control)
        if self.trainer.accelerator.is_main_process:
            self._all_spans += [span for rank_values in per_rank for span in rank_values]

    def take(self) -> tuple[Span, ...]:
        """The spans of all ranks since the last call, on rank 0; empty on the others."""
        taken, self._all_spans = tuple(self._all_spans), []
        return taken


def threaded_seconds(calls: Iterable[tuple[int, float]], workers: int) -> float:
    """Seconds that calls take in a number of threads, each completion's calls one after the other.

    Args:
        calls: (completion, seconds) of each call.
    """
    threads = [0.0] * workers  # until when each is busy
    ends: dict[int, float] = defaultdict(float)  # of each completion's latest call
    for completion, seconds in calls:
        ends[completion] = max(threads[0], ends[completion]) + seconds
        heapq.heapreplace(threads, ends[completion])
    return max(threads)


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
