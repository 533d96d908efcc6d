"""Collects the metrics of updates until they are logged, the spans of their calls, and the latest response lengths.

`Algorithm.sample_metrics` and `update_metrics` compute an algorithm's metrics.
"""

from __future__ import annotations

import time
from collections import deque

from ...algorithms.rollout import Rollouts
from ...plan.spans import Span, loop_spans
from ...plan.timeline import Timeline
from ...runtime.calls.results import Iteration, observed


LENGTHS = 20_000  # maximum response lengths to keep
SPANS = 100_000  # maximum spans to keep: 25 MB, some 2,000 updates of 8 ranks


class RunMetrics:
    """Collects the metrics of the updates since the last log.

    Args:
        spans: maximum number of spans to keep. Whole updates are dropped, but never the latest.
    """

    def __init__(self, spans: int = SPANS) -> None:
        self._most_spans, self._kept_spans = spans, 0
        self._spans: deque[tuple[Span, ...]] = deque()  # one entry per update
        self.lengths: deque[int] = deque(maxlen=LENGTHS)
        self._window: dict[str, tuple[float, int]] = {}  # metric -> sum and number of updates
        self._losses = (0.0, 0)  # sum of this training's losses, and number of updates
        self.begin(0)

    def begin(self, episode: int) -> None:
        """Start a training at this episode. Drops the metrics of an earlier training that failed."""
        self._window.clear()
        self._losses = (0.0, 0)
        self._start_time, self._first_episode = time.time(), episode

    def episodes_per_second(self, episode: int) -> float:
        """The episodes per second of this training up to this episode."""
        return (episode - self._first_episode) / max(time.time() - self._start_time, 1e-9)

    def mean_loss(self) -> float:
        """The policy loss plus the weighted value loss, mean over the updates of this training; 0.0 without updates."""
        total, updates = self._losses
        return total / max(updates, 1)

    @property
    def timeline(self) -> Timeline:
        return Timeline(tuple(span for spans in self._spans for span in spans))

    def add(self, iteration: Iteration, start: float, end: float, vf_coef: float) -> None:
        """Add the metrics of an update.

        Args:
            start, end: times of the update, seconds since the epoch.
            vf_coef: weight of the update's value loss.
        """
        seconds, loop = end - start, tuple[Span, ...]()
        if iteration.spans:  # empty on ranks other than the first
            loop = loop_spans(iteration.spans, start, end, iteration.spans[0].step)
            self._spans.append(iteration.spans + loop)
        self._kept_spans += len(iteration.spans) + len(loop)
        while self._kept_spans > self._most_spans and len(self._spans) > 1:
            self._kept_spans -= len(self._spans.popleft())
        if "responses" in iteration.samples:
            self.lengths.extend(iteration.samples.ragged("responses").lengths.tolist())
        metrics = {
            **iteration.metrics,
            **iteration.observed,
            **observed(Rollouts(), loop),
            "time/step": seconds,
            "tokens/s": iteration.tokens / seconds,
        }
        if "loss/policy_avg" in metrics and "loss/value_avg" in metrics:
            total, updates = self._losses
            self._losses = (total + metrics["loss/policy_avg"] + vf_coef * metrics["loss/value_avg"], updates + 1)
        for name, value in metrics.items():
            total, updates = self._window.get(name, (0.0, 0))
            self._window[name] = (total + value, updates + 1)

    def take(self) -> dict[str, float]:
        """The mean of every metric over the updates since the last call, and the sum of `skipped_updates/*`; empty
        without updates."""
        means = {
            name: total / (1 if name.startswith("skipped_updates/") else updates)
            for name, (total, updates) in self._window.items()
        }
        self._window.clear()
        return means
