"""`MeasuredUpdate`: the seconds that the calls of one update took. What they teach the planner is in `learning`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ...plan.timeline import Span, Timeline


@dataclass(frozen=True)
class MeasuredUpdate:
    """The seconds of one iteration of a run.

    Args:
        spans: by the name of a call, of the device that took longest; by that of a reallocation, the median of the
            devices, because devices that arrive early wait for the others.
        seconds: from the first span's start to the last one's end; where an iteration has several optimizer steps of
            another library's loop, their sum.
        lengths: of the responses, tokens.
        device_seconds: by the name of a call, of all devices together.
    """

    spans: Mapping[str, float]
    seconds: float
    lengths: tuple[int, ...]
    device_seconds: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(spans: Iterable[Span], lengths: Sequence[int], iterations: int = 1) -> MeasuredUpdate:
        """Mean seconds of `iterations` iterations, from the spans of all devices. Work on the host is left out."""
        timeline = Timeline(span for span in spans if not span.is_host_work)
        busy: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for span in timeline.spans:
            busy[span.call][span.device] += span.seconds
        seconds = {
            name: float(median(of_device.values()) if " -> " in name else max(of_device.values())) / iterations
            for name, of_device in busy.items()
        }
        together = {name: sum(of_device.values()) / iterations for name, of_device in busy.items()}
        whole = sum(timeline.of_step(step).seconds_per_step for step in timeline.steps)
        return MeasuredUpdate(seconds, whole / iterations, tuple(lengths), together)
