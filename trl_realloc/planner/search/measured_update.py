"""`MeasuredUpdate`: the seconds of the calls of one update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ...plan.spans import Span
from ...plan.timeline import Timeline


@dataclass(frozen=True)
class MeasuredUpdate:
    """The seconds of one iteration of a run.

    Args:
        spans: seconds by name: of a call on the slowest device; of a reallocation the median over the devices, because
            devices that arrive early wait for the others.
        seconds: seconds from the first span's start to the last span's end, summed over the steps of the iteration.
        lengths: tokens of the responses.
        device_seconds: seconds summed over all devices, by call.
    """

    spans: Mapping[str, float]
    seconds: float
    lengths: tuple[int, ...]
    device_seconds: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(spans: Iterable[Span], lengths: Sequence[int], iterations: int = 1) -> MeasuredUpdate:
        """Mean seconds of `iterations` iterations, from the spans of all devices. Host work does not count."""
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
