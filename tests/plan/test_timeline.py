from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.plan.timeline import Comparison, Span, Timeline


CALLS = ("actor.generate", "reference.forward", "actor.train")
seconds = st.floats(0, 1e6)
spans = st.builds(
    lambda call, device, start, length, step, tokens: Span(call, device, start, start + length, step, tokens),
    st.sampled_from(CALLS),
    st.integers(0, 3),
    seconds,
    seconds,
    st.integers(0, 2),
    st.integers(0, 1 << 40),
)
timelines = st.builds(Timeline, st.lists(spans, max_size=20))


def two_steps() -> Timeline:
    """Generation on two devices for 3 s and then 5 s; training on device 0 in two spans, in the first step alone."""
    return Timeline(
        [
            Span("actor.generate", 0, 10.0, 12.0, 0, tokens=100),
            Span("actor.generate", 1, 10.0, 13.0, 0, tokens=150),
            Span("actor.train", 0, 13.0, 14.0, 0),
            Span("actor.train", 0, 14.0, 14.5, 0),
            Span("actor.generate", 0, 15.0, 20.0, 1),
            Span("actor.generate", 1, 15.0, 19.0, 1),
        ]
    )


def test_a_calls_time_is_its_busiest_devices_averaged_over_the_steps_that_have_it() -> None:
    assert two_steps().by_call() == {"actor.generate": 4.0, "actor.train": 1.5}


@given(timelines)
def test_a_calls_time_is_what_the_definition_says(timeline: Timeline) -> None:
    for call, mean in timeline.by_call().items():
        longest = []
        for step in timeline.steps:
            busy = [
                sum(
                    span.seconds
                    for span in timeline.spans
                    if (span.call, span.step, span.device) == (call, step, device)
                )
                for device in timeline.devices
            ]
            if any(span.call == call and span.step == step for span in timeline.spans):
                longest.append(max(busy))
        assert mean == pytest.approx(sum(longest) / len(longest))
    assert set(timeline.by_call()) == {span.call for span in timeline.spans}


@given(timelines, st.floats(0.125, 8))
def test_estimates_that_are_off_by_a_factor_are_off_by_it_in_every_call(timeline: Timeline, factor: float) -> None:
    scaled = Timeline(
        Span(span.call, span.device, span.start * factor, span.end * factor, span.step) for span in timeline.spans
    )
    for row in scaled.compare(timeline):
        assert row.measured == timeline.by_call()[row.call]
        if row.measured and row.measured > 1e-3:
            assert row.error == pytest.approx(factor - 1, abs=1e-3)


def test_a_call_that_is_on_one_side_alone_is_compared_with_nothing() -> None:
    estimate = Timeline([Span("actor.generate", 0, 0.0, 6.0, 0), Span("critic.train", 0, 6.0, 7.0, 0)])
    assert estimate.compare(two_steps()) == (
        Comparison("actor.generate", 6.0, 4.0, 0.5),
        Comparison("critic.train", 1.0, None, None),
        Comparison("actor.train", None, 1.5, None),
    )


def test_a_call_that_took_no_time_has_no_relative_error() -> None:
    nothing = Timeline([Span("actor.train", 0, 1.0, 1.0, 0)])
    assert two_steps().compare(nothing)[1] == Comparison("actor.train", 1.5, 0.0, None)


@given(timelines, timelines)
def test_the_spans_of_several_devices_are_put_together(one: Timeline, other: Timeline) -> None:
    both = one + other
    assert both.spans == one.spans + other.spans
    assert set(both.devices) == {*one.devices, *other.devices}
    assert Timeline(span for step in both.steps for span in both.of_step(step).spans).by_call() == pytest.approx(
        both.by_call()
    )


@given(timeline=timelines)
def test_a_timeline_is_loaded_as_it_was_saved(timeline: Timeline, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "timeline.json"
    timeline.save(path)
    assert Timeline.load(path) == timeline


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"columns": ["call"], "spans": [["actor.train"]]}',
        '{"columns": ["call", "device", "start", "end", "step"], "spans": [["actor.train", 0, 2.0, 1.0, 0]]}',
    ],
)
def test_a_file_that_holds_no_timeline_is_refused_with_its_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "spans.json").write_text(text)
    with pytest.raises(ValueError, match=r"spans\.json is no saved timeline"):
        Timeline.load(tmp_path / "spans.json")


@pytest.mark.parametrize("end", [0.5, float("nan")])
def test_a_span_cannot_end_before_it_starts(end: float) -> None:
    with pytest.raises(ValueError, match=r"actor\.train on device 3 ends"):
        Span("actor.train", 3, 1.0, end, 0)


@given(timelines)
def test_a_trace_has_every_span_in_microseconds_on_its_devices_row(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(timeline.to_chrome_trace()))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    first = min((span.start for span in timeline.spans), default=0.0)
    rows = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert rows == {device: f"device {device}" for device in timeline.devices}
    assert [(event["name"], event["tid"], event["args"]["step"], event["args"]["tokens"]) for event in events] == [
        (span.call, span.device, span.step, span.tokens) for span in timeline.spans
    ]
    for event, span in zip(events, timeline.spans, strict=True):
        assert event["ts"] == pytest.approx((span.start - first) * 1e6)
        assert event["dur"] == pytest.approx(span.seconds * 1e6)


def test_a_picture_has_a_colour_for_each_call_and_a_row_for_each_device(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    timeline = Timeline([Span("actor.generate", 0, 0.0, 1.0, 0), Span("reference.forward", 1, 1.0, 2.0, 0)])
    timeline.draw(tmp_path / "one.png")
    pixels = (image.imread(tmp_path / "one.png")[..., :3] * 255).round().astype(int)
    colours = {"actor.generate": (31, 119, 180), "reference.forward": (255, 127, 14)}
    where = {
        call: [(y, x) for y, x in zip(*(pixels == colour).all(axis=-1).nonzero(), strict=True)]
        for call, colour in colours.items()
    }
    assert all(len(found) > 1000 for found in where.values())
    # The bars, without the legend's swatches: device 0 above device 1, and 0 s to 1 s left of 1 s to 2 s.
    middle = {call: sorted(found)[len(found) // 2] for call, found in where.items()}
    assert middle["actor.generate"][0] < middle["reference.forward"][0]
    assert middle["actor.generate"][1] < middle["reference.forward"][1]
    timeline.draw(tmp_path / "one.svg")
    drawn = (tmp_path / "one.svg").read_text()
    assert "actor.generate" in drawn or "<path" in drawn


def test_a_picture_of_generation_ahead_draws_iterations_side_by_side(tmp_path: Path) -> None:
    spans = [Span("generate", 1, 2.0 * step, 2.0 * step + 5.0, step, samples=2) for step in range(4)]
    spans += [Span("train", 0, 5.0 + 2 * step, 7.0 + 2 * step, step) for step in range(4)]
    ahead = Timeline(spans)
    assert ahead.runs_ahead
    assert ahead.seconds_between_ends == 2.0
    lanes = ahead.lanes()
    for one, other in itertools.combinations(spans, 2):
        if one.device == other.device and one.start < other.end and other.start < one.end:
            assert lanes[one] != lanes[other], "side by side"
    assert {of for span, (_, of) in lanes.items() if span.call == "generate"} == {3}
    ahead.draw(tmp_path / "ahead.png")
    assert (tmp_path / "ahead.png").stat().st_size > 3000
    one_after_the_other = [Span("generate", 1, 6.0 * step, 6.0 * step + 5.0, step) for step in range(4)]
    assert not Timeline(one_after_the_other).runs_ahead


def test_a_picture_hides_no_call_behind_another_on_the_same_device(tmp_path: Path) -> None:
    """Such as the generation ahead of an engine whose device scores meanwhile."""
    generates = [Span("generate", 0, 0.0, 1.0, 0), Span("generate", 0, 1.0, 3.0, 1)]
    for start, beside in ((2.0, True), (2.999, False)):
        timeline = Timeline([*generates, Span("forward", 0, start, start + 1.0, 0)])
        assert not timeline.runs_ahead
        assert timeline.overlaps == beside
        timeline.draw(tmp_path / f"{beside}.png")


def test_a_picture_of_many_devices_has_one_row_for_neighbours_with_the_same_work(tmp_path: Path) -> None:
    """As in an estimate; of 128 devices each with its row nobody reads a picture of 46 inches."""

    def height(spans: Sequence[Span]) -> int:
        Timeline(spans).draw(tmp_path / "many.png")
        return int.from_bytes((tmp_path / "many.png").read_bytes()[20:24])  # of the PNG's header

    alike = [Span("actor.train" if rank < 64 else "critic.train", rank, 0.0, 1.0, 0) for rank in range(128)]
    assert height(alike) == height(alike[63:65])
    assert height([replace(span, end=1.0 + span.device) for span in alike]) > 10 * height(alike)


def test_a_timeline_without_spans_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without spans cannot be drawn"):
        Timeline().draw(tmp_path / "empty.png")
    assert not (tmp_path / "empty.png").exists()


def test_timelines_need_matplotlib_only_to_draw() -> None:
    code = "import sys, trl_realloc.plan.timeline; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_picture_of_streams_shows_how_many_samples_each_call_has_ended(tmp_path: Path) -> None:
    spans = [
        Span("actor.generate", 0, 0.0, 1.0, 0, samples=3),
        Span("actor.generate", 0, 1.0, 4.0, 0, samples=1),
        Span("reference.forward", 1, 1.0, 2.0, 0, samples=3),
        Span("reference.forward", 1, 4.0, 4.5, 0, samples=1),
        Span("actor.train", 0, 5.0, 6.0, 0),
    ]
    timeline = Timeline(spans)
    assert timeline.streamed_calls() == {"actor.generate", "reference.forward"}
    assert timeline.samples_ended("reference.forward") == ([1.0, 2.0, 4.5], [0, 3, 4])
    timeline.draw(tmp_path / "streams.png")
    Timeline(spans[-1:]).draw(tmp_path / "whole.png")
    assert not Timeline([spans[0], spans[-1]]).streamed_calls(), "calls of whole batches have one figure"
    timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == timeline
