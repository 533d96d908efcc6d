from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.plan.spans import Span
from trl_realloc.plan.timeline import Comparison, Timeline


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


@given(timelines)
def test_the_steps_of_a_timeline_have_all_of_its_spans(timeline: Timeline) -> None:
    steps = Timeline(span for step in timeline.steps for span in timeline.of_step(step).spans)
    assert steps.by_call() == pytest.approx(timeline.by_call())


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
