"""`Timeline`: the times of calls on devices, measured by the executor or estimated by the planner.

It compares both, and writes a browser trace. `runtime/executor` measures, `planner/iteration/simulate` estimates.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from ..common.errors import PlanError
from ..common.files import MAX_RECORD_BYTES, read_json_mapping
from ..common.schema import checked
from .fused import Fused, joined
from .spans import LOOP, Span


MAX_CALLS_OF_RUN = 1000  # maximum number of different calls of a run; a plan has about ten, including reallocations


class Comparison(NamedTuple):
    """Mean seconds per step of one call, estimated and measured, or `None`. `error` is their ratio minus 1."""

    call: str
    estimated: float | None
    measured: float | None
    error: float | None


@dataclass(frozen=True)
class Timeline:
    """Spans of any number of devices and steps, in any order."""

    spans: tuple[Span, ...] = ()

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        object.__setattr__(self, "spans", tuple(spans))

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """Call names, ordered by their first start."""
        return tuple(dict.fromkeys(span.call for span in sorted(self.spans, key=lambda span: span.start)))

    @cached_property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({span.device for span in self.spans}))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({span.step for span in self.spans}))

    def joined(self, fused: Fused) -> Timeline:
        """Timeline with one joint span in place of the overlapping spans of two calls that train together.

        Args:
            fused: the two calls; empty for none.
        """
        together: dict[tuple[int, int], list[Span]] = defaultdict(list)
        rest: list[Span] = []
        for span in self.spans:
            (together[span.step, span.device] if span.call in fused else rest).append(span)
        for spans in together.values():
            rest += _joined(spans, fused)
        return Timeline(rest)

    def of_step(self, step: int) -> Timeline:
        return Timeline(span for span in self.spans if span.step == step)

    def repeated(self, period: float, times: int) -> Timeline:
        """Timeline of several iterations with this timeline's spans, each `period` seconds after the previous one."""
        return Timeline(
            replace(span, start=span.start + iteration * period, end=span.end + iteration * period, step=iteration)
            for iteration in range(times)
            for span in self.spans
        )

    def between(self, start: float, end: float) -> Timeline:
        """Timeline from `start` to `end`, in seconds of this timeline's clock. Longer spans are cut; a span without its
        end has no samples."""
        return Timeline(
            replace(
                span,
                start=max(span.start, start),
                end=min(span.end, end),
                samples=span.samples if span.end <= end else 0,
            )
            for span in self.spans
            if span.start < end and span.end > start
        )

    def by_call(self) -> dict[str, float]:
        """Mean seconds per step of each call, over the steps with the call. A step counts the device that spent most
        time in the call, as the sum of its spans."""
        return {call: sum(longest.values()) / len(longest) for call, longest in self._longest().items()}

    def _longest(self) -> dict[str, dict[int, float]]:
        """call -> step -> seconds of the device that spent most time in the call."""
        busy: dict[tuple[str, int, int], float] = defaultdict(float)
        for span in self.spans:
            busy[span.call, span.step, span.device] += span.seconds
        longest: dict[str, dict[int, float]] = {call: {} for call in self.calls}
        for (call, step, _), seconds in busy.items():
            longest[call][step] = max(longest[call].get(step, 0.0), seconds)
        return longest

    @property
    def seconds_per_step(self) -> float:
        """Seconds from the first span's start to the last span's end, divided by the number of steps; 0 without
        spans."""
        if not self.spans:
            return 0.0
        return (max(span.end for span in self.spans) - min(span.start for span in self.spans)) / len(self.steps)

    def compare(self, measured: Timeline) -> tuple[Comparison, ...]:
        """Compare this timeline's estimates with a measured timeline, call by call in this timeline's order."""
        estimates, measurements = self.by_call(), measured.by_call()
        rows = []
        for call in dict.fromkeys([*estimates, *measurements]):
            estimate, measure = estimates.get(call), measurements.get(call)
            error = estimate / measure - 1 if estimate is not None and measure else None
            rows.append(Comparison(call, estimate, measure, error))
        return tuple(rows)

    def to_chrome_trace(self) -> dict[str, object]:
        """The timeline in the Trace Event Format, for chrome://tracing and Perfetto: a row per device, microseconds
        from the first start."""
        zero = min((span.start for span in self.spans), default=0.0)
        rows: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": device, "args": {"name": f"device {device}"}}
            for device in self.devices
        ]
        for span in self.spans:
            about = {"step": span.step, "tokens": span.tokens, **({"bytes": span.bytes} if span.bytes else {})}
            about |= {"samples": span.samples} if span.samples else {}
            place = {"pid": 0, "tid": span.device, "ts": (span.start - zero) * 1e6, "dur": span.seconds * 1e6}
            rows.append({"name": span.call, "cat": span.call.partition(".")[0], "ph": "X", **place, "args": about})
        return {"traceEvents": rows, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write JSON with a line for each span, with full precision."""
        lines = ",\n".join(json.dumps(astuple(span)) for span in self.spans)
        Path(path).write_text(f'{{"columns": {json.dumps(_COLUMNS)},\n"spans": [\n{lines}\n]}}\n', encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Timeline:
        """The inverse of `save`. Raises `PlanError` with the file's name if the file is not a saved timeline."""
        try:
            saved = read_json_mapping(path, "the timeline", MAX_RECORD_BYTES)
            columns = checked(list[str], saved.get("columns"), str(path), key="columns")
            rows = checked(list[list[object]], saved.get("spans"), str(path), key="spans")
            short = next((index for index, row in enumerate(rows) if len(row) != len(columns)), None)
            if short is not None:
                raise PlanError(f"{path}: spans[{short}] has {len(rows[short])} values for {len(columns)} columns.")
            named = [dict(zip(columns, row, strict=True)) for row in rows]
            timeline = Timeline(checked(list[Span], named, str(path), key="spans"))
        except PlanError as error:
            raise PlanError(f"{path} is no saved timeline: {_first(error, path)}.") from None
        if len(timeline.calls) > MAX_CALLS_OF_RUN:
            raise PlanError(f"{path} is no saved timeline: it has spans of {len(timeline.calls):,} different calls.")
        return timeline

    @property
    def warm(self) -> Timeline:
        """The timeline without its first update, in which kernels are compiled and caches are filled; unchanged if it
        has fewer than three updates. All seconds per update in reports are means over it."""
        if len(self.steps) < 3:
            return self
        return Timeline(span for span in self.spans if span.step != self.steps[0])

    @cached_property
    def updates(self) -> dict[int, tuple[float, float]]:
        """(start, end) of each update: of its loop spans if recorded (`loop_spans`), otherwise of all spans."""
        loop = [span for span in self.spans if span.call == LOOP]
        has_loop = {span.step for span in loop} == set(self.steps)
        times: dict[int, tuple[float, float]] = {}
        for span in loop if has_loop else self.spans:
            start, end = times.get(span.step, (span.start, span.end))
            times[span.step] = min(start, span.start), max(end, span.end)
        return dict(sorted(times.items()))

    @property
    def seconds_per_update(self) -> float:
        """Mean seconds of an update, without the time between updates (logging, evaluation); 0 without spans. If
        batches are generated ahead and no loop was recorded, from an update's end to the next one's end."""
        if not self.spans:
            return 0.0
        if self.runs_ahead and not any(span.call == LOOP for span in self.spans):
            return self.seconds_between_ends
        return sum(end - start for start, end in self.updates.values()) / len(self.updates)

    @property
    def seconds_between_updates(self) -> float:
        """Mean seconds from an update's end to the next one's start; 0 if the loop was not recorded."""
        times = list(self.updates.items())
        if len(times) < 2 or not any(span.call == LOOP for span in self.spans):
            return 0.0
        gaps = [start - end for (_, (_, end)), (_, (start, _)) in pairwise(times)]
        return max(0.0, sum(gaps) / len(gaps))

    def seconds_by_call(self) -> dict[str, float]:
        """Mean seconds per update of each call, as in `by_call` but over all updates, with and without the call."""
        return {call: sum(longest.values()) / len(self.steps) for call, longest in self._longest().items()}

    @property
    def runs_ahead(self) -> bool:
        """True if a device runs a call for two iterations at the same time."""
        latest: dict[tuple[str, int], Span] = {}
        for span in sorted(self.spans, key=lambda span: (span.start, span.end)):
            before = latest.get((span.call, span.device))
            if before is not None and before.step != span.step and span.start < before.end - 1e-6:
                return True
            if before is None or span.end > before.end:
                latest[span.call, span.device] = span
        return False

    @property
    def overlaps(self) -> bool:
        """True if two spans of a device overlap for more than a hundredth of the timeline."""
        start = min((span.start for span in self.spans), default=0.0)
        end = max((span.end for span in self.spans), default=0.0)
        hundredth = 0.01 * (end - start)
        ends: dict[int, float] = {}  # by device
        for span in sorted(self.spans, key=lambda span: (span.start, span.end)):
            if min(ends.get(span.device, span.start), span.end) - span.start > hundredth:
                return True
            ends[span.device] = max(ends.get(span.device, span.end), span.end)
        return False

    @property
    def seconds_between_ends(self) -> float:
        """Mean seconds from the end of a step to the end of the next; for a single step from its start to its end."""
        if len(self.steps) < 2:
            return self.seconds_per_step
        ends = [max(span.end for span in self.spans if span.step == step) for step in (self.steps[0], self.steps[-1])]
        return (ends[1] - ends[0]) / (len(self.steps) - 1)

    def lanes(self) -> dict[Span, tuple[int, int]]:
        """(lane, number of the device's lanes) for each span. Concurrent spans of a device have different lanes."""
        ends: dict[int, list[float]] = defaultdict(list)  # device -> end of each lane
        places: dict[Span, int] = {}
        for span in sorted(self.spans, key=lambda span: (span.start, span.end)):
            lane_ends = ends[span.device]
            lane = next((lane for lane, end in enumerate(lane_ends) if end <= span.start + 1e-9), len(lane_ends))
            lane_ends[lane : lane + 1] = [span.end]
            places[span] = lane
        return {span: (lane, len(ends[span.device])) for span, lane in places.items()}

    def streamed_calls(self) -> set[str]:
        """The calls with sample counts, if some device runs one of them in several spans in a step."""
        counted = [span for span in self.spans if span.samples]
        spans = Counter((span.call, span.device, span.step) for span in counted)
        return {span.call for span in counted} if any(count > 1 for count in spans.values()) else set()

    def samples_ended(self, call: str) -> tuple[list[float], list[int]]:
        """(times, number of samples finished until then) from the call's first start on; restarts in each step."""
        times, samples = list[float](), list[int]()
        for step in self.steps:
            spans = sorted((s for s in self.spans if s.call == call and s.step == step), key=lambda span: span.end)
            times += [min((span.start for span in spans), default=0.0)][: len(spans)] + [span.end for span in spans]
            samples += [0][: len(spans)] + list(accumulate(span.samples for span in spans))
        return times, samples


def _joined(spans: list[Span], fused: Fused) -> list[Span]:
    """One span in place of both calls' spans on a device in a step, if they overlap."""
    latest, earliest = max(span.start for span in spans), min(span.end for span in spans)
    if len(spans) != 2 or spans[0].call == spans[1].call or latest >= earliest:
        return spans
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    return [replace(spans[0], call=joined(fused), start=start, end=end, tokens=sum(span.tokens for span in spans))]


def _first(error: PlanError, path: str | Path) -> str:
    return error.problems[0].removeprefix(f"{path}: ").removesuffix(".")


_COLUMNS = [part.name for part in fields(Span)]
